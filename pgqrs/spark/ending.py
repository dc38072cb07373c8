"""The last batch of a query that has ended.

What a query has claimed is acknowledged when Spark asks what comes next. After the last batch it may
not ask any more: the query was stopped, or failed later. The batch is done all the same, and is
acknowledged when the query is started again; or here, when that is not to be waited for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pgqrs.store import Store
from pgqrs.streams import acknowledge

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery


def finish(query: StreamingQuery, store: Store) -> int:
    """Acknowledge what a query has claimed and completed. Returns how many messages that were.

    Spark reports progress once it has written down that a batch is complete, so this is never too
    early, even if the query still runs.
    """
    progress = query.lastProgress
    if progress is None:
        return 0
    ends = [json.loads(source["endOffset"] or "{}") for source in progress["sources"]]
    return sum(
        acknowledge(store._database, end["stream"], through=end["batch"])
        for end in ends
        if isinstance(end, dict) and "stream" in end
    )
