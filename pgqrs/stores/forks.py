"""What a store does when its process forks (gunicorn --preload, multiprocessing).

The child has a copy of everything but the threads. Its copies of connections lead to the same sockets
and files as the parent's: whatever it said there, the parent would hear the answer to. So in the child
a store starts anew, with connections, locks and threads of its own. It neither uses nor closes what it
has inherited: closing says good-bye to the server, in the name of the parent.

SQLite must not even be open while its process forks: the library remembers which locks the process
has on a file, and the child has none of them. So the parent lets go of its files for that moment.

A thread that opens a connection holds locks of C libraries (OpenSSL, Kerberos) that no Python code can
see. In the child they would stay locked for ever, and its first connection would hang. So a fork waits
until the threads that are `opening` a connection have it, and no other thread begins meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

log = logging.getLogger("pgqrs")
LONGEST_WAIT_SECONDS = 2.0
"""A fork waits no longer for connections, and a connection no longer for a fork."""


class Forking:
    """Something that has to know when its process forks."""

    def before_fork(self) -> None:
        """In the parent, which is about to fork. Must end soon."""

    def after_fork_in_parent(self) -> None:
        """In the parent: whatever became of the child."""

    def after_fork_in_child(self) -> None:
        """In the child, whose only thread this is."""


_watched: dict[int, weakref.ref[Forking]] = {}
"""By id. Any thread may add an object at any time, so this is only iterated over in copies."""
_forking: list[Forking] = []


def watch(object: Forking) -> None:
    """Tell this of forks for as long as it is there."""
    key = id(object)
    _watched[key] = weakref.ref(object, lambda _: _watched.pop(key, None))


def _all_watched() -> list[Forking]:
    return [found for reference in list(_watched.values()) if (found := reference()) is not None]


class _Gate:
    """Keeps forks and the opening of connections apart."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._opening: list[int] = []
        """The threads that open a connection; one that opens two is there twice."""
        self._is_shut = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_shut, LONGEST_WAIT_SECONDS)
            self._opening.append(me)
        try:
            yield
        finally:
            with self._changed:
                if me in self._opening:  # not in a child that was forked meanwhile
                    self._opening.remove(me)
                self._changed.notify_all()

    def shut(self) -> None:
        """Wait for the other threads: what this one holds, it can also release in the child."""
        me = threading.get_ident()
        with self._changed:
            self._is_shut = True
            others_are_done = self._changed.wait_for(
                lambda: all(thread == me for thread in self._opening), LONGEST_WAIT_SECONDS
            )
        if not others_are_done:
            log.warning("forking while another thread opens a connection: the child may hang")

    def reopen(self) -> None:
        with self._changed:
            self._is_shut = False
            self._changed.notify_all()


_gate = _Gate()


@contextmanager
def opening() -> Iterator[None]:
    """Opening a connection: the process does not fork meanwhile."""
    with _gate.opening():
        yield


def in_child(call: Callable[[], object]) -> None:
    """Call this in every child that is forked."""
    if hasattr(os, "register_at_fork"):  # there is no fork on Windows
        os.register_at_fork(after_in_child=call)


def abandon(inherited: object) -> None:
    """Let something live to the end of the process, past all destructors: they would close it."""
    with suppress(AttributeError):  # another Python than CPython
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def hang_up(descriptor: int) -> None:
    """Close the child's copy of a socket without a word. Its number stays taken: somebody may still
    believe in it.
    """
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def _tell(objects: list[Forking], call: Callable[[Forking], Any]) -> None:
    for found in objects:
        try:
            call(found)
        except Exception:  # the others have to know in any case
            log.exception("could not prepare %r for a fork", found)


def _before() -> None:
    _gate.shut()
    _forking[:] = _all_watched()
    _tell(_forking, lambda found: found.before_fork())


def _in_parent() -> None:
    _tell(_forking, lambda found: found.after_fork_in_parent())
    _forking.clear()
    _gate.reopen()


def _in_child() -> None:
    global _gate
    _gate = _Gate()
    _forking.clear()
    _tell(_all_watched(), lambda found: found.after_fork_in_child())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
