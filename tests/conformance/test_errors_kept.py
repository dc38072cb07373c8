"""The conformance suite: errors as they are kept."""

from pgqrs.testing.conformance.errors_kept import *  # noqa: F403
