"""Processes that produce and consume, and can be killed: see `children`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.s3.conftest import until

ROOT = Path(__file__).parents[2]


class Nursery:
    """Where processes come from."""

    def __init__(self, url: str, endpoint: str, directory: Path, **environment: str) -> None:
        self._directory = directory
        self._born = 0
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.s3.children"),
                *(url, endpoint, str(directory / "cache")),
            ],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def bear(self) -> Child:
        assert self._process.stdin
        assert self._process.stdout
        path = self._directory / f"{self._directory.name}-{self._born}.jsonl"
        self._born += 1
        print(path, file=self._process.stdin, flush=True)
        return Child(path, int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Child:
    """A process that produces and consumes, and writes down what it was told."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        self._pid = pid

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        until(self._is_gone)

    def _is_gone(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        return False

    def said(self) -> list[list[Any]]:
        """All but a last line that was cut off."""
        lines = self._path.read_text().split("\n")[:-1] if self._path.exists() else []
        return [json.loads(line) for line in lines]
