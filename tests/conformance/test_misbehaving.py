"""The conformance suite: misbehaving."""

from pgqrs.testing.conformance.misbehaving import *  # noqa: F403
