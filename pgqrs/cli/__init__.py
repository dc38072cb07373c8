"""The `pgqrs` command: an edge of the package, which nothing else in it imports."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    # Not at the top: importing this package should not cost click and rich.
    from pgqrs.cli.app import run

    run()
