"""Every test is run by some session of the noxfile."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOXFILE = (ROOT / "noxfile.py").read_text()


def test_every_directory_of_tests_is_in_a_session() -> None:
    found = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert found
    assert found == {name for name in found if f'"tests/{name}' in NOXFILE}


def test_what_one_session_leaves_out_another_runs() -> None:
    selections = set(re.findall(r'"-m", f?"([^"]+)"', NOXFILE))
    for mark in ("slow", "processes", "smoke"):
        assert {mark, f"not {mark}"} <= selections, mark
    rest = "{database} and not telling and not twin"
    assert {"{database} and telling", rest, "twin"} <= selections


def test_every_session_of_full_exists() -> None:
    (names,) = re.findall(r"^FULL = \((.*?)\)\n", NOXFILE, re.MULTILINE | re.DOTALL)
    for name in re.findall(r'"([^"]+)"', names):
        function = re.sub(r"[-(].*", "", name)
        assert re.search(rf'^def {function}|name="{function}', NOXFILE, re.MULTILINE), name
