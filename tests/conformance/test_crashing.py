"""The conformance suite: crashing."""

from pgqrs.testing.conformance.crashing import *  # noqa: F403
