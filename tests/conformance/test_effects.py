"""The conformance suite: effects."""

from pgqrs.testing.conformance.effects import *  # noqa: F403
