"""The conformance suite: transactions."""

from pgqrs.testing.conformance.transactions import *  # noqa: F403
