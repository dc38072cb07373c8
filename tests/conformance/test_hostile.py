"""The conformance suite: rows that were written past the library."""

from pgqrs.testing.conformance.hostile import *  # noqa: F403
