"""The conformance suite: long steps."""

from pgqrs.testing.conformance.long_steps import *  # noqa: F403
