"""The `pgqrs` command: an edge of the package, which nothing else in it imports."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # Not at the top: the console script imports this package by name, and click and rich are only needed to run it.
    from pgqrs.cli.app import run

    run()
