"""A worker whose process is broken, at the least convenient moment."""

from __future__ import annotations

from threading import Event

import pytest

from pgqrs import Message, ProcessBroken, Store, Worker


def test_it_claims_nothing_more_if_it_breaks_while_the_loop_is_about_to_claim(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushing = Event()

    def handle(message: Message) -> None:
        flushing.wait(100)
        raise ProcessBroken("the engine is gone")

    with Store(database, upgrade=True) as store:
        worker = Worker(store, handlers={"jobs": handle}, concurrency=1, prefetch=0)
        store.admin().create_queue("jobs", if_not_exists=True)
        first, second = store.producer("jobs").enqueue_many(["first", "second"])
        flush = worker._endings.flush

        def flush_while_it_breaks() -> int:
            if worker._aboard:  # the handler ends between flushing and claiming
                flushing.set()
                while worker._aboard:
                    pass
            return flush()

        monkeypatch.setattr(worker._endings, "flush", flush_while_it_breaks)
        worker._bell.ring()
        with pytest.raises(ProcessBroken):
            worker.run()
        assert [store.admin().get_message(id).read_ct for id in (first, second)] == [1, 0]
