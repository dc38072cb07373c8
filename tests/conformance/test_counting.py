"""The conformance suite: counting."""

from pgqrs.testing.conformance.counting import *  # noqa: F403
