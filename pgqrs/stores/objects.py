"""One object in a bucket, replaced by compare-and-swap on its ETag.

`put` is one PutObject with `If-Match`, or with `If-None-Match: *` to create, and is never repeated
here. botocore must not repeat it either: an upload that was applied, but whose answer was lost,
would come back as a failed condition although it is ours. So each attempt ends in one of four ways:

- an ETag: it is stored;
- `Lost`: the object is not the one it was based on;
- `Unreachable`: it was refused or never sent, so nothing is stored, and it may be tried again;
- `Unanswered`: it may be stored or not. Who uploads must find out by looking.

What will not pass by waiting (no bucket, no permission, no credentials) is `InvalidConfig`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from pgqrs.config import S3Settings
from pgqrs.errors import InvalidConfig, PgqrsError

try:
    import boto3
    from botocore import exceptions as botocore
    from botocore.config import Config as ClientConfig
except ModuleNotFoundError as exc:  # the extra is not installed
    raise InvalidConfig("a store in S3 needs boto3: pip install 'pgqrs[s3]'") from exc

CONNECTIONS = 20


class Lost(PgqrsError):
    """Someone else replaced, created or deleted the object first."""


class Unreachable(PgqrsError):
    """The bucket cannot be reached, or is too busy, just now. Nothing was changed."""


class Unanswered(Unreachable):
    """A request was sent, and no answer says what became of it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The object as it was at one moment. Without an ETag there was none."""

    etag: str | None
    data: bytes
    label: dict[str, str] = field(default_factory=dict)
    version: str | None = None
    """Its name among the versions of the object, if the bucket keeps them."""


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

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._where: dict[str, Any] = {"Bucket": settings.bucket, "Key": settings.key}
        self.traffic = Traffic()

    def get(self, *, unless: str | None) -> Fetched | None:
        """The object; None if it still has this ETag."""
        condition = {} if unless is None else {"IfNoneMatch": unless}
        self.traffic.gets += 1
        try:
            answer = self._client.get_object(**self._where, **condition)
            data: bytes = answer["Body"].read()
        except Exception as exc:
            if _status(exc) == 304:
                self.traffic.not_modified += 1
                return None
            if _status(exc) == 404 and _code(exc) != "NoSuchBucket":
                return Fetched(None, b"")
            raise self._named(exc, sent=False) from exc
        self.traffic.downloaded_bytes += len(data)
        return _fetched(answer, data)

    def get_pinned(self, *, etag: str, version: str | None) -> Fetched:
        """The object as it was; `Lost` if it is not to be had any more."""
        wanted = {"IfMatch": etag} if version is None else {"VersionId": version}
        self.traffic.gets += 1
        try:
            answer = self._client.get_object(**self._where, **wanted)
            data: bytes = answer["Body"].read()
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
            etag: str = self._client.head_object(**self._where)["ETag"]
        except Exception as exc:
            if _status(exc) == 404 and _code(exc) != "NoSuchBucket":
                return None
            raise self._named(exc, sent=False) from exc
        return etag

    def put(self, data: bytes, *, replacing: str | None, label: dict[str, str]) -> str:
        """Store this if the object still has this ETag, or is still missing. Returns the new ETag.

        `label` is kept beside it, for who looks at the bucket.
        """
        condition = {"IfNoneMatch": "*"} if replacing is None else {"IfMatch": replacing}
        self.traffic.puts += 1
        self.traffic.uploaded_bytes += len(data)
        self.traffic.last_upload_bytes = len(data)
        try:
            answer = self._client.put_object(
                **self._where,
                **condition,
                Body=data,
                ContentType="application/vnd.sqlite3",
                Metadata=label,
            )
        except Exception as exc:
            missing = _status(exc) == 404 and _code(exc) != "NoSuchBucket"
            if _status(exc) == 412 or missing:  # servers differ when the object was deleted
                raise Lost(f"{self} is not what it was") from exc
            raise self._named(exc, sent=True) from exc
        etag: str = answer["ETag"]
        return etag

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


def _fetched(answer: dict[str, Any], data: bytes) -> Fetched:
    version = answer.get("VersionId")
    return Fetched(
        answer["ETag"],
        data,
        answer.get("Metadata", {}),
        None if version in (None, "null") else version,
    )


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
