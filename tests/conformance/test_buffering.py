"""The conformance suite: buffering."""

from pgqrs.testing.conformance.buffering import *  # noqa: F403
