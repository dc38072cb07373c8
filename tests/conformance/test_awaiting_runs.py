"""The conformance suite: awaiting runs."""

from pgqrs.testing.conformance.awaiting_runs import *  # noqa: F403
