"""The conformance suite: tasking."""

from pgqrs.testing.conformance.tasking import *  # noqa: F403
