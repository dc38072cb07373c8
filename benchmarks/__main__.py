"""`python -m benchmarks`: run, print tables, and say which targets were met."""

from __future__ import annotations

import argparse
import json
import os
import platform
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from benchmarks import flatness, latency, throughput, workers
from benchmarks.driver import Backend
from benchmarks.report import Result, markdown, table
from benchmarks.sites import sites, version

SUITES: dict[str, Any] = {
    "Throughput, per second (median of rounds, taken in turns)": throughput,
    "Latency: enqueue to handler, in µs, with an idle consumer": latency,
    "Workers: trivial messages per second, and from enqueue to result in µs": workers,
    "Flatness: a claim of 10, in µs, as the tables grow": flatness,
}
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def main() -> None:
    options = _parser().parse_args()
    backends = BACKENDS if options.backend == "all" else (options.backend,)
    console = Console()
    facts = [f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    results: dict[str, list[Result]] = {title: [] for title in SUITES}
    for backend in backends:
        with sites(backend) as make_site:
            facts.append(version(backend, make_site))
            for title, suite in SUITES.items():
                wanted = [name for name in suite.names(backend) if _is_wanted(name, options.only)]
                for result in suite.measure(backend, wanted, make_site, quick=options.quick):
                    console.print(
                        f"{backend} {result.name}: {result.measured:,.2f} ({result.ratio:.2f})",
                        style="dim",
                    )
                    results[title].append(result)
    _report(console, ", ".join(facts), results, markdown_too=options.markdown)
    if options.json is not None:
        _save(options.json, facts, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--backend", choices=("all", *BACKENDS), default="all")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: a minute or two")
    parser.add_argument(
        "--only",
        metavar="NAME",
        help="drain, enqueue, flat, wakeup, idle, worker, result, drain-100x4, 'drain-*x4' …",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also save every round")
    parser.add_argument("--markdown", action="store_true", help="tables for a README")
    return parser


def _is_wanted(name: str, only: str | None) -> bool:
    return only is None or only == name.partition("-")[0] or fnmatch(name, only)


def _report(
    console: Console, facts: str, results: dict[str, list[Result]], *, markdown_too: bool
) -> None:
    console.print(facts)
    for title, found in results.items():
        if found:
            columns = SUITES[title].COLUMNS
            console.print(table(title, columns, found))
            if markdown_too:
                print(markdown(title, columns, found))
    missed = [
        f"{result.backend} {result.name}"
        for group in results.values()
        for result in group
        if result.met is False
    ]
    console.print(f"Targets missed: {', '.join(missed) or 'none'}")


def _save(path: Path, facts: list[str], results: dict[str, list[Result]]) -> None:
    rows = [result.as_json() for found in results.values() for result in found]
    path.write_text(json.dumps({"facts": facts, "results": rows}, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
