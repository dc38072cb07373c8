"""Where Spark finds the format `pgqrs`. It looks into every module called like this whenever a session
uses its first data source in Python, so nothing is imported here before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Queues, their archive and workflows as tables."""

    cores: int | None = None
    """How many tasks the cluster runs at a time. `pgqrs.spark.register` knows; planning does not."""

    @classmethod
    def name(cls) -> str:
        return "pgqrs"

    def schema(self) -> StructType:
        from pgqrs.spark import source

        return source.schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from pgqrs.spark import source

        return source.reader(self.options, schema, self.cores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        from pgqrs.spark import source

        return source.stream_reader(self.options, schema, self.cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from pgqrs.spark import source

        return source.writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802 (Spark's name)
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        from pgqrs.spark import source

        return source.stream_writer(self.options, schema, overwrite)
