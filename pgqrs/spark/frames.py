"""What is kept of a DataFrame: where it was written to, its schema, and how many rows it has.

That is little, and so it can be the value of a step. The data is read again only when somebody asks
for it, and Spark is started only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgqrs.codecs import Signature
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling ask for such
            raise AttributeError(name)
        return getattr(self.df(), name)

    def __getitem__(self, item: Any) -> Any:
        return self.df()[item]


class FrameSignature(Signature):
    """A function whose result may be a frame."""

    def encode_result(self, value: Any) -> Any:
        return {MARK: vars(value)} if isinstance(value, Frame) else super().encode_result(value)

    def decode_result(self, found: Any) -> Any:
        if isinstance(found, dict) and set(found) == {MARK}:
            return Frame(**found[MARK])
        return super().decode_result(found)
