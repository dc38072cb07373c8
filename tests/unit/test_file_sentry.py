"""Hearing that a file was written to: by the kernel, and without its help."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import pgqrs
from pgqrs.stores import inotify, wakeups
from pgqrs.stores.queue_news import QueueNews
from pgqrs.stores.wakeups import FileSentry, Wakeups

LONG = 100

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")


@pytest.fixture
def changes(tmp_path: Path) -> Iterator[inotify.Changes]:
    found = inotify.watch(tmp_path, ["q.db", "q.db-wal"])
    assert found is not None
    yield found
    found.close()


@linux
def test_a_write_is_heard(changes: inotify.Changes, tmp_path: Path) -> None:
    for name in ("q.db", "q.db-wal"):  # neither exists yet
        with (tmp_path / name).open("ab") as file:
            assert changes.wait(LONG)
            file.write(b"x")
            file.flush()
            assert changes.wait(LONG)
    assert not changes.wait(0)


@linux
def test_other_files_are_not(changes: inotify.Changes, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x")
    assert not changes.wait(0.05)
    (tmp_path / "another").write_text("x")
    (tmp_path / "q.db").write_text("x")
    assert changes.wait(LONG)


@linux
def test_who_waits_can_be_woken(changes: inotify.Changes) -> None:
    timer = threading.Timer(0.05, changes.wake)
    timer.start()
    began = time.monotonic()
    assert not changes.wait(LONG)
    assert time.monotonic() - began < LONG
    timer.join()


def test_a_directory_that_is_not_there_is_not_watched(tmp_path: Path) -> None:
    assert inotify.watch(tmp_path / "nowhere", ["q.db"]) is None


def test_a_sentry_ends_though_the_last_who_waited_leaves_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentry = FileSentry(str(tmp_path / "q.db"))
    waiting, go_on = threading.Event(), threading.Event()

    def wait(_: float) -> bool:
        waiting.set()
        return not go_on.wait(LONG)

    monkeypatch.setattr(sentry, "_wait", wait)
    sentry.want(True)
    assert waiting.wait(LONG)
    sentry.stop_soon()
    sentry.want(False)
    go_on.set()
    thread = sentry._thread
    assert thread is not None
    thread.join(LONG)
    ended = not thread.is_alive()
    sentry.want(True)  # lets it go in any case
    sentry.stop()
    assert ended


@pytest.mark.parametrize("by", ["the kernel", "looking", "looking though the kernel is silent"])
def test_a_sentry_rings_for_each_write(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "looking":
        monkeypatch.setattr(wakeups, "watch", lambda *_: None)
    elif by != "the kernel":  # as on a file system that tells nothing
        monkeypatch.setattr(wakeups, "watch", lambda *_: inotify.watch(tmp_path, ["nothing"]))
    path = tmp_path / "q.db"
    path.write_text("")
    heard = threading.Event()
    bells = Wakeups(FileSentry(str(path), f"{path}-wal"))
    for _ in range(2):  # and again after it was closed
        with bells.doorbell("tasks", heard.set):
            assert heard.wait(LONG)  # it begins by ringing: from now on it hears
            for n in range(3):
                time.sleep(0.02)  # for the clock of the file system to move on
                heard.clear()
                path.write_text("x" * (n + 1))
                assert heard.wait(LONG)
        bells.close()
        heard.clear()


class LateNews:
    """As of a database whose commit takes its time after the last write."""

    def __init__(self) -> None:
        self.committed = threading.Event()
        self.asked = 0

    def moved(self) -> bool:
        self.asked += 1
        return self.committed.is_set()

    def of(self, names: Collection[str]) -> Collection[str]:
        return [name for name in names if name == "tasks"]

    def close(self) -> None:
        return


def test_a_commit_that_ends_long_after_its_write_is_told(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    path.write_text("")
    news, heard, other, results = LateNews(), *(threading.Event() for _ in range(3))
    bells = Wakeups(FileSentry(str(path), news=news))
    with (
        bells.doorbell("tasks", heard.set),
        bells.doorbell("other", other.set),
        bells.doorbell(wakeups.RESULTS, results.set),
    ):
        assert heard.wait(LONG)
        for bell in (heard, other, results):
            bell.clear()
        path.write_text("x")
        before = news.asked
        while news.asked < before + 5:
            time.sleep(0.01)
        assert not heard.is_set()
        news.committed.set()  # and nothing more is written
        assert heard.wait(LONG)
        assert results.wait(LONG)
    bells.close()
    assert not other.is_set()


def test_news_are_told_by_queue(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'q.db'}"
    with pgqrs.Store(url, upgrade=True) as store:
        for name in ("a", "b"):
            store.admin().create_queue(name)
        news = QueueNews(str(tmp_path / "q.db"))
        assert news.moved()
        assert not news.moved()
        assert list(news.of(["a", "b"])) == []
        store.producer("a").enqueue(1)
        assert news.moved()
        assert list(news.of(["a", "b"])) == ["a"]
        store.producer("b").enqueue(1, delay=60)
        assert list(news.of(["a", "b"])) == ["b"]
        with store.consumer("a") as consumer:
            (message,) = consumer.dequeue()
            news.of(["a", "b"])
            consumer.release(message)
            assert list(news.of(["a", "b"])) == ["a"]
            consumer.ack(*consumer.dequeue())
        assert list(news.of(["a", "b"])) == []
        news.close()
        store.verify_exclusive_access()
    (tmp_path / "q.db").unlink()
    assert news.moved() is None
    assert list(news.of(["a", "b"])) == ["a", "b"]
    assert not (tmp_path / "q.db").exists()
