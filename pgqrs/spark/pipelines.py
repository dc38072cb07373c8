"""What the ready pipelines share.

Each is a workflow of its own module. `pgqrs spark …` runs one in its process; should that die, any
worker that knows the workflow goes on: `pgqrs worker run pgqrs.spark.report`.
"""

from __future__ import annotations

from pgqrs.spark.files import absolute, open_files
from pgqrs.store import Store

QUEUE = "spark"
"""Where the runs of pipelines are."""


def database_options(store: Store) -> dict[str, str]:
    """The options of `format("pgqrs")` for the database of a store. Spark itself does not show a URL."""
    database = store._database
    url = store.config.url if database.remote is not None else database.engine.url
    options = {"url": url.render_as_string(hide_password=False)}
    if store.config.schema is not None:
        options["databaseSchema"] = store.config.schema
    return options


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
