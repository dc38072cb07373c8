"""The conformance suite: bounds."""

from pgqrs.testing.conformance.bounding import *  # noqa: F403
