"""The conformance suite: enqueueing."""

from pgqrs.testing.conformance.enqueueing import *  # noqa: F403
