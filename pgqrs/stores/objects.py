"""One object in a bucket, replaced by compare-and-swap on its ETag.

`put` is one PutObject with `If-Match`, or with `If-None-Match: *` to create, and is never repeated
here. botocore must not repeat it either: an upload that was applied, but whose answer was lost,
would come back as a failed condition although it is ours. So each attempt ends in one of four ways:

- an ETag: it is stored;
- `Lost`: the object is not the one it was based on;
- `Unreachable`: it was refused or never sent, so nothing is stored, and it may be tried again;
- `Unanswered`: it may be stored or not. Who uploads must find out by looking.

What will not pass by waiting (no bucket, no permission, no credentials) is `InvalidConfig`.

A request has a total deadline: `s3_timeout`, and more for a large body. Timeouts of sockets do not give
one, since each byte that trickles in begins them anew. So a request runs in a thread, and after its
deadline nobody waits for it any more.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pgqrs.config import S3Settings
from pgqrs.errors import InvalidConfig, PgqrsError
from pgqrs.stores.daemon_threads import DaemonThreads
from pgqrs.stores.forks import in_child
from pgqrs.stores.images import Body, FileBody, Image
from pgqrs.types import S3Version

try:
    import boto3
    from botocore import exceptions as botocore
    from botocore.config import Config as ClientConfig
except ModuleNotFoundError as exc:  # the extra is not installed
    raise InvalidConfig("a store in S3 needs boto3: pip install 'pgqrs[s3]'") from exc

T = TypeVar("T")
CONNECTIONS = 20
SLOWEST = 1 << 20
"""Bytes a second that a body must move at least."""
CHUNK = 1 << 16
INCOMING = "incoming-"
"""How the names of files begin that are being downloaded."""


class Lost(PgqrsError):
    """Someone else replaced, created or deleted the object first."""

    unanswered = False
    """True if an earlier attempt was not answered, and may be what replaced it."""


class Unreachable(PgqrsError):
    """The bucket cannot be reached, or is too busy, just now. Nothing was changed."""


class Unanswered(Unreachable):
    """A request was sent, and no answer says what became of it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The object as it was at one moment. Without an ETag there was none."""

    etag: str | None
    data: bytes = b""
    label: dict[str, str] = field(default_factory=dict)
    version: str | None = None
    """Its name among the versions of the object, if the bucket keeps them."""
    file: Path | None = None
    """Where the content is, if it is not in `data`. The caller deletes it."""
    wanted: bool = True
    """False if the content was not downloaded, because the caller did not want it."""

    @property
    def image(self) -> Image:
        return self.data if self.file is None else self.file

    def discard(self) -> None:
        """Delete the file, if there is one."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


class Deadline:
    """When a request has to be over. Both sides agree on whether it was over in time."""

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._at = time.monotonic() + seconds
        self._ended = False
        self.expired = False

    def extend(self, size: int) -> None:
        """A body of this size is to be moved."""
        self._at += size / SLOWEST

    def left(self) -> float:
        return self._at - time.monotonic()

    def expire(self) -> bool:
        """Give up. Returns False if the request is over."""
        with self._lock:
            self.expired = not self._ended
            return self.expired

    def end(self) -> bool:
        """The request is over. Returns False if nobody waits for it any more."""
        with self._lock:
            self._ended = not self.expired
            return self._ended


_requests = DaemonThreads("pgqrs-s3")


def _wants_everything(_found: Fetched) -> bool:
    return True


@dataclass(slots=True)
class Traffic:
    """What was asked of the bucket so far."""

    gets: int = 0
    not_modified: int = 0
    downloaded_bytes: int = 0
    puts: int = 0
    uploaded_bytes: int = 0
    last_upload_bytes: int = 0


