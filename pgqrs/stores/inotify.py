"""Hearing from the kernel that a file was written to: Linux's inotify, through the C library.

Python has no module for it, and it takes two calls. Elsewhere `watch` is None, and who wants to know
looks at the file instead.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
from collections.abc import Collection
from pathlib import Path

MODIFY, MOVED_TO, CREATE, OVERFLOW = 0x2, 0x80, 0x100, 0x4000
NONBLOCK, CLOEXEC = os.O_NONBLOCK if hasattr(os, "O_NONBLOCK") else 0, 0o2000000
_EVENT = struct.Struct("iIII")


class Changes:
    """Changes of some files in a directory, which need not exist yet."""

    def __init__(self, directory: Path, names: Collection[str]) -> None:
        self._names = {os.fsencode(name) for name in names}
        self._events = _init()
        self._read_end, self._write_end = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._events, select.POLLIN)
        self._poll.register(self._read_end, select.POLLIN)
        _add(self._events, directory)

    def wait(self, seconds: float) -> bool:
        """Until something has changed, for so long, or until woken. Returns whether it has."""
        ready = dict(self._poll.poll(seconds * 1000))
        if self._read_end in ready:
            os.read(self._read_end, 1)
        return self._events in ready and self._concerns_us(os.read(self._events, 65536))

    def _concerns_us(self, events: bytes) -> bool:
        position = 0
        while position < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, position)
            position += _EVENT.size + length
            name = events[position - length : position].rstrip(b"\0")
            if name in self._names or mask & OVERFLOW:
                return True
        return False

    def wake(self) -> None:
        """Let go whoever waits, from another thread."""
        os.write(self._write_end, b"!")

    def close(self) -> None:
        for descriptor in (self._events, self._read_end, self._write_end):
            os.close(descriptor)


def watch(directory: Path, names: Collection[str]) -> Changes | None:
    """Changes of these files; None where that cannot be had."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return Changes(directory, names)
    except (OSError, AttributeError):  # too many watchers; or another C library
        return None


def _init() -> int:
    return _checked(ctypes.CDLL(None, use_errno=True).inotify_init1(NONBLOCK | CLOEXEC))


def _add(descriptor: int, directory: Path) -> int:
    add = ctypes.CDLL(None, use_errno=True).inotify_add_watch
    return _checked(add(descriptor, os.fsencode(directory), MODIFY | MOVED_TO | CREATE))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
