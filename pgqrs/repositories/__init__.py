"""The SQL, one module per table. Functions take a `Connection` and return frozen dataclasses.

`now` is an argument everywhere. It is None when the database tells the time itself, which
PostgreSQL does; see `pgqrs.repositories.expressions.moment`.
"""
