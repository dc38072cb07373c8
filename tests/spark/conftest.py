"""One Spark for all tests of the directory: starting one takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("pyspark") else ["test_*.py"]
"""The session `spark` of nox has pyspark; the others need not."""

SETTINGS: dict[str, Any] = {
    "master": "local[2,4]",  # two tasks at a time, each tried up to four times
    "driver_host": "127.0.0.1",
    "driver_bindAddress": "127.0.0.1",
    "driver_memory": "1g",
    "ui_enabled": False,
    "sql_shuffle_partitions": 2,
    # What is compiled thoroughly pays off after minutes, and collecting in parallel with more memory.
    "driver_extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PySpark leaves sockets to the garbage collector."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pgqrs.spark import session

    warehouse = tmp_path_factory.mktemp("warehouse")
    spark = session("tests", sql_warehouse_dir=str(warehouse), **SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    yield spark
    spark.stop()
