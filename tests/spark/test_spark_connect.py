"""Spark Connect, where there is no Java process to reach for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_of_it_on_spark_connect(sqlite_database: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.connecting", sqlite_database, str(tmp_path / "data")],
        # Elsewhere, or Python would prefer the checkout to what is sent. With SPARK_TESTING the server
        # takes a port that is free.
        cwd=tmp_path,
        env={**os.environ, "SPARK_TESTING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr
