"""The conformance suite: leases."""

from pgqrs.testing.conformance.leases import *  # noqa: F403
