"""The conformance suite: replay."""

from pgqrs.testing.conformance.replaying import *  # noqa: F403
