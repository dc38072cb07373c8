"""A fork and a thread that opens a connection keep apart."""

from __future__ import annotations

import os
import threading
import time

import pytest

from pgqrs.stores import forks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_a_thread_that_opens_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forks, "LONGEST_WAIT_SECONDS", 60)
    begun = threading.Event()
    left: list[str] = []

    def connect() -> None:
        with forks.opening():
            begun.set()
            while not forks._gate._is_shut:
                time.sleep(0.001)
            left.append("left")

    thread = threading.Thread(target=connect)
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if left else 1)
    thread.join()
    assert exit_code(child) == 0


def test_a_thread_that_forks_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "LONGEST_WAIT_SECONDS", 60)
    with forks.opening():
        child = os.fork()
        if child == 0:
            with forks.opening():  # the gate of the child is a new one
                os._exit(0)
        assert exit_code(child) == 0
    with forks.opening():
        pass


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "LONGEST_WAIT_SECONDS", 0.01)
    begun, enough = threading.Event(), threading.Event()

    def connect() -> None:
        with forks.opening():
            begun.set()
            enough.wait(60)

    thread = threading.Thread(target=connect)
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        with forks.opening():  # whatever the parent's threads do
            os._exit(0)
    assert exit_code(child) == 0
    enough.set()
    thread.join()


def test_threads_may_make_stores_while_the_process_forks() -> None:
    """The objects that are told of forks can become more while they are told."""
    stop = threading.Event()

    class Told(forks.Forking):
        def after_fork_in_child(self) -> None:
            self.told = True

    watched = Told()
    forks.watch(watched)

    def watch() -> None:
        while not stop.is_set():
            forks.watch(forks.Forking())
            others.append(Told())
            forks.watch(others[-1])
            del others[:-500]

    others: list[Told] = []
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if hasattr(watched, "told") else 1)
            assert exit_code(child) == 0
    finally:
        stop.set()
        thread.join()
