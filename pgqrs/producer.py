"""Putting messages into a queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, Self

from sqlalchemy import Connection

from pgqrs.current import run_here
from pgqrs.errors import InvalidArgument
from pgqrs.payloads import Batch, encode, encode_headers, encode_many
from pgqrs.presence import Presence
from pgqrs.queue_making import with_queue
from pgqrs.repositories import labelled, messages, queues
from pgqrs.repositories.keys import Unique
from pgqrs.repositories.labelled import Labels
from pgqrs.repositories.messages import Enqueued
from pgqrs.stores import Database
from pgqrs.types import Duration, KeyScope, MessageId, UniqueFor, aware, seconds, whole

LOWEST_PRIORITY, HIGHEST_PRIORITY = -32768, 32767
MAX_HEADER_BYTES = 16 * 1024
MAX_LABEL = 512
"""Characters of a key or of a group's name: an index of PostgreSQL holds no more than 2700 bytes."""


class NewMessages(NamedTuple):
    """Messages that are to be added to a queue."""

    queue: str
    batch: Batch
    labels: Labels | None
    options: dict[str, Any]
    creates_queue: bool = False
    """Whether a queue that is missing is created: those of tasks are, and all if the store may."""

    def add(
        self, connection: Connection, *, now: datetime | None, channel: str | None = None
    ) -> Enqueued:
        """Add them, all or none. `channel` is where consumers elsewhere are told, if that can be done in
        the same statement.
        """
        if self.labels is None:
            return messages.enqueue(
                connection, self.queue, self.batch, now=now, channel=channel, **self.options
            )
        return labelled.enqueue(
            connection, self.queue, self.batch, labels=self.labels, now=now, **self.options
        )

    @property
    def is_single(self) -> bool:
        """True if adding them is one statement."""
        return self.labels is None and messages.fits_one_statement(self.batch)


