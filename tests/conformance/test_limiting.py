"""The conformance suite: limiting."""

from pgqrs.testing.conformance.limiting import *  # noqa: F403