class RemoteObject:
    """One key of a bucket."""

    def __init__(self, settings: S3Settings, *, suffix: str = "") -> None:
        """With a `suffix`: the object of that name beside the key."""
        self._settings = settings
        self._where: dict[str, Any] = {"Bucket": settings.bucket, "Key": settings.key + suffix}
        self.traffic = Traffic()
        self.in_this_thread = False
        """True at the end of the process, when no threads can be started: no total deadline then."""

    def get(
        self,
        *,
        unless: str | None,
        into: Path | None = None,
        wants: Callable[[Fetched], bool] = _wants_everything,
    ) -> Fetched | None:
        """The object; None if it still has this ETag. Its content is a file in the directory `into`, if
        one is given. `wants` decides by what is known before the content.
        """
        condition = {} if unless is None else {"IfNoneMatch": unless}
        self.traffic.gets += 1

        def request(deadline: Deadline) -> Fetched:
            answer = self._client.get_object(**self._where, **condition)
            with closing(answer["Body"]) as body:
                found = _fetched(answer, b"", wanted=False)
                if not wants(found):
                    return found
                deadline.extend(int(answer.get("ContentLength") or 0))
                if into is None:
                    return _fetched(answer, _read(body, deadline))
                return _fetched(answer, b"", file=_save(body, into, deadline))

        try:
            fetched = self._in_time(request, drop=Fetched.discard)
        except Exception as exc:
            if _status(exc) == 304:
                self.traffic.not_modified += 1
                return None
            if _status(exc) == 404 and _code(exc) != "NoSuchBucket":
                return Fetched(None)
            raise self._named(exc, sent=False) from exc
        size = len(fetched.data) if fetched.file is None else fetched.file.stat().st_size
        self.traffic.downloaded_bytes += size
        return fetched

    def get_pinned(self, *, etag: str, version: str | None) -> Fetched:
        """The object as it was; `Lost` if it is not to be had any more."""
        wanted = {"IfMatch": etag} if version is None else {"VersionId": version}
        self.traffic.gets += 1

        def request(deadline: Deadline) -> tuple[Any, bytes]:
            answer = self._client.get_object(**self._where, **wanted)
            deadline.extend(int(answer.get("ContentLength") or 0))
            return answer, _read(answer["Body"], deadline)

        try:
            answer, data = self._in_time(request)
        except Exception as exc:
            if _status(exc) in (404, 412) and _code(exc) != "NoSuchBucket":
                raise Lost(f"{self} is not what it was") from exc
            raise self._named(exc, sent=False) from exc
        self.traffic.downloaded_bytes += len(data)
        if answer["ETag"] != etag:  # of a server that ignores the condition
            raise Lost(f"{self} is not what it was")
        return _fetched(answer, data)

    def etag(self) -> str | None:
        """The ETag of the object; None if there is none."""
        try:
            etag: str = self._in_time(lambda _: self._client.head_object(**self._where)["ETag"])
        except Exception as exc:
            if _status(exc) == 404 and _code(exc) != "NoSuchBucket":
                return None
            raise self._named(exc, sent=False) from exc
        return etag

    def put(self, body: Body, *, replacing: str | None, label: dict[str, str]) -> str:
        """Store this if the object still has this ETag, or is still missing. Returns the new ETag.

        `label` is kept beside it, for who looks at the bucket.
        """
        condition = {"IfNoneMatch": "*"} if replacing is None else {"IfMatch": replacing}
        size = len(body)
        self.traffic.puts += 1
        self.traffic.uploaded_bytes += size
        self.traffic.last_upload_bytes = size
        try:
            answer = self._put(body, size, Metadata=label, **condition)
        except Exception as exc:
            missing = _status(exc) == 404 and _code(exc) != "NoSuchBucket"
            if _status(exc) == 412 or missing:  # servers differ when the object was deleted
                raise Lost(f"{self} is not what it was") from exc
            raise self._named(exc, sent=True) from exc
        etag: str = answer["ETag"]
        return etag

    def _put(self, body: Body, size: int, **options: Any) -> Any:
        # A request that is given up must not read on from a file which changes by then.
        mine = body.again() if isinstance(body, FileBody) else body

        def request(deadline: Deadline) -> Any:
            deadline.extend(size)
            return self._client.put_object(
                **self._where, Body=mine, ContentType="application/vnd.sqlite3", **options
            )

        try:
            return self._in_time(request)
        finally:
            if isinstance(mine, FileBody):
                mine.close()

    def overwrite(self, data: bytes) -> None:
        """Store this, whatever is there."""
        self.traffic.puts += 1
        self._in_time(lambda _: self._client.put_object(**self._where, Body=data))

    def delete(self) -> None:
        self._in_time(lambda _: self._client.delete_object(**self._where))

    def _in_time(
        self, request: Callable[[Deadline], T], *, drop: Callable[[T], object] | None = None
    ) -> T:
        """What the request returns, or `TimeoutError` after its deadline. `drop` is for what is returned
        too late.
        """
        deadline = Deadline(self._settings.timeout)
        if self.in_this_thread:
            return request(deadline)

        def call() -> T | None:
            result = request(deadline)
            if deadline.end():
                return result
            if drop is not None:
                drop(result)
            return None

        future: Future[Any] = _requests.submit(call)
        while True:
            try:
                result: T = future.result(max(0.0, deadline.left()))
            except NotDone as exc:
                if future.done() and future.exception() is exc:
                    raise  # the request's own
                if deadline.left() <= 0 and deadline.expire():
                    raise TimeoutError("no answer, or not all of it, in time") from None
            else:
                return result

    def versions(self, limit: int) -> list[S3Version]:
        """The newest states of the object that the bucket keeps, the newest first."""
        where = {"Bucket": self._settings.bucket, "Prefix": self._settings.key}
        try:
            pages = self._client.get_paginator("list_object_versions").paginate(**where)
            found = [
                _version(each)
                for page in pages
                for each in (*page.get("Versions", ()), *page.get("DeleteMarkers", ()))
                if each["Key"] == self._settings.key
            ]
        except Exception as exc:
            raise self._named(exc, sent=False) from exc
        found.sort(key=lambda each: (each.modified_at, each.is_latest), reverse=True)
        return found[:limit]

    def honours_conditions(self) -> bool | None:
        """True if the server refuses a PUT whose `If-Match` does not hold; None if that cannot be told.

        It is tried beside the object, where nothing is: a server that honours it stores nothing.
        """
        beside = {"Bucket": self._settings.bucket, "Key": f"{self._settings.key}.if-match"}
        try:
            self._client.put_object(**beside, Body=b"", IfMatch=f'"{"0" * 32}"')
        except Exception as exc:
            if _status(exc) == 501:
                return False
            return True if _status(exc) in (404, 412) and _code(exc) != "NoSuchBucket" else None
        with suppress(Exception):
            self._client.delete_object(**beside)
        return False

    @property
    def is_amazons(self) -> bool:
        """True if the server is Amazon's own."""
        host = urlsplit(self._client.meta.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def __str__(self) -> str:
        return f"s3://{self._settings.bucket}/{self._settings.key}"

    @property
    def _client(self) -> Any:
        return _shared_client(self._settings)

    def _named(self, error: Exception, *, sent: bool) -> Exception:
        """The error for what happened to a request."""
        status, code = _status(error), _code(error)
        said = f"{self}: {code or type(error).__name__}: {error}"
        if status in (409, 429) or isinstance(error, _NEVER_SENT):
            return Unreachable(said)
        if status is None or status >= 500 or code in _WILL_PASS:
            if isinstance(error, _UNUSABLE):
                return InvalidConfig(said)
            if not isinstance(error, botocore.BotoCoreError | botocore.ClientError | OSError):
                return error
            return Unanswered(said) if sent else Unreachable(said)
        return InvalidConfig(said)


def _version(listed: dict[str, Any]) -> S3Version:
    return S3Version(
        listed["VersionId"],
        listed.get("ETag"),
        listed.get("Size"),
        listed["LastModified"],
        listed["IsLatest"],
    )


def _fetched(
    answer: dict[str, Any], data: bytes, *, file: Path | None = None, wanted: bool = True
) -> Fetched:
    version = answer.get("VersionId")
    return Fetched(
        answer["ETag"],
        data,
        answer.get("Metadata", {}),
        None if version in (None, "null") else version,
        file,
        wanted,
    )


def _read(body: Any, deadline: Deadline) -> bytes:
    data: list[bytes] = []
    while chunk := body.read(CHUNK):
        _go_on(deadline)
        data.append(chunk)
    return b"".join(data)


def _save(body: Any, directory: Path, deadline: Deadline) -> Path:
    """The body as a file of its own."""
    handle, name = tempfile.mkstemp(prefix=INCOMING, dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            while chunk := body.read(CHUNK):
                _go_on(deadline)
                file.write(chunk)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    return Path(name)


def _go_on(deadline: Deadline) -> None:
    if deadline.expired:
        raise TimeoutError("nobody waits for this any more")


_NEVER_SENT = (
    botocore.EndpointConnectionError,
    botocore.ConnectTimeoutError,
    botocore.ProxyConnectionError,
)
_UNUSABLE = (
    botocore.NoCredentialsError,
    botocore.PartialCredentialsError,
    botocore.NoRegionError,
    botocore.ParamValidationError,
    botocore.InvalidRegionError,
    botocore.ProfileNotFound,
)
_WILL_PASS = frozenset(("RequestTimeout", "SlowDown", "RequestTimeTooSkewed", "Throttling"))


def _status(error: BaseException) -> int | None:
    status: int | None = _said(error, "ResponseMetadata").get("HTTPStatusCode")
    return status


def _code(error: BaseException) -> str | None:
    code: str | None = _said(error, "Error").get("Code")
    return code


def _said(error: BaseException, part: str) -> dict[str, Any]:
    response: dict[str, dict[str, Any]] = getattr(error, "response", None) or {}
    return response.get(part, {})


# Making a client costs a tenth of a second, and one serves any number of threads.

_clients: dict[Any, Any] = {}
_clients_lock = threading.Lock()


def _start_anew() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()


in_child(_start_anew)


def _shared_client(settings: S3Settings) -> Any:
    """The client for these settings and the AWS variables as they are now. Not shared by a fork."""
    aws = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    key = (os.getpid(), settings.endpoint_url, settings.region, settings.timeout, aws)
    with _clients_lock:
        if key not in _clients:
            _clients[key] = _new_client(settings)
        return _clients[key]


def _new_client(settings: S3Settings) -> Any:
    addressing = {} if settings.endpoint_url is None else {"s3": {"addressing_style": "path"}}
    try:
        return boto3.Session().client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region,
            config=ClientConfig(
                retries={"total_max_attempts": 1},
                connect_timeout=settings.timeout,
                read_timeout=settings.timeout,
                max_pool_connections=CONNECTIONS,
                # Other servers than Amazon's may not know the newer checksums.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                **addressing,
            ),
        )
    except (*_UNUSABLE, ValueError) as exc:
        raise InvalidConfig(f"no S3 client can be made: {exc}") from exc
