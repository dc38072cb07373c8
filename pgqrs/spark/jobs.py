"""The Spark jobs of one attempt at a step, and what may befall them.

They carry a tag, by which they can be cancelled from another thread. Tags belong to a thread: on
classic Spark those of the context work (those of the session do nothing), on Connect those of the
session. Threads that a step starts by itself inherit them if they are `pyspark.InheritableThread`s.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("pgqrs.spark")
LAST_BREATH = 5.0
"""Seconds that a process may take to be gone after its sockets are."""


class Jobs:
    """The jobs that this thread starts while they are `tagged`."""

    def __init__(self, spark: SparkSession, tag: str) -> None:
        self._spark = spark
        self._context: Any = getattr(spark, "sparkContext", None)  # Connect has none
        self.tag = tag

    @contextmanager
    def tagged(self) -> Iterator[None]:
        """What is started in here can be cancelled."""
        add, remove = (
            (self._spark.addTag, self._spark.removeTag)
            if self._context is None
            else (self._context.addJobTag, self._context.removeJobTag)
        )
        add(self.tag)
        try:
            yield
        finally:
            with suppress(Exception):  # Spark may be gone; then so are its tags
                remove(self.tag)

    def cancel(self) -> None:
        """Cancel what runs. A job that starts a moment later is not meant: call this again."""
        try:
            if self._context is None:
                self._spark.interruptTag(self.tag)
            else:
                self._context.cancelJobsWithTag(self.tag)
        except Exception as exc:
            logger.warning("jobs %s could not be cancelled: %s", self.tag, exc)


_TRACEBACK = "Traceback (most recent call last):"
_CONDITION = re.compile(r"^\[[A-Z][A-Z0-9_.]+\] .*", re.MULTILINE)
_CAUSE = re.compile(r"^Caused by: (.*)", re.MULTILINE)


def cause_of(error: BaseException) -> str | None:
    """What went wrong, of what Spark says at length, in one line: the error of a Python function that
    was called on an executor, or else the condition that Spark names, or the innermost error of Java.
    None if this is not an error of Spark.
    """
    if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    said = str(error)
    raised = _raised_in_python(said)
    if raised is not None:
        return raised
    named = _CONDITION.search(said)
    if named is not None:
        return named[0].strip()
    causes = _CAUSE.findall(said)
    return causes[-1].strip() if causes else None


def _raised_in_python(said: str) -> str | None:
    """The line after the frames of the last traceback, which are indented."""
    _, traceback, rest = said.rpartition(_TRACEBACK)
    if not traceback:
        return None
    lines = (line for line in rest.splitlines()[1:] if line.strip())
    return next((line.strip() for line in lines if not line.startswith((" ", "\t"))), None)


def death_of_java(error: BaseException) -> str | None:
    """How the Java process of classic Spark ended, if it did."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    if gateway is None:
        return None
    process = getattr(gateway, "proc", None)
    if process is None:  # somebody else started it: spark-submit
        return "does not answer" if _is_broken(error) and not _answers(gateway) else None
    if _is_broken(error):
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_BREATH)
    code = process.poll()
    if code is None:
        return None
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _is_broken(error: BaseException | None) -> bool:
    """Whether a connection to Java is at the bottom of this."""
    from py4j.protocol import Py4JNetworkError

    while error is not None:
        if isinstance(error, Py4JNetworkError | ConnectionError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _answers(gateway: Any) -> bool:
    try:
        gateway.jvm.System.currentTimeMillis()
    except Exception:
        return False
    return True
