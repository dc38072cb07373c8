"""Servers that end with the process that started them, also if that process is killed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_WATCH = """cat > /dev/null
kill -s "$3" "$1" 2> /dev/null
[ -z "$2" ] || rm -rf "$2"
"""
"""`cat` ends when the writing end of its pipe is closed, and the system does that for the dead."""


def end_together(
    process: int, directory: Path | None, *, how: str = "KILL"
) -> subprocess.Popen[bytes] | None:
    """Start a watcher that ends a process and removes its directory when this process is gone.

    `how` is the signal. Not QUIT, unless the process handles it: in the background of a shell it is
    ignored.
    Returns the watcher, for `stop_watching`. Where there is no POSIX shell, nothing watches: returns
    None.
    """
    if os.name != "posix":
        return None
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "sh", str(process), str(directory or ""), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what ends this process by its group must not end the watcher
    )


def stop_watching(watcher: subprocess.Popen[bytes] | None) -> None:
    """End the watcher. The caller does this before it ends the process itself."""
    if watcher is not None:
        watcher.kill()
        watcher.communicate()
