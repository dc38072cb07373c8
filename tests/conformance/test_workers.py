"""The conformance suite: workers."""

from pgqrs.testing.conformance.workers import *  # noqa: F403