class Producer:
    """Enqueues into one queue. As short-lived as you like: it needs no row of its own.

    With `register` it has a row among the workers until it is closed, and its messages say whose
    they are.
    """

    def __init__(
        self,
        database: Database,
        queue: str,
        *,
        register: bool = False,
        hostname: str | None = None,
        port: int = 0,
        codec: str | None = None,
    ) -> None:
        """`codec` names what the payloads are, if they are not plain JSON."""
        self._database = database = database.of_queue(queue)
        self.queue = queue
        self._codec = codec
        self._presence = (
            Presence(database, queue, hostname=hostname, port=port) if register else None
        )

    @property
    def worker_id(self) -> int | None:
        """The worker its messages are from; None if it is not registered."""
        return None if self._presence is None else self._presence.worker_id

    def open(self) -> Self:
        """Create the queue, if the store may, and register among the workers, if that was asked for. The
        first enqueue does it too.
        """
        if self._database.config.create_queues:
            self._find_queue()
        if self._presence is not None:
            self._presence.open()
        return self

    def enqueue(
        self,
        payload: Any,
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
        ttl: Duration | None = None,
        expires_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
        key: str | None = None,
        unique: UniqueFor = "unfinished",
        group: str | None = None,
    ) -> MessageId:
        """Add one message. When this returns, it is durable. Returns its id.

        It is delivered at once, or after `delay`, or at `eta`; higher priorities first, then in
        order. Messages of a `group` are delivered strictly in order, one at a time.

        If another message has the same `key`, nothing is added, and its id is returned, with
        `created` false. `unique` says how long a message keeps others out: while it is "queued",
        until it is "unfinished" no more, or until so many seconds after that; None: not at all.

        In the body of a workflow on this store it is done once, however often the run is resumed.
        """
        return self._send(
            self._one(
                payload,
                delay=delay,
                eta=eta,
                ttl=ttl,
                expires_at=expires_at,
                priority=priority,
                headers=headers,
                key=key,
                unique=unique,
                group=group,
            )
        )[0]

    def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
        ttl: Duration | None = None,
        expires_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
        keys: Iterable[str | None] | None = None,
        unique: UniqueFor = "unfinished",
        groups: Iterable[str | None] | None = None,
    ) -> list[MessageId]:
        """Add messages in order, all of them or none. Returns their ids.

        `keys` and `groups` are one for each message.
        """
        return self._send(
            self._many(
                payloads,
                delay=delay,
                eta=eta,
                ttl=ttl,
                expires_at=expires_at,
                priority=priority,
                headers=headers,
                keys=keys,
                unique=unique,
                groups=groups,
            )
        )

    def _one(
        self,
        payload: Any,
        *,
        key: str | None = None,
        unique: UniqueFor = "unfinished",
        group: str | None = None,
        **options: Any,
    ) -> NewMessages:
        """What `enqueue` is to add."""
        limits = self._database.config
        text = encode(
            payload, max_bytes=limits.max_payload_bytes, max_depth=limits.max_payload_depth
        )
        return self._new(Batch(1, None, [text]), _labels(1, [key], [group], unique), **options)

    def _many(
        self,
        payloads: Iterable[Any],
        *,
        keys: Iterable[str | None] | None = None,
        unique: UniqueFor = "unfinished",
        groups: Iterable[str | None] | None = None,
        **options: Any,
    ) -> NewMessages:
        """What `enqueue_many` is to add."""
        limits, values = self._database.config, list(payloads)
        labels = _labels(
            len(values),
            None if keys is None else list(keys),
            None if groups is None else list(groups),
            unique,
        )
        batch = encode_many(
            values,
            max_bytes=limits.max_payload_bytes,
            max_depth=limits.max_payload_depth,
            apart=labels is not None,
        )
        return self._new(batch, labels, **options)

    def _new(
        self,
        batch: Batch,
        labels: Labels | None,
        *,
        delay: Duration | None = None,
        eta: datetime | None = None,
        ttl: Duration | None = None,
        expires_at: datetime | None = None,
        priority: int = 0,
        headers: Mapping[str, Any] | None = None,
    ) -> NewMessages:
        if delay is not None and eta is not None:
            raise InvalidArgument("eta", "give a delay or an eta, not both")
        if ttl is not None and expires_at is not None:
            raise InvalidArgument("expires_at", "give a ttl or an expires_at, not both")
        options: dict[str, Any] = {
            "delay": 0.0 if delay is None else seconds("delay", delay),
            "eta": None if eta is None else aware("eta", eta),
            "ttl": None if ttl is None else seconds("ttl", ttl),
            "expires_at": None if expires_at is None else aware("expires_at", expires_at),
            "priority": whole("priority", priority, low=LOWEST_PRIORITY, high=HIGHEST_PRIORITY),
            "headers": encode_headers(headers, max_bytes=MAX_HEADER_BYTES),
            "codec": self._codec,
            "producer": None,
        }
        creates_queue = self._database.config.create_queues
        return NewMessages(self.queue, batch, labels, options, creates_queue)

    def _send(self, new: NewMessages) -> list[MessageId]:
        if self._presence is not None:
            new.options["producer"] = self._sender()
        if not new.batch.size:
            return []
        run = run_here.get()
        if run is not None:
            recorded: list[MessageId] = run.enqueue(self._database, new)
            return recorded
        database = self._database
        single, channel = new.is_single, database.channel if new.is_single else None

        def add() -> Enqueued:
            return database.write(
                lambda connection: new.add(connection, now=database.now(), channel=channel),
                single=single,
            )

        added = with_queue(database, self.queue, add) if new.creates_queue else add()
        database.ring(self.queue, elsewhere=added.waited_for)
        return added.ids

    def _find_queue(self) -> None:
        """See that the queue is there."""
        with_queue(
            self._database,
            self.queue,
            lambda: self._database.read(lambda connection: queues.get(connection, self.queue)),
        )

    def _sender(self) -> int | None:
        if self._presence is None:
            return None
        self._presence.keep_alive()
        return self._presence.open()

    def close(self) -> None:
        """Leave the workers, if registered."""
        if self._presence is not None:
            self._presence.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _labels(
    size: int,
    keys: list[str | None] | None,
    groups: list[str | None] | None,
    unique: UniqueFor,
) -> Labels | None:
    """The keys and groups of a batch; None if it has none."""
    for name, given in (("key", keys), ("group", groups)):
        if given is not None and len(given) != size:
            raise InvalidArgument(f"{name}s", f"{len(given)} for {size} messages")
        for label in given or ():
            _check_label(name, label)
    scope = _unique(unique)
    if not any(label is not None for label in (*(keys or ()), *(groups or ()))):
        return None
    return Labels(keys or [None] * size, groups or [None] * size, scope if keys else None)


def _check_label(name: str, label: str | None) -> None:
    if label is None:
        return
    if not isinstance(label, str) or not label:
        raise InvalidArgument(name, f"expected some text, got {label!r}")
    if len(label) > MAX_LABEL:
        raise InvalidArgument(name, f"longer than {MAX_LABEL} characters")
    if not label.isprintable():
        raise InvalidArgument(name, f"{label!r} is not printable")


def _unique(unique: UniqueFor) -> Unique | None:
    if unique is None:
        return None
    if isinstance(unique, str):
        try:
            return Unique(KeyScope(unique))
        except ValueError:
            known = ", ".join(KeyScope)
            raise InvalidArgument(
                "unique", f"expected one of {known}, or seconds, got {unique!r}"
            ) from None
    return Unique(KeyScope.UNFINISHED, seconds("unique", unique))
