"""The conformance suite: the helpers for applications' tests."""

from pgqrs.testing.conformance.draining import *  # noqa: F403
