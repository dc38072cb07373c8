"""The conformance suite: uniqueness."""

from pgqrs.testing.conformance.uniqueness import *  # noqa: F403
