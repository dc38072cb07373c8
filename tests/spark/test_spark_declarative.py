"""Spark Declarative Pipelines: a queue as a source and as a sink, by their own command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.dataset as parquet

import pgqrs
from pgqrs.spark import java_home

ROOT = Path(__file__).parents[2]
SPEC = """
name: orders
storage: {directory}/storage
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.shuffle.partitions: "2"
"""
DEFINITIONS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()


def orders_in(mode, **options):
    reader = spark.readStream.format("pgqrs")
    return reader.options(urlEnv="APP_DSN", queue="orders", mode=mode, **options).load()


@dp.table
def orders():
    return orders_in("tail").select("id", "payload")


dp.create_sink("large", "pgqrs", {"urlEnv": "APP_DSN", "queue": "large"})


@dp.append_flow(target="large")
def large_orders():
    claimed = orders_in("claim", stream="large-orders")
    return claimed.where("get_json_object(payload, '$.cents') >= 50").select("payload")
"""
SETTINGS = {
    "spark.sql.catalogImplementation": "hive",  # the second run must find the table
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}


def run(directory: Path, url: str) -> None:
    command = Path(sys.executable).with_name("spark-pipelines")
    conf = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    environment = {
        "APP_DSN": url,
        "JAVA_HOME": java_home(),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_TESTING": "1",  # then its server takes a port that is free
    }
    done = subprocess.run(
        [command, "run", *conf],
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_queue_is_source_and_sink(sqlite_database: str, tmp_path: Path) -> None:
    """Run twice: the second time there are exactly the new messages more."""
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "orders.py").write_text(DEFINITIONS)
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(directory=tmp_path.as_uri()))
    with pgqrs.Store(sqlite_database, upgrade=True) as store:
        for queue in ("orders", "large"):
            store.admin().create_queue(queue)
        for first, last in ((0, 100), (100, 110)):
            store.producer("orders").enqueue_many({"cents": n} for n in range(first, last))
            run(tmp_path, sqlite_database)
            found = store.admin().peek("large", 1000)
            cents = Counter(message.payload["cents"] for message in found)
            assert cents == Counter(range(50, last))
            table = parquet.dataset(tmp_path / "spark-warehouse" / "orders", format="parquet")
            assert table.count_rows() == last
            stats = store.admin().queue_stats("orders")
            assert (stats.ready, stats.leased, stats.archived["completed"]) == (0, 0, last)
