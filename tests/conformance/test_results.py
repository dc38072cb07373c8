"""The conformance suite: results."""

from pgqrs.testing.conformance.results import *  # noqa: F403
