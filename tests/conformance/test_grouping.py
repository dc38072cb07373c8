"""The conformance suite: grouping."""

from pgqrs.testing.conformance.grouping import *  # noqa: F403
