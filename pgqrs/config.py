"""Settings: arguments win over `PGQRS_…` environment variables, which win over defaults.

Also the one place that understands the URLs pgqrs accepts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import platformdirs
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from pgqrs.errors import InvalidConfig
from pgqrs.types import MAX_JSON_DEPTH

ACCEPTED = (
    "sqlite:///relative.db, sqlite:////absolute.db, sqlite://./relative.db, sqlite:relative.db, "
    "sqlite::memory:, postgresql://…, postgres://…, postgresql+psycopg://…, s3://bucket/key"
)
JOURNAL_MODES = ("WAL", "DELETE", "TRUNCATE", "PERSIST", "MEMORY", "OFF")
SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")
S3_MODES = ("durable", "local")
S3_KEY = "pgqrs.sqlite"
S3_SHARD_BY = ("name", "group")
MAX_SHARDS = 256
MORE_THAN_ZERO = (
    *("max_payload_bytes", "max_payload_depth", "max_dequeue_bytes", "max_read_ct", "pool_size"),
    *("lease", "heartbeat", "s3_sync_interval", "s3_timeout"),
)
NOT_NEGATIVE = ("retry_for", "prepare_threshold", "sqlite_busy_timeout", "s3_max_staleness")
FINITE = ("lease", "heartbeat", "retry_for", "sqlite_busy_timeout", "s3_timeout")
_IMPORT_PATH = re.compile(r"[\w.]+:[\w.]+")
MAX_IDENTIFIER = 63
"""Bytes of a name in PostgreSQL; longer ones are cut off without an error."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that can be set. Each field is also `PGQRS_<NAME>` in the environment."""

    dsn: str | None = field(default=None, repr=False)
    """The database; None is a SQLite file in the platform's data directory."""
    schema: str | None = None
    """The PostgreSQL schema the tables live in; None is the connection's default."""
    upgrade: bool = False
    """Whether opening a store may migrate it."""
    create_queues: bool = False
    """Whether a producer creates its queue if there is none of that name."""
    max_payload_bytes: int = 1024 * 1024
    max_payload_depth: int = 100
    max_dequeue_bytes: int = 64 * 1024 * 1024
    """Bytes of payload that one dequeue takes; whatever its size, one message is always handed out."""
    lease: float = 30.0
    """Seconds a claim lasts, on queues created without a lease of their own."""
    max_read_ct: int = 10
    """Attempts before a message is dead-lettered, on queues created without a limit of their own. With
    the delays of tasks and handlers they take about an hour.
    """
    redact_errors: str | Callable[[str], str] | None = None
    """What every error text passes before it is stored or logged: a function from text to text, or its
    import path, `module:function`. None keeps texts as they are.
    """
    heartbeat: float = 30.0
    """Seconds between the signs of life of a consumer."""
    retry_for: float = 30.0
    """Seconds a call keeps trying while the database is busy, restarting or unreachable."""
    pool_size: int = 10
    """Connections kept to PostgreSQL; as many again are opened under load."""
    prepare_threshold: int | None = 5
    """Uses after which psycopg prepares a statement; None (`PGQRS_PREPARE_THRESHOLD=none`) never."""
    listen_dsn: str | None = field(default=None, repr=False)
    """The same PostgreSQL database past a pooler, to hear of new messages; None is `dsn`."""
    sqlite_journal_mode: str = "WAL"
    sqlite_synchronous: str = "FULL"
    sqlite_busy_timeout: float = 5.0
    s3_mode: str = "durable"
    """`durable`: a write returns once it is in the bucket; `local`: it is uploaded afterwards."""
    s3_endpoint_url: str | None = None
    """The server, if it is not Amazon's."""
    s3_region: str | None = None
    s3_cache: str | None = None
    """The directory for local copies, or `:memory:`; None is the platform's cache directory."""
    s3_sync_interval: float = 1.0
    """Seconds between uploads in local mode; `inf` leaves every upload to who steps by hand."""
    s3_max_staleness: float | None = None
    """Seconds for which what was read from the bucket counts as current; None is 0 in durable mode
    and 5 in local mode.
    """
    s3_timeout: float = 20.0
    """Seconds to wait for an answer of the bucket."""
    s3_retry_conflicts: bool = False
    """Whether a write that lost a race is repeated by itself instead of raising `ConflictError`."""
    s3_shards: int | None = None
    """How many objects the store is spread over, queue by queue; None: it is one object at the key."""
    s3_shard_by: str = "name"
    """What decides on which shard a queue is: its `name`, or its `group`, up to the first dot."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("sqlite_journal_mode", JOURNAL_MODES),
            ("sqlite_synchronous", SYNCHRONOUS),
        ):
            value = str(getattr(self, name)).upper()
            if value not in allowed:
                raise InvalidConfig(f"{name} is {value!r}; expected one of {', '.join(allowed)}")
            object.__setattr__(self, name, value)
        if self.schema is not None:
            _check_schema(self.schema)
        if self.s3_mode not in S3_MODES:
            raise InvalidConfig(
                f"s3_mode is {self.s3_mode!r}; expected one of {', '.join(S3_MODES)}"
            )
        if self.s3_shard_by not in S3_SHARD_BY:
            raise InvalidConfig(
                f"s3_shard_by is {self.s3_shard_by!r}; expected one of {', '.join(S3_SHARD_BY)}"
            )
        if self.s3_shards is not None and not 1 <= self.s3_shards <= MAX_SHARDS:
            raise InvalidConfig(f"s3_shards is {self.s3_shards!r}; expected from 1 to {MAX_SHARDS}")
        redact = self.redact_errors
        if not (redact is None or callable(redact) or _IMPORT_PATH.fullmatch(str(redact))):
            raise InvalidConfig(
                f"redact_errors is {redact!r}; expected a function, or its path module:function"
            )
        for name in MORE_THAN_ZERO:
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; expected more than 0")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidConfig(f"{name} is {value!r}; expected 0 or more")
        for name in FINITE:
            if math.isinf(getattr(self, name)):
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; expected a finite number")
        if self.max_payload_depth > MAX_JSON_DEPTH:
            raise InvalidConfig(
                f"max_payload_depth is {self.max_payload_depth}; expected {MAX_JSON_DEPTH} at most"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Self:
        """Settings from the environment, with these arguments on top of them."""
        environ = os.environ if environ is None else environ
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(arguments.keys() - known.keys())
        if unknown:
            raise InvalidConfig(
                f"no such setting: {', '.join(unknown)}; there are {', '.join(known)}"
            )
        found = {
            name: _parse(f"PGQRS_{name.upper()}", str(setting.type), environ[variable])
            for name, setting in known.items()
            if name not in arguments and (variable := f"PGQRS_{name.upper()}") in environ
        }
        return cls(**found | arguments)

    @classmethod
    def from_dsn(cls, dsn: str, **arguments: Any) -> Self:
        """Settings for this database, the rest from the environment."""
        return cls.from_env(dsn=dsn, **arguments)

    def with_(self, **changes: Any) -> Self:
        """A copy with these settings changed."""
        return replace(self, **changes)

    @property
    def url(self) -> URL:
        """The database as a SQLAlchemy URL. Its `str()` hides the password."""
        return parse_dsn(self.dsn) if self.dsn is not None else default_url()


def _check_schema(schema: str) -> None:
    """Refuse a name that PostgreSQL cuts off, or that statements or their driver read otherwise."""
    if not schema or not schema.isprintable():
        raise InvalidConfig(f"schema is {schema!r}; expected printable text")
    if len(schema.encode(errors="replace")) > MAX_IDENTIFIER:
        raise InvalidConfig(f"schema is longer than {MAX_IDENTIFIER} bytes, which PostgreSQL cuts")
    refused = sorted(set(schema) & set('%."[]'))
    if refused:
        raise InvalidConfig(f"schema is {schema!r}; it must not contain {' or '.join(refused)}")


def _parse(variable: str, kind: str, text: str) -> Any:
    kind, _, optional = kind.partition(" | ")
    if optional and text.lower() in ("", "none"):
        return None
    try:
        if kind == "bool":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.lower()
            ]
        return {"int": int, "float": float, "str": str}[kind](text)
    except (KeyError, ValueError) as exc:
        raise InvalidConfig(f"{variable} is {text!r}; expected {kind}") from exc


def default_url() -> URL:
    """The SQLite file used when nothing names a database."""
    directory = Path(platformdirs.user_data_dir("pgqrs", appauthor=False))
    return URL.create("sqlite", database=str(directory / "pgqrs.db"))


def parse_dsn(dsn: str) -> URL:
    """The SQLAlchemy URL for any of the accepted forms; errors never repeat a password."""
    if dsn.startswith("sqlite:"):
        return URL.create("sqlite", database=_sqlite_path(dsn))
    scheme, separator, _ = dsn.partition("://")
    if separator and scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        return _postgres_url(dsn)
    if separator and scheme == "s3":
        return _s3_url(dsn)
    named = f"scheme {scheme!r} is not" if separator else "a URL without a known scheme is not"
    raise InvalidConfig(f"{named} accepted; accepted are: {ACCEPTED}")


def _postgres_url(dsn: str) -> URL:
    try:
        url = make_url(_with_hosts_apart(dsn)).set(drivername="postgresql+psycopg")
    except (ArgumentError, ValueError):
        raise InvalidConfig("the PostgreSQL URL cannot be parsed") from None
    if "@" in (url.host or ""):
        raise InvalidConfig("the PostgreSQL URL has two @; write the one in the password as %40")
    if isinstance(url.query.get("host"), tuple) and "target_session_attrs" not in url.query:
        # Of several servers one takes writes, and after a failover it is another one.
        url = url.update_query_dict({"target_session_attrs": "read-write"})
    return url


def _with_hosts_apart(dsn: str) -> str:
    """PostgreSQL's way to name several servers, `user@one:5432,two:5432/name`, as SQLAlchemy's."""
    found = re.fullmatch(r"([^:]+://)([^/?#]*@)?([^/?#@]*,[^/?#@]*)(/[^?]*)?(?:\?(.*))?", dsn)
    if found is None:
        return dsn
    scheme, user, hosts, database, query = found.groups("")
    named = [host if ":" in host else f"{host}:5432" for host in hosts.split(",")]
    parameters = "&".join([*(f"host={host}" for host in named), *filter(None, [query])])
    return f"{scheme}{user}{database or '/'}?{parameters}"


def _s3_url(dsn: str) -> URL:
    parts = urlsplit(dsn)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", parts.netloc):
        raise InvalidConfig(
            "an S3 URL is s3://bucket/key; credentials come from the environment or a profile"
        )
    try:
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True))
    except ValueError as exc:
        if parts.query:
            raise InvalidConfig(f"the parameters of the S3 URL cannot be parsed: {exc}") from exc
        query = {}
    key = unquote(parts.path).removeprefix("/") or S3_KEY
    return URL.create("s3", host=parts.netloc, database=key, query=query)


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """Where a store in S3 is, and how it behaves: a `Config` with what its URL says on top of it."""

    bucket: str
    key: str
    mode: str
    endpoint_url: str | None
    region: str | None
    cache: str | None
    sync_interval: float
    max_staleness: float
    timeout: float
    shards: int | None
    shard_by: str

    @classmethod
    def of(cls, config: Config) -> Self:
        """The settings of a store whose URL starts with `s3://`."""
        url = config.url
        kinds = {f.name: str(f.type) for f in fields(Config) if f.name.startswith("s3_")}
        changes: dict[str, Any] = {}
        for name, text in url.query.items():
            if f"s3_{name}" not in kinds:
                known = ", ".join(kind.removeprefix("s3_") for kind in kinds)
                raise InvalidConfig(f"an S3 URL has no parameter {name!r}; there are {known}")
            changes[f"s3_{name}"] = _parse(name, kinds[f"s3_{name}"], str(text))
        config = config.with_(**changes)
        staleness = {"durable": 0.0, "local": 5.0}[config.s3_mode]
        return cls(
            bucket=str(url.host),
            key=str(url.database),
            mode=config.s3_mode,
            endpoint_url=config.s3_endpoint_url,
            region=config.s3_region,
            cache=config.s3_cache,
            sync_interval=config.s3_sync_interval,
            max_staleness=staleness if config.s3_max_staleness is None else config.s3_max_staleness,
            timeout=config.s3_timeout,
            shards=config.s3_shards,
            shard_by=config.s3_shard_by,
        )


def address_of(url: URL) -> str:
    """Where a database is: its hosts and its name, and nothing secret."""
    several = url.query.get("host", ())
    hosts = [several] if isinstance(several, str) else list(several)
    if url.host:
        hosts = [url.host if url.port is None else f"{url.host}:{url.port}"]
    return "/".join(filter(None, [",".join(hosts), url.database])) or url.drivername


def shown(url: URL) -> str:
    """A URL that may be printed: without a password, wherever it stands."""
    return url.set(query={}).render_as_string(hide_password=True)


def _sqlite_path(dsn: str) -> str:
    rest = dsn.removeprefix("sqlite:")
    if rest.startswith("///"):
        rest = rest[3:]  # SQLAlchemy's form: the path, relative or absolute, follows three slashes
    elif rest.startswith("//"):
        rest = rest[2:]
    if "?" in rest:
        raise InvalidConfig(
            f"a SQLite URL takes no parameters; use PGQRS_SQLITE_… or Config: {dsn}"
        )
    return rest or ":memory:"
