"""The conformance suite: streams."""

from pgqrs.testing.conformance.streaming import *  # noqa: F403
