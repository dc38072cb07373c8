"""The conformance suite: queues."""

from pgqrs.testing.conformance.queues import *  # noqa: F403
