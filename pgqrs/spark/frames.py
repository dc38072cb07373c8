"""What is kept of a DataFrame: where it was written to, its schema, and how many rows it has.

That is little, and so it can be the value of a step. The data is read again only when somebody asks
for it, and Spark is started only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pgqrs.codecs import Signature
from pgqrs.errors import ExportMismatch, FrameLost
from pgqrs.spark.files import count_rows
from pgqrs.spark.session import current_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

MARK = "pgqrs.frame"
"""Tells the record of a frame from other results; no other JSON of ours has this key."""


@dataclass(frozen=True)
class Frame:
    """A DataFrame that was written down. It has all that a DataFrame has: whatever else is asked of
    it is asked of `df()`.
    """

    path: str
    schema_json: dict[str, Any]
    rows: int

    @property
    def schema(self) -> StructType:
        """The columns and their types."""
        from pyspark.sql.types import StructType

        return StructType.fromJson(self.schema_json)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return [field["name"] for field in self.schema_json["fields"]]

    def df(self, spark: SparkSession | None = None) -> DataFrame:
        """The data. Starts Spark if need be."""
        session = spark or current_session()
        return session.read.schema(self.schema).parquet(self.path)

    def check(self) -> None:
        """Raise `FrameLost` if its files are not there any more, or not all of them."""
        found = _rows_at(self)
        if found != self.rows:
            raise FrameLost(self.path, self.rows, found)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling ask for such
            raise AttributeError(name)
        return getattr(self.df(), name)

    def __getitem__(self, item: Any) -> Any:
        return self.df()[item]


def write_counted(rows: DataFrame, write: Callable[[DataFrame], None], path: str) -> Frame:
    """Write rows as Parquet to a path that nobody else uses, and count them on both sides.

    Spark says how many rows passed, the files say how many are there. Where executors and the driver
    do not share the file system, every host writes to a directory of its own, and Spark finds no
    fault with that: the directory of the driver is empty.
    """
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    passed = Observation()
    write(rows.observe(passed, count(lit(1)).alias("rows")))
    frame = Frame(path, rows.schema.jsonValue(), 0)
    found = _rows_at(frame, rows.sparkSession)
    # Spark does not observe what turns out to be empty.
    expected = passed.get["rows"] if found or not rows.isEmpty() else 0
    if found != expected:
        raise ExportMismatch(path, expected, found)
    return replace(frame, rows=found)


def _rows_at(frame: Frame, spark: SparkSession | None = None) -> int:
    """How many rows the files of a frame have, as seen from the driver."""
    from pyspark.errors import AnalysisException

    found = count_rows(frame.path)
    if found is not None:
        return found
    try:
        return int(frame.df(spark).count())
    except AnalysisException as exc:
        if exc.getCondition() != "PATH_NOT_FOUND":
            raise
        return 0


def is_frame(found: Any) -> bool:
    """True if this is the record of a frame."""
    return isinstance(found, dict) and set(found) == {MARK}


class FrameSignature(Signature):
    """A function whose result may be a frame."""

    def encode_result(self, value: Any) -> Any:
        return {MARK: vars(value)} if isinstance(value, Frame) else super().encode_result(value)

    def decode_result(self, found: Any) -> Any:
        if is_frame(found):
            return Frame(**found[MARK])
        return super().decode_result(found)
