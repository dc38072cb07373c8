"""The conformance suite: archiving."""

from pgqrs.testing.conformance.archiving import *  # noqa: F403
