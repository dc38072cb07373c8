"""`python -m benchmarks.spark`: a million small messages through Spark, beside Spark's own JDBC.

The same session, the same server, the same rows, in turns. JDBC reads `pgqrs_messages` in as many ranges
of ids, and writes to a copy of that table with all its indexes, with `reWriteBatchedInserts`. Needs the
driver (Debian: `libpostgresql-jdbc-java`); without it the comparison is with COPY in one process.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import psycopg
from rich.console import Console
from rich.table import Table

import pgqrs
from pgqrs.spark import session
from pgqrs.testing.postgres import postgres_dsn

JARS = ("/usr/share/java/postgresql.jar", "/usr/share/java/postgresql-jdbc4.jar")
PARTS = 2
WARM_UP = 2
SOME = ("id", "priority", "enqueued_at", "read_ct", "payload")
"""Columns, where not all are read. JDBC is told by Spark; to a source in Python it says nothing, so the
option does."""
PAYLOAD = "to_json(named_struct('n', id, 'text', concat('message ', id)))"
COPY_OF_TABLE = (
    "DROP TABLE IF EXISTS jdbc_messages; "
    "CREATE TABLE jdbc_messages (LIKE pgqrs_messages INCLUDING ALL)"
)
# What `enqueue` fills in. Spark names all columns of a row that it writes.
JDBC_ROW = (
    "1L as queue_id, 0 as priority, true as ready, current_timestamp() as vt, 0 as read_ct, "
    "0 as released_ct, current_timestamp() as enqueued_at"
)
TARGETS = {
    "read (whole rows)": 0.9,
    "read (five columns)": 0.9,
    "write (staged)": 1.5,
    "write (part-key)": 1.5,
}


class Bench:
    """A server, a session, and what is measured on them."""

    def __init__(self, dsn: str, spark: Any, rows: int, *, has_jdbc: bool) -> None:
        self.dsn, self.spark, self.rows, self.has_jdbc = dsn, spark, rows, has_jdbc
        with pgqrs.Store(dsn) as store:
            store.admin().install()
            store.admin().create_queue("bench")

    def sql(self, text: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in text.split(";"):
                connection.execute(statement)

    def messages(self) -> Any:
        return self.spark.range(0, self.rows, 1, PARTS).selectExpr(f"{PAYLOAD} as payload")

    def write(self, **options: Any) -> float:
        self.sql("TRUNCATE pgqrs_messages; TRUNCATE pgqrs_staged; CHECKPOINT")
        frame = self.messages().write.format("pgqrs").mode("append")
        seconds = timed(lambda: frame.options(url=self.dsn, queue="bench", **options).save())
        # Else whoever reads first does this, and pays for it.
        self.sql("VACUUM ANALYZE pgqrs_messages; CHECKPOINT")
        return seconds

    def read(self, columns: Sequence[str] = ()) -> float:
        reading = self.spark.read.format("pgqrs").option("url", self.dsn)
        frame = reading.option("numPartitions", PARTS).option("columns", ",".join(columns)).load()
        return consumed(frame, columns)

    def jdbc(self, table: str) -> dict[str, Any]:
        host = psycopg.conninfo.conninfo_to_dict(self.dsn)
        address = f"{host['host']}:{host['port']}/{host['dbname']}"
        return {
            "url": f"jdbc:postgresql://{address}?reWriteBatchedInserts=true&stringtype=unspecified",
            "user": host.get("user"),
            "password": host.get("password") or "",
            "driver": "org.postgresql.Driver",
            "dbtable": table,
        }

    def write_by_jdbc(self) -> float:
        self.sql(f"{COPY_OF_TABLE}; CHECKPOINT")
        frame = self.messages().selectExpr("payload", *JDBC_ROW.split(", "))
        writing = frame.write.format("jdbc").mode("append").options(**self.jdbc("jdbc_messages"))
        return timed(lambda: writing.option("batchsize", 10_000).save())

    def read_by_jdbc(self, columns: Sequence[str] = ()) -> float:
        with psycopg.connect(self.dsn) as connection:
            query = "SELECT min(id), max(id) FROM pgqrs_messages"
            first, last = connection.execute(query).fetchone() or (0, 0)
        bounds = {"partitionColumn": "id", "lowerBound": first, "upperBound": last + 1}
        reading = self.spark.read.format("jdbc").options(**self.jdbc("pgqrs_messages"), **bounds)
        frame = reading.option("fetchsize", 10_000).option("numPartitions", PARTS).load()
        return consumed(frame, columns)

    def write_by_copy(self) -> float:
        self.sql(f"{COPY_OF_TABLE}; CHECKPOINT")
        columns = "payload, queue_id, priority, ready, vt, read_ct, released_ct, enqueued_at"

        def copy() -> None:
            with (
                psycopg.connect(self.dsn) as connection,
                connection.cursor() as cursor,
                cursor.copy(f"COPY jdbc_messages ({columns}) FROM STDIN") as stream,
            ):
                for n in range(self.rows):
                    payload = f'{{"n":{n},"text":"message {n}"}}'
                    stream.write_row((payload, 1, 0, True, "now", 0, 0, "now"))

        return timed(copy)

    def read_by_copy(self, columns: Sequence[str] = ()) -> float:
        chosen = f"({', '.join(columns)})" if columns else ""

        def copy() -> None:
            with (
                psycopg.connect(self.dsn) as connection,
                connection.cursor() as cursor,
                cursor.copy(f"COPY pgqrs_messages {chosen} TO STDOUT") as stream,
                io.BytesIO() as sink,
            ):
                for piece in stream:
                    sink.write(piece)

        return timed(copy)


def consumed(frame: Any, columns: Sequence[str]) -> float:
    """All rows come to Spark, and are thrown away there."""
    chosen = frame.select(*columns) if columns else frame
    return timed(lambda: chosen.write.format("noop").mode("overwrite").save())


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Seconds, round by round, each in the order opposite to the one before; the first two only warm
    up: what Java compiles gets quicker for some time.
    """
    read_by_other = bench.read_by_jdbc if bench.has_jdbc else bench.read_by_copy
    sides: dict[str, Callable[[], float]] = {
        "write (staged)": bench.write,
        "write (part-key)": lambda: bench.write(writeMode="part-key", numPartitions=PARTS),
        "read (whole rows)": bench.read,
        "base read (whole rows)": read_by_other,
        "read (five columns)": lambda: bench.read(SOME),
        "base read (five columns)": lambda: read_by_other(SOME),
        "base write": bench.write_by_jdbc if bench.has_jdbc else bench.write_by_copy,
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + WARM_UP):
        for name in sides if number % 2 == 0 else reversed(sides):
            seconds = sides[name]()
            if number >= WARM_UP:
                found[name].append(seconds)
    return found


