"""The conformance suite: scheduling."""

from pgqrs.testing.conformance.scheduling import *  # noqa: F403
