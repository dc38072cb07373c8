"""The processes in which Spark runs our code: one plans, others are its tasks, and all are used again.

After every use Spark collects garbage in them, and looks at all that was ever imported: tens of
milliseconds, when the use itself took a few. What is there after the first use stays for good, so it is
put aside.
"""

from __future__ import annotations

import gc
import sys
from functools import cache

DAEMON = "pyspark.daemon"
"""What Spark starts its processes by."""


def is_worker() -> bool:
    """Whether this is one of these processes, and not somebody's own."""
    started_by = getattr(sys.modules["__main__"], "__spec__", None)
    return started_by is not None and started_by.name == DAEMON


@cache
def settle() -> None:
    """Everything needed has been imported. Only the first call counts."""
    if is_worker():
        gc.collect()
        gc.freeze()