def show(found: dict[str, list[float]], rows: int, base: str) -> None:
    table = Table(title=f"{rows:,} messages, PostgreSQL, beside {base}")
    for column in ("", f"{base} s", "pgqrs s", "messages /s", "ratio", "wanted"):
        table.add_column(column, justify="left" if not column else "right")
    for name, target in TARGETS.items():
        others = found.get(f"base {name}", found["base write"])
        theirs, ours = median(others), median(found[name])
        row = (f"{theirs:.2f}", f"{ours:.2f}", f"{rows / ours:,.0f}", f"{theirs / ours:.2f}")
        table.add_row(name, *row, f"{target}")
    Console().print(table)


@click.command()
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--rounds", default=6, show_default=True)
def main(rows: int, rounds: int) -> None:
    """Reading and writing messages with Spark."""
    jar = next((path for path in JARS if Path(path).exists()), None)
    settings: dict[str, Any] = {} if jar is None else {"jars": jar}
    with postgres_dsn() as dsn:
        spark = session(
            "bench",
            master="local[2]",
            ui_enabled=False,
            driver_bindAddress="127.0.0.1",
            driver_host="127.0.0.1",
            ui_showConsoleProgress=False,
            **settings,
        )
        spark.sparkContext.setLogLevel("ERROR")
        try:
            found = measure(Bench(dsn, spark, rows, has_jdbc=jar is not None), rounds)
        finally:
            spark.stop()
    show(found, rows, "JDBC" if jar else "COPY")


if __name__ == "__main__":
    main()
