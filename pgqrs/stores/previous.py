"""Going back to a state of the object that a versioned bucket has kept."""

from __future__ import annotations

import uuid
from contextlib import closing
from datetime import UTC, datetime

from pgqrs.config import Config
from pgqrs.errors import CommitUncertain, ConflictError, InvalidArgument
from pgqrs.repositories import uploads
from pgqrs.stores import images
from pgqrs.stores.objects import Lost, RemoteObject, Unanswered
from pgqrs.stores.sqlite import SqliteDatabase

MOST_VERSIONS = 100_000


def restore(remote: RemoteObject, version: str) -> None:
    """Upload an older state as the newest one. What is there now stays among the versions.

    Stores that are open take it over as they do with an upload of another process.
    """
    found = [each for each in remote.versions(MOST_VERSIONS) if each.id == version]
    if not found or found[0].etag is None:
        raise InvalidArgument("version", f"the bucket keeps no state {version!r} of {remote}")
    replacing = remote.etag()
    fetched = remote.get_pinned(etag=found[0].etag, version=version)
    nonce = uuid.uuid4().hex
    data = _as_new_upload(fetched.data, nonce, source=f"{remote} ({version})")
    label = {"pgqrs-upload": nonce, "pgqrs-restored": version}
    try:
        remote.put(data, replacing=replacing, label=label)
    except Lost as exc:
        raise ConflictError(f"{remote} was changed meanwhile; nothing was restored") from exc
    except Unanswered as exc:
        raise CommitUncertain(f"the upload was not answered; it may be stored: {exc}") from exc


def _as_new_upload(data: bytes, nonce: str, *, source: str) -> bytes:
    """The same state as an upload of its own: an ETag that was there before would be taken for an answer
    that is late. Raises if the state is damaged.
    """
    with closing(SqliteDatabase(Config(dsn="sqlite::memory:"))) as scratch:
        with scratch.raw_connection() as connection:
            images.load(connection, data, source=source)
        now = datetime.now(UTC)
        scratch.write(lambda c: uploads.record(c, nonce, now=now), needs_schema=False)
        with scratch.raw_connection() as connection:
            return images.dump(connection)
