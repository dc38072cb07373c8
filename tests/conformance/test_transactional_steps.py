"""The conformance suite: transactional steps."""

from pgqrs.testing.conformance.transactional_steps import *  # noqa: F403
