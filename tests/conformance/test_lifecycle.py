"""The conformance suite: lifecycle."""

from pgqrs.testing.conformance.lifecycle import *  # noqa: F403
