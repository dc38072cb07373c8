"""Data pipelines on Spark: `pip install 'pgqrs[spark]'`."""

from pgqrs.spark.java import java_home
from pgqrs.spark.session import session

__all__ = ["java_home", "session"]
