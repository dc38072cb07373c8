"""The conformance suite: which message a task is handling."""

from pgqrs.testing.conformance.current_messages import *  # noqa: F403
