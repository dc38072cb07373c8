"""Time is read inside of works, when whatever they had to wait for is theirs.

A lease or a rate that counts from before the wait is over too early. So nobody asks a database for the
time and then writes: the only callers of `now()` are functions over a connection, which run after BEGIN,
and anew at every attempt.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pgqrs

PACKAGE = Path(pgqrs.__file__).parent
CONNECTIONS = ("c", "connection")
NO_WORKS = {
    "handles.py": "what is shown, nothing is stored",
    "tasks.py:_deadline": "what a task is told, nothing is stored",
    "buffer.py:_has_expired": "what is handed out, nothing is stored",
    "consumer.py:_without_lapsed": "what is handed out, once the claim is stored",
    "workflows/calls.py": "the time that a workflow asks for",
    "workflows/holding.py:__init__": "by which the age of a claim is judged, nothing is stored",
    "workflows/async_context.py:time": "by which waits are judged, nothing is stored",
    "stores/postgres.py:now": "the clock itself",
    "stores/sqlite.py:now": "the clock itself",
    "stores/s3.py:now": "the clock itself",
    "stores/base.py:now": "the clock of the database beneath",
    "aio/thread_access.py:now": "the clock of the database beneath",
    "spark/bulk.py:now": "called inside of works",
}


class Finder(ast.NodeVisitor):
    """Collects the calls of `…database.now()` and `self.now()` that no work surrounds."""

    def __init__(self) -> None:
        self.functions: list[tuple[str, bool]] = []
        self.outside: list[tuple[str, int]] = []

    def _visit_function(self, node: ast.FunctionDef | ast.Lambda) -> None:
        names = [argument.arg for argument in node.args.args]
        is_work = any(name in CONNECTIONS for name in names)
        self.functions.append((getattr(node, "name", "lambda"), is_work))
        self.generic_visit(node)
        self.functions.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "now" and not node.args:
            owner = ast.unparse(called.value)
            of_database = owner.endswith("database") or owner in ("self", "self.clock")
            if of_database and not any(is_work for _, is_work in self.functions):
                self.outside.append((self.functions[-1][0] if self.functions else "", node.lineno))
        self.generic_visit(node)


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if "testing" not in path.parts]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_time_is_read_inside_of_works(path: Path) -> None:
    finder = Finder()
    finder.visit(ast.parse(path.read_text(encoding="utf-8")))
    name = path.relative_to(PACKAGE).as_posix()
    outside = [
        f"{name}:{line}"
        for function, line in finder.outside
        if name not in NO_WORKS and f"{name}:{function}" not in NO_WORKS
    ]
    assert outside == []


def test_a_reading_before_the_wait_is_found() -> None:
    finder = Finder()
    finder.visit(
        ast.parse(
            "def extend(self):\n"
            "    now = self._database.now()\n"
            "    self._database.write(lambda c: rows.extend(c, now=now))\n"
            "    self._database.write(lambda c: rows.extend(c, now=self._database.now()))\n"
        )
    )
    assert finder.outside == [("extend", 2)]
