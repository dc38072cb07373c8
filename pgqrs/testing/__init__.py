"""Helpers for tests: a clock that only moves when told to, a PostgreSQL server, the conformance
suite.

Nothing here is imported by `import pgqrs`.
"""

from pgqrs.testing.clock import ManualClock

__all__ = ["ManualClock"]
