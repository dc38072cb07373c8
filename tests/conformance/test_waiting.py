"""The conformance suite: waiting."""

from pgqrs.testing.conformance.waiting import *  # noqa: F403
