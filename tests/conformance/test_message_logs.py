"""The conformance suite: what workers log of messages."""

from pgqrs.testing.conformance.message_logs import *  # noqa: F403
