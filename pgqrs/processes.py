"""Processes for tasks that need a core of their own.

Each process runs one call at a time and has a pipe of its own to the worker. So if a process dies, it
is known whose call it ran: that call fails, and no other. A process says when it is ready and when it
begins a call; one that died before that has harmed nothing, and the call goes to another one.

Processes are spawned, not forked: a forked child would inherit the locks of all threads of the worker. A
spawned child imports the script of its parent first, under the name `__mp_main__`.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pgqrs.errors import HandlerTimedOut, TaskProcessDied

TRIES = 3
"""How many processes may die before they have begun a call."""
_READY, _BEGUN, _RETURNED, _RAISED = b"ready", b"begun", b"returned", b"raised"


class Processes:
    """At most `count` processes, and no more than there are cores, started when they are needed."""

    def __init__(self, count: int) -> None:
        self._count = min(count, os.cpu_count() or 1)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._starting = 0
        self._life = 0
        self._changed = threading.Condition()

    def run(
        self, function: Callable[..., Any], *args: Any, name: str, timeout: float | None = None
    ) -> Any:
        """Call the function in a process, and return what it returns or raise what it raises.

        Raises `TaskProcessDied` if the process dies of it, and `HandlerTimedOut` after the timeout: the
        process is killed then.
        """
        call = pickle.dumps((function, args))
        for tries_left in reversed(range(TRIES)):
            process = self._take()
            try:
                return process.call(call, name, timeout)
            except _NotBegun as exc:
                if not tries_left:
                    raise TaskProcessDied(name, exc.status, begun=False) from None
            finally:
                self._give_back(process)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the idle processes, and kill those that run a call: nobody waits for it any more."""
        with self._changed:
            idle, busy = self._idle, self._busy
            self._idle, self._busy = [], set()
            self._life += 1
            self._changed.notify_all()
        for process in idle:
            process.end()
        for process in busy:
            process.kill()

    def _take(self) -> _Process:
        with self._changed:
            life = self._life
            while not self._idle and len(self._busy) + self._starting >= self._count:
                self._changed.wait()
                if life != self._life:
                    raise TaskProcessDied("a task", None, begun=False)
            if self._idle:
                process = self._idle.pop()
                self._busy.add(process)
                return process
            self._starting += 1
        try:
            process = _Process()
        except BaseException:
            self._started(None, life)
            raise
        self._started(process, life)
        return process

    def _started(self, process: _Process | None, life: int) -> None:
        with self._changed:
            self._starting -= 1
            if process is not None and life == self._life:
                self._busy.add(process)
            self._changed.notify()

    def _give_back(self, process: _Process) -> None:
        with self._changed:
            is_ours = process in self._busy
            self._busy.discard(process)
            if is_ours and process.is_usable:
                self._idle.append(process)
            self._changed.notify()
        if not (is_ours and process.is_usable):
            process.kill()


class _NotBegun(Exception):
    """The process died before it began the call."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class _Process:
    """A process and the pipe to it."""

    def __init__(self) -> None:
        # Here and not above: importing pgqrs does not import multiprocessing.
        context = import_module("multiprocessing").get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: a task may start processes of its own.
        self._process = context.Process(target=serve, args=(theirs,), name="pgqrs-process")
        try:
            self._process.start()
        finally:
            theirs.close()
        # Before the interpreter waits for its children when it ends: they ignore SIGTERM.
        self._kill = import_module("multiprocessing.util").Finalize(
            self, _kill, args=(self._process,), exitpriority=10
        )
        self._is_ready = False
        self.is_usable = True

    def call(self, call: bytes, name: str, timeout: float | None) -> Any:
        began = False
        try:
            if not self._is_ready:
                self._receive(None)
                self._is_ready = True
            self._pipe.send_bytes(call)
            self._receive(None)
            began = True
            found = self._receive(timeout)
        except (EOFError, OSError):
            self.is_usable = False
            self.kill()
            status = self._process.exitcode
            if began:
                raise TaskProcessDied(name, status, begun=True) from None
            raise _NotBegun(status) from None
        except _TooLate:
            self.is_usable = False
            assert timeout is not None
            raise HandlerTimedOut(name, timeout) from None
        return _unpacked(found)  # not above: a task may raise an OSError of its own

    def _receive(self, timeout: float | None) -> bytes:
        wait = import_module("multiprocessing.connection").wait
        if not wait([self._pipe, self._process.sentinel], timeout):
            raise _TooLate
        if not self._pipe.poll():
            raise EOFError
        found: bytes = self._pipe.recv_bytes()
        return found

    def end(self) -> None:
        """Let it end: it waits for a call."""
        self._kill.cancel()
        self._pipe.close()

    def kill(self) -> None:
        """End it, whatever it does."""
        self._kill()
        self._process.join(5.0)


class _TooLate(Exception):
    """The call takes longer than it may."""


def _kill(process: Any) -> None:
    if process.is_alive():
        process.kill()


def _unpacked(found: bytes) -> Any:
    kind, value, text = pickle.loads(found)
    if kind == _RETURNED:
        return pickle.loads(value)
    try:
        error = pickle.loads(value)
    except Exception:  # an error that cannot be read here
        error = RuntimeError(text.strip().splitlines()[-1])
    raise error from _RemoteTraceback(text)


class _RemoteTraceback(Exception):
    """Where in the other process an error was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# In the other process


def serve(pipe: Any) -> None:
    """Run one call after the other, until the worker closes its end of the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker decides when to stop
        signal.signal(number, signal.SIG_IGN)
    try:
        pipe.send_bytes(_READY)
        while True:
            call = pipe.recv_bytes()
            pipe.send_bytes(_BEGUN)
            pipe.send_bytes(_outcome(call))
    except (EOFError, OSError):
        return


def _outcome(call: bytes) -> bytes:
    try:
        function, args = pickle.loads(call)
        return pickle.dumps((_RETURNED, pickle.dumps(function(*args)), ""))
    except BaseException as exc:
        return pickle.dumps((_RAISED, _pickled(exc), traceback.format_exc()))


def _pickled(error: BaseException) -> bytes:
    """The error, if it can be read again; its text otherwise."""
    try:
        text = pickle.dumps(error)
        pickle.loads(text)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return text
