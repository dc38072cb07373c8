"""One Spark for all tests of the directory: starting one takes ten seconds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import pgqrs
from tests.conftest import s3_environment

collect_ignore_glob = [] if find_spec("pyspark") else ["test_*.py"]
"""The session `spark` of nox has pyspark; the others need not."""

URL_VARIABLE = "PGQRS_TEST_SPARK_URL"
SETTINGS: dict[str, Any] = {
    "master": "local[2,4]",  # two tasks at a time, each tried up to four times
    "driver_host": "127.0.0.1",
    "driver_bindAddress": "127.0.0.1",
    "driver_memory": "1g",
    "ui_enabled": False,
    "sql_shuffle_partitions": 2,
    # Rows are few: compiling a query would take longer than running it does.
    "sql_codegen_wholeStage": False,
    "sql_codegen_factoryMode": "NO_CODEGEN",
    # What is compiled thoroughly pays off after minutes, and collecting in parallel with more memory.
    "driver_extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


LONGEST = tuple(
    f"test_spark_{name}.py" for name in ("page", "stream_crashes", "connect", "declarative")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that nobody waits for it at the end. PySpark leaves sockets to
    the garbage collector.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
            item.add_marker(
                pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
            )


@pytest.fixture(scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the whole run. Workers of Spark have the environment it was started in, so all
    they need is set before.
    """
    home = tmp_path_factory.mktemp("spark")
    with s3_environment(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGQRS_S3_CACHE", str(home / "s3"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.setenv(URL_VARIABLE, f"sqlite:///{home / 'variable.db'}")
        yield home


@pytest.fixture(scope="session")
def spark(spark_home: Path) -> Iterator[Any]:
    from pgqrs.spark import session

    spark = session("tests", sql_warehouse_dir=str(spark_home / "warehouse"), **SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    yield spark
    spark.stop()


def s3_url(server: str) -> str:
    """A key where nothing is yet, in a URL that says all."""
    return f"s3://bucket/{uuid.uuid4().hex}.sqlite?mode=durable&endpoint_url={server}"


@pytest.fixture(params=["postgres", "sqlite", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """A store of each kind, with the queues `tasks` and `others`."""
    kind = request.param
    if kind == "s3":
        found = s3_url(request.getfixturevalue("moto"))
    else:
        found = request.getfixturevalue(f"{kind}_database")
    install(found)
    return found


def install(url: str) -> None:
    with pgqrs.Store(url) as store:
        store.admin().install()
        store.admin().create_queue("tasks")
        store.admin().create_queue("others")


@pytest.fixture
def pg_url(postgres_database: str) -> str:
    """The same on PostgreSQL only."""
    install(postgres_database)
    return postgres_database
