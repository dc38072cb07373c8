"""What the ready pipelines share.

Each is a workflow of its own module. `pgqrs spark …` runs one in its process; should that die, any
worker that knows the workflow goes on: `pgqrs worker run pgqrs.spark.report`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import URL

from pgqrs.errors import InvalidConfig
from pgqrs.spark.files import absolute, open_files
from pgqrs.spark.session import is_connect
from pgqrs.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUEUE = "spark"
"""Where the runs of pipelines are."""
SEND_PASSWORD = "spark.pgqrs.sendPassword"
"""The setting that lets pipelines send a password to a Connect server."""


def url_of(store: Store) -> URL:
    """The URL of a store, with its password."""
    database = store._database
    return store.config.url if database.remote is not None else database.engine.url


def database_options(store: Store, spark: SparkSession) -> dict[str, str]:
    """The options of `format("pgqrs")` for the database of a store: its URL, unless the session names a
    variable or a function that tells it to those who need it.

    On Connect options are part of what is sent to the server, which may keep it: a password is refused.
    """
    options = {} if store.config.schema is None else {"databaseSchema": store.config.schema}
    for option in ("urlEnv", "urlProvider"):
        named = spark.conf.get(f"spark.pgqrs.{option}", None)
        if named:
            return options | {option: named}
    url = url_of(store)
    allowed = str(spark.conf.get(SEND_PASSWORD, "false")).lower() == "true"
    if url.password is not None and is_connect(spark) and not allowed:
        raise InvalidConfig(
            "the URL of the store has a password, and a Connect server would be sent it. Set "
            "spark.pgqrs.urlEnv to a variable that has the URL on the server and its executors, or "
            f"spark.pgqrs.urlProvider to a function that returns it; or set {SEND_PASSWORD}=true"
        )
    return options | {"url": url.render_as_string(hide_password=False)}


def write_text(path: str, text: str) -> None:
    """Write a file at once, wherever it is: nobody sees half of it."""
    files, inner = open_files(absolute(path))
    directory, _, name = inner.rpartition("/")
    if directory:
        files.create_dir(directory)
    draft = f"{directory}/.{name}.draft" if files.type_name == "local" else inner
    with files.open_output_stream(draft) as stream:
        stream.write(text.encode())
    if draft != inner:
        files.move(draft, inner)


def read_text(path: str) -> str:
    """The text of a file, wherever it is."""
    files, inner = open_files(absolute(path))
    with files.open_input_stream(inner) as stream:
        text: bytes = stream.read()
    return text.decode()
