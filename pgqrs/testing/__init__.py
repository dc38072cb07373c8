"""Helpers for tests: a clock that only moves when told to, running off what is enqueued, a
PostgreSQL server, the conformance suite. Fixtures for pytest are in `pgqrs.testing.plugin`.

Nothing here is imported by `import pgqrs`.
"""

from pgqrs.testing.clock import ManualClock
from pgqrs.testing.inlining import inline
from pgqrs.testing.tasks import assert_enqueued, drain, enqueued

__all__ = ["ManualClock", "assert_enqueued", "drain", "enqueued", "inline"]
