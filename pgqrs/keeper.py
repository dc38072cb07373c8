"""The thread that keeps a worker alive in the eyes of others.

It gives signs of life, renews the leases of all messages the worker has when a third of their time
is over, and ends handlers in threads that take longer than they may. All that also while every
handler is busy or blocks, and while the worker's own loop waits for the database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from pgqrs.bell import Bell
from pgqrs.consumer import Holder
from pgqrs.errors import LeaseLost, PgqrsError
from pgqrs.handlers import Delivery
from pgqrs.presence import Presence
from pgqrs.types import WorkerStatus

TICK = 1.0
logger = logging.getLogger("pgqrs.worker")


class Keeper:
    """Looks after the deliveries in `held`: one loop, start and stop."""

    def __init__(
        self,
        presence: Presence,
        holder: Holder,
        *,
        heartbeat: float,
        check: Callable[[], float],
        told_to_stop: Callable[[], None],
    ) -> None:
        """`check` is called in every round, and says after how many seconds to call it again."""
        self.held: set[Delivery] = set()
        self._presence = presence
        self._holder = holder
        self._heartbeat = heartbeat
        self._check = check
        self._told_to_stop = told_to_stop
        self._beaten_at = time.monotonic()
        self._renewing = threading.Lock()
        self._bell = Bell()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pgqrs-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._bell.ring()
        if self._thread is not None:
            self._thread.join()

    def keep(self, deliveries: Sequence[Delivery]) -> None:
        """Renew the leases of these from now on."""
        self.held.update(deliveries)
        if any(delivery.lease < 3 * TICK for delivery in deliveries):
            self._bell.ring()

    def _run(self) -> None:
        while not self._stopping:
            try:
                pause = min(self._check(), self._keep_alive(), self.renew())
            except Exception:  # also the unexpected: nobody else would renew
                logger.exception("the keeper of leases stumbled, and goes on")
                pause = TICK
            self._bell.wait(pause)

    def _keep_alive(self) -> float:
        waited = time.monotonic() - self._beaten_at
        if waited >= self._heartbeat:
            self._beaten_at = time.monotonic()
            waited = 0.0
            try:
                if self._presence.heartbeat() is WorkerStatus.STOPPED:
                    self._told_to_stop()
            except PgqrsError as exc:
                logger.warning("no heartbeat: %s", exc)
        return self._heartbeat - waited

    def renew(self, *, everything: bool = False) -> float:
        """Renew what is due, or everything. Returns seconds until the next is due."""
        with self._renewing:
            now = time.monotonic()
            due: dict[float, list[Delivery]] = {}
            for delivery in self._snapshot():
                if everything or now - delivery.renewed_at >= delivery.lease / 3:
                    due.setdefault(delivery.lease, []).append(delivery)
            for lease, deliveries in due.items():
                self._extend(deliveries, lease)
            return min(
                (d.renewed_at + d.lease / 3 - time.monotonic() for d in self._snapshot()),
                default=TICK,
            )

    def _snapshot(self) -> list[Delivery]:
        return [delivery for delivery in self.held.copy() if not delivery.is_lost]

    def _extend(self, deliveries: list[Delivery], lease: float) -> None:
        asked = time.monotonic()
        try:
            self._holder.extend_many([delivery.message for delivery in deliveries], lease)
        except LeaseLost as exc:
            self._lose(deliveries, exc.ids)
        except PgqrsError as exc:
            logger.warning("%d leases could not be renewed: %s", len(deliveries), exc)
            asked -= lease / 3 - TICK  # again in a moment
        for delivery in deliveries:
            delivery.renewed_at = asked

    def _lose(self, deliveries: list[Delivery], ids: Iterable[int]) -> None:
        lost = set(ids)
        for delivery in deliveries:
            # One that was ended meanwhile is simply gone.
            if delivery.message.id in lost and delivery in self.held and not delivery.is_ended:
                logger.warning(
                    "lease lost on message %d, while it was handled", delivery.message.id
                )
                delivery.lose()
