"""The conformance suite: working."""

from pgqrs.testing.conformance.working import *  # noqa: F403
