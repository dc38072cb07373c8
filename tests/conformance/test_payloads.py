"""The conformance suite: payloads."""

from pgqrs.testing.conformance.payloads import *  # noqa: F403
