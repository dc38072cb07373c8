"""The documentation is true: its code runs, its links lead somewhere, its tables match the code.

Each page is run from top to bottom in a directory of its own. Its blocks share a namespace, an event
loop, an environment and, where a page says `postgresql://localhost/app`, an empty PostgreSQL database.
What becomes of a block is decided by its language:

- `python` is run; it may `await` at the top level.
- `console`: each line that starts with `$ ` is run and must succeed; the lines below it, if there are
  any, are what it prints.
- other languages are only shown.

A comment before a block changes that: `<!-- not run: reason -->`; `<!-- file: name -->`, and the block
is written to that file, for later blocks to use; `<!-- output -->`, and the block is what the Python of
the page has printed since the last such block.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from sqlalchemy import make_url
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

import pgqrs
from pgqrs import schema
from pgqrs.cli.app import app
from tests.conftest import create_database, prepare_bucket

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if page.exists()
]  # a README that is not there yet has no blocks either
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
SPARK = DOCS / "spark.md"
"""Is run where Spark is installed: by the session `spark` of nox."""
RUN = [page for page in PAGES if page != SPARK or find_spec("pyspark")]

SHOWN = {"text", "sh", "bash", "ini", "sql", "json", "toml", "yaml"}
PROGRAMS = {"pgqrs", "alembic", "python", "printf"}
POSTGRES = re.compile(r"postgresql(\+psycopg)?://localhost/app\b")
VERSIONS = "/path/to/pgqrs/versions"
"""Stands in a page for what `pgqrs.schema.versions_path()` returns."""


# Parsing


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment before it that says what to do with it."""

    language: str
    source: str
    line: int
    mark: str
    argument: str


_MARK = re.compile(r"<!--\s*(not run|file|output)(?::\s*([^\n]*?))?\s*-->\s*\Z")
_lexer = FencedCodeBlockLexer(r"[^\n]*?[ \t]*")


def parse(document: Document) -> Iterable[Region]:
    """Every fenced block of a page, whatever its language."""
    for region in _lexer(document):
        found = _MARK.search(document.text[: region.start])
        region.parsed = Block(
            language=region.lexemes["language"].strip(),
            source=region.lexemes["source"],
            line=document.text.count("\n", 0, region.start) + 1,
            mark=found[1] if found else "",
            argument=(found[2] or "") if found else "",
        )
        region.evaluator = evaluate
        yield region


SYBIL = Sybil(parsers=[parse])


def blocks_of(page: Path) -> list[Block]:
    return [example.parsed for example in SYBIL.parse(page)]


def evaluate(example: Example) -> None:
    runner: Runner = example.document.runner  # type: ignore[attr-defined]
    runner.run(example.parsed)


# Running


