"""The conformance suite: many tasks and many runs at once."""

from pgqrs.testing.conformance.sending_many import *  # noqa: F403
