"""The conformance suite: retrying."""

from pgqrs.testing.conformance.retrying import *  # noqa: F403