class Runner:
    """Runs the blocks of one page."""

    def __init__(
        self,
        page: Path,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        new_database: Callable[[], str],
    ) -> None:
        self.page = page
        self.directory = directory
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.loop = asyncio.Runner()
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self._database = cache(new_database)

    def run(self, block: Block) -> None:
        if block.mark == "not run":
            return
        if block.mark == "file":
            path = self.directory / block.argument
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._localised(block.source))
        elif block.mark == "output":
            compare(block.source, self._capsys.readouterr().out)
        elif block.language == "python":
            self._run_python(block)
        elif block.language == "console":
            for command, expected in commands(block.source):
                self._run_command(command, expected)

    def _localised(self, source: str) -> str:
        def actual(match: re.Match[str]) -> str:
            url = make_url(self._database()).set(drivername=f"postgresql{match[1] or ''}")
            return url.render_as_string(hide_password=False)

        return POSTGRES.sub(actual, source).replace(VERSIONS, str(schema.versions_path()))

    def _run_python(self, block: Block) -> None:
        padding = "\n" * block.line  # so that a traceback shows the line of the page
        code = compile(
            padding + self._localised(block.source),
            str(self.page),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        result = eval(code, self.namespace)
        if inspect.iscoroutine(result):
            self.loop.run(result)

    def _run_command(self, command: str, expected: str) -> None:
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self._monkeypatch.setenv(name, self._localised(value))
            return
        program = next(word for word in command.split() if "=" not in word)
        assert program in PROGRAMS, (
            f"mark the block as not run, or teach the test to run: {command}"
        )
        done = subprocess.run(
            ["sh", "-c", self._localised(command)],
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        said = f"$ {command}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        if expected.strip():
            compare(expected, done.stdout, said)

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        programs = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join((programs, environment.get("PATH", "")))
        if not (self.directory / "alembic.ini").exists():  # then as in a checkout
            environment["ALEMBIC_CONFIG"] = str(ROOT / "alembic.ini")
        return environment


def commands(source: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown for it."""
    source = re.sub(r"\\\n\s*", "", source)
    assert source.startswith("$ "), f"a console block starts with a command: {source}"
    for part in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command.strip(), expected


_VARIES = {
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)": "TIME",
    r"\b\d+:\d\d:\d\d\b": "DURATION",
    r"─+": "─",
}


def normalised(text: str) -> str:
    """Text without what differs from run to run, or with the width of a column."""
    for pattern, word in _VARIES.items():
        text = re.sub(pattern, word, text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def compare(expected: str, found: str, context: str = "") -> None:
    """`...` in what is expected stands for anything."""
    pattern = re.escape(normalised(expected)).replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, normalised(found), re.DOTALL), (
        f"the page shows\n{expected}\nbut this was printed\n{context or found}"
    )


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if page == SPARK:
        request.node.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        # Programs that end after seconds do not need what takes minutes to pay off.
        quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        monkeypatch.setenv("JDK_JAVA_OPTIONS", quick)
    for name in [name for name in os.environ if name.startswith("PGQRS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    document = SYBIL.parse(page)
    if "s3://" in document.text:
        prepare_bucket(request.getfixturevalue("moto"), tmp_path, monkeypatch)
    document.runner = runner = Runner(  # type: ignore[attr-defined]
        page,
        tmp_path,
        monkeypatch,
        capsys,
        lambda: create_database(request.getfixturevalue("postgres")),
    )
    with runner.loop:
        for example in document:
            example.evaluate()
        runner.namespace.clear()
        gc.collect()  # what a page forgot to close warns here, not in a later test


# What no block may do


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    blocks = blocks_of(page)
    fences = re.findall(r"^[ \t>]*(?:```|~~~)", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks), "a fence is not closed, or was not recognised"
    for block in blocks:
        where = f"{page.name}, line {block.line}"
        assert block.language in SHOWN | {"python", "console"}, f"{where}: {block.language!r}"
        if block.mark == "not run" and block.language == "python":
            assert block.argument, f"{where}: say why it is not run"


def test_the_blocks_are_really_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport asyncio\nasync def two(): return 2\n```\n"
        "- in a list\n\n  ```python\n  assert await two() == 1\n  ```\n"
    )
    document = SYBIL.parse(page)
    document.runner = Runner(page, tmp_path, None, None, str)  # type: ignore[arg-type, attr-defined]
    first, second = document
    first.evaluate()
    with pytest.raises(AssertionError), document.runner.loop:  # type: ignore[attr-defined]
        second.evaluate()


def test_a_wrong_output_is_noticed() -> None:
    compare(" queue   ready\n──────\n tasks  ...\n", "queue ready\n────────\n\ntasks      17   \n")
    with pytest.raises(AssertionError):
        compare("two", "three")


# Links

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def links_of(page: Path) -> list[tuple[str, str]]:
    """Text and target of every link outside of code blocks."""
    prose = re.sub(r"^([ \t]*)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return _LINK.findall(prose)


def anchors_of(page: Path) -> set[str]:
    """As forges make them from headings."""
    headings = re.findall(r"^#+ +(.+?)\s*$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for text, link in links_of(page):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{text}: {link}"
        assert target.is_relative_to(ROOT), f"{text}: {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{text}: {link}"
        if re.fullmatch(r"`test_\w+`", text):
            assert text.strip("`") in functions_of(target), f"{text} is not in {path}"
            if target.parent.name == "conformance":
                assert (ROOT / "tests/conformance" / f"test_{target.name}").exists()


def test_every_page_is_on_the_map() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for _, link in links_of(DOCS / "index.md")}
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} <= linked


def test_every_guarantee_names_a_test() -> None:
    promised = (DOCS / "guarantees.md").read_text().partition("## What is promised")[2]
    promised = promised.partition("\n## ")[0]
    rows = [line for line in promised.splitlines() if re.match(r"\| *\d", line)]
    assert len(rows) >= 8
    for row in rows:
        assert re.search(r"\[`test_\w+`\]\([^)]+\.py\)", row), row


# Tables that repeat what the code says


def section(page: str, heading: str) -> str:
    """The part of a page below a heading, up to the next one of the same rank."""
    text = (DOCS / page).read_text()
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", text, re.M | re.S)
    assert found, f"{page} has no section {heading!r}"
    return found[2]


@pytest.mark.parametrize("name", pgqrs.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"`(pgqrs\.)?{name}\b", (DOCS / "reference.md").read_text())


def shown_signature(name: str, function: Any) -> str:
    """As the reference writes it: names and defaults, without self and without types."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return name + str(inspect.Signature(parameters))


@pytest.mark.parametrize(
    "owner",
    [
        pgqrs.Store,
        pgqrs.Admin,
        pgqrs.Producer,
        pgqrs.Consumer,
        pgqrs.Buffer,
        pgqrs.Transaction,
        pgqrs.Workflows,
        pgqrs.Run,
        pgqrs.Worker,
        pgqrs.Handle,
        pgqrs.Schedules,
    ],
    ids=lambda owner: owner.__name__,
)
def test_the_reference_has_every_method_as_it_is(owner: Any) -> None:
    text = section("reference.md", owner.__name__)
    if owner is pgqrs.Store:
        assert f"`{shown_signature('Store', owner)}`" in text
    if owner in (pgqrs.Consumer, pgqrs.Buffer, pgqrs.Transaction):
        text += section("reference.md", "Held messages")
    for name, member in inspect.getmembers(owner):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            assert f"`{name}`" in text, name
        else:
            assert f"`{shown_signature(name, member)}`" in text, shown_signature(name, member)


@pytest.mark.parametrize(
    "owner",
    [
        pgqrs.Message,
        pgqrs.ArchivedMessage,
        pgqrs.Queue,
        pgqrs.QueueStats,
        pgqrs.S3Stats,
        pgqrs.WorkerInfo,
    ],
    ids=lambda owner: owner.__name__,
)
def test_the_reference_has_every_field(owner: Any) -> None:
    text = section("reference.md", owner.__name__)
    for field in fields(owner):
        assert f"`{field.name}`" in text, field.name


def test_the_table_of_settings_is_the_config() -> None:
    text = section("howto/operations.md", "Settings")
    rows = [
        [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    assert [row[:3] for row in rows] == [
        [field.name, f"PGQRS_{field.name.upper()}", repr(field.default)]
        for field in fields(pgqrs.Config)
    ]
    assert all(len(row) == 4 and row[3] for row in rows)


def test_the_layers_on_the_page_are_those_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = project["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"pgqrs\.(\w+)", layer) for layer in contract["layers"]]
    diagram = next(
        block.source
        for block in blocks_of(DOCS / "concepts.md")
        if block.source.startswith("cli, testing,")
    )
    shown = [re.split(r"\s{2,}", line)[0].split(", ") for line in diagram.splitlines()]
    assert [sorted(layer) for layer in shown] == [sorted(layer) for layer in layers]


def leaf_commands(command: click.Command, path: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from leaf_commands(inner, f"{path} {name}")
    elif not command.hidden:
        yield path


@pytest.mark.parametrize("command", list(leaf_commands(app, "pgqrs")))
def test_every_command_is_in_the_tour(command: str) -> None:
    assert f"`{command}" in section("howto/operations.md", "All commands")
