"""The conformance suite: expiring."""

from pgqrs.testing.conformance.expiring import *  # noqa: F403
