"""The conformance suite: starting in transactions."""

from pgqrs.testing.conformance.starting_in_transactions import *  # noqa: F403
