"""The data source, with accidents: what they are is told by options that begin with `test`.

Run as a program it writes numbers to a queue twice, at once, in a process that is killed when one write
is about to be published, and the other was.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pgqrs.spark import source
from pgqrs.spark.writing import Writer
from pyspark_pgqrs import DefaultSource

ACCIDENTS = ("before", "after")
"""Of the driver, with respect to publishing."""


class FlakySource(DefaultSource):
    @classmethod
    def name(cls) -> str:
        return "flaky"

    def writer(self, schema: Any, overwrite: bool) -> Any:
        given = dict(self.options)
        accident, marker = given.pop("testaccident"), given.pop("testmarker")
        writer: Any = source.writer(given, schema, overwrite)
        return FlakyWriter(writer.bulk, accident, marker)


class FlakyWriter(Writer):
    def __init__(self, bulk: Any, accident: str, marker: str) -> None:
        super().__init__(bulk)
        self.accident = accident
        self.marker = Path(marker)

    def write(self, iterator: Iterator[Any]) -> Any:
        stored: Any = super().write(iterator)
        if self.accident == "task" and self._is_first(stored.part.part):
            raise RuntimeError("an accident, after all was stored")
        return stored

    def commit(self, messages: Any) -> None:
        if self.accident == "before":
            self._kill_driver()
        super().commit(messages)
        if self.accident == "after":
            self._kill_driver()

    def _is_first(self, part: int) -> bool:
        try:
            (self.marker / f"part-{part}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _kill_driver(self) -> None:
        """The driver and its Java, which are a group of processes; and this one, which is not. Not
        before the other write has come to its accident.
        """
        (self.marker / self.accident).touch()
        while not all((self.marker / accident).exists() for accident in ACCIDENTS):
            time.sleep(0.05)
        os.killpg(int((self.marker / "driver").read_text()), signal.SIGKILL)
        os._exit(1)


def main(url: str, marker: str) -> None:
    from pgqrs.spark.session import activate, session
    from tests.spark.conftest import SETTINGS

    spark = session("killed", **SETTINGS)
    spark.dataSource.register(FlakySource)
    (Path(marker) / "driver").write_text(str(os.getpgid(0)))

    def save(accident: str) -> None:
        activate(spark)
        options = {"queue": "tasks", "writeId": accident, "testAccident": accident}
        writing = numbers(spark).write.format("flaky").mode("append").option("url", url)
        writing.options(testMarker=marker, **options).save()

    with ThreadPoolExecutor() as pool:
        list(pool.map(save, ACCIDENTS))
    print("not killed")


def numbers(spark: Any, parts: int = 3, count: int = 3000) -> Any:
    """Messages that can be told apart."""
    return spark.range(0, count, 1, parts).selectExpr("to_json(named_struct('n', id)) as payload")


if __name__ == "__main__":
    main(*sys.argv[1:])
