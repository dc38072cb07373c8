"""The conformance suite: workflows."""

from pgqrs.testing.conformance.workflows import *  # noqa: F403
