"""The conformance suite: controlling runs."""

from pgqrs.testing.conformance.controlling import *  # noqa: F403
