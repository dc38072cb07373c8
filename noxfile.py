"""All checks: `nox`. One of them: `nox -s tests`. What there is: `nox -l`."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False
nox.options.stop_on_first_error = False
nox.options.sessions = [
    "lint",
    "tests",
    "lowest",
    "pythons",
    "old-postgres",
    "pgbouncer",
    "s3",
    "spark",
    "build",
]

# Pythons that pyenv has but does not put on the path.
PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
for found in sorted(PYENV.glob("3.1[23].*/bin")):
    os.environ["PATH"] += f"{os.pathsep}{found}"

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
SYSTEM_POSTGRES = Path("/usr/lib/postgresql")
BACKENDS = ("tests/conformance", "tests/migrations", "tests/faults")
"""The tests that depend on versions of databases and libraries."""
TWO = ("-k", "not conformance or sqlite-sync or postgres-async")
"""Of the conformance suite two backends, which use all that depends on versions."""


def install(session: nox.Session, *groups: str, extras: str = "s3") -> None:
    """The project as it is in the checkout, and the tools of these groups."""
    session.install("-e", f".[{extras}]", *nox.project.dependency_groups(PROJECT, *groups))


def pytest(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run tests, with their databases in memory where that can be: what they wait for is the disk,
    and some disks are slow. Processes that they start find bytecode: many are Spark's, and each would
    else compile all it imports.
    """
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pgqrs-", dir=place) as temporary:
        Path(temporary).chmod(0o755)  # PostgreSQL runs as another user
        always = {"TMPDIR": temporary, "PYTHONDONTWRITEBYTECODE": None}
        session.run("pytest", *arguments, *session.posargs, env=always | (env or {}))


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint, types, and the direction of imports."""
    install(session, "lint", "test")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def tests(session: nox.Session) -> None:
    """Every test, on this Python and the newest libraries. Arguments go to pytest."""
    install(session, "test")
    pytest(session, "-n", "2")


@nox.session
def lowest(session: nox.Session) -> None:
    """The oldest libraries that pyproject.toml allows, SQLAlchemy 2.0 among them."""
    install(session, "test")
    oldest = [
        dependency.partition(",")[0].replace(">=", "==")
        for dependency in PROJECT["project"]["dependencies"]
    ]
    session.install(*oldest)
    pytest(session, "-n", "2", "tests/unit", "tests/api", *BACKENDS, *TWO)


@nox.session(python=["3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """The other Pythons, where they are installed."""
    install(session, "test")
    pytest(session, "-n", "2", "tests/unit", "tests/api", *BACKENDS, *TWO)


@nox.session(name="old-postgres")
def old_postgres(session: nox.Session) -> None:
    """The oldest PostgreSQL server that the system has, beside the newest from the wheel."""
    found = sorted(SYSTEM_POSTGRES.glob("*/bin/initdb"))
    if not found:
        session.skip(f"no server below {SYSTEM_POSTGRES}; install your system's postgresql package")
    install(session, "test")
    env = {"PGQRS_TEST_POSTGRES": str(found[0].parent)}
    pytest(session, "-n", "2", "-k", "postgres and not engine", *BACKENDS, env=env)


@nox.session
def pgbouncer(session: nox.Session) -> None:
    """Behind PgBouncer in transaction mode; installs Debian's package where that is possible."""
    places = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    if shutil.which("pgbouncer", path=places) is None:
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            session.skip("there is no pgbouncer: `apt-get install pgbouncer`, or your system's way")
        session.run("apt-get", "update", "-qq", external=True)
        session.run("apt-get", "install", "-y", "-qq", "pgbouncer", external=True)
    install(session, "test")
    pytest(session, "tests/acceptance/test_pgbouncer.py")


@nox.session
def s3(session: nox.Session) -> None:
    """Stores in S3 on a second server, and the processes that fight over an object for a minute."""
    install(session, "test")
    env = {"PGQRS_TEST_S3": "seaweedfs", "PGQRS_TEST_S3_SECONDS": "60"}
    pytest(session, "-n", "2", "tests/s3", env=env)
    pytest(session, "-n", "2", "tests/conformance", "-k", "s3-durable or s3-local", env=env)


@nox.session
def spark(session: nox.Session) -> None:
    """The data pipeline on a real Spark, in this process. Brings Java along where there is none."""
    install(session, "test", "spark", extras="s3,spark,delta")
    by_file = ("--dist", "loadfile", "--no-loadscope-reorder")
    pytest(session, "-n", "2", *by_file, "tests/spark")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel, install it where nothing else is, and use it."""
    session.install("build")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    (wheel,) = Path("dist").glob("*.whl")
    session.install("--force-reinstall", str(wheel.resolve()))
    home = Path(session.create_tmp()).resolve()
    database = home / "wheel.db"
    for leftover in home.glob("wheel.db*"):
        leftover.unlink()
    env = {"PGQRS_DSN": f"sqlite:///{database}"}
    with session.chdir(home):
        for command in (
            ["install"],
            ["verify"],
            ["queue", "create", "tasks"],
            ["enqueue", "tasks", '{"from": "the wheel"}'],
            ["stats"],
        ):
            session.run("pgqrs", *command, env=env)
        output = session.run("pgqrs", "dequeue", "tasks", "--json", env=env, silent=True)
    if "the wheel" not in str(output):
        session.error(f"the message did not come out again: {output}")


@nox.session
def acceptance(session: nox.Session) -> None:
    """Workers that are killed, at full size: 20,000 tasks and 500 runs on each database, and ten
    thousand runs that sleep. Takes minutes.
    """
    install(session, "test")
    tests = [
        f"tests/acceptance/test_{name}.py"
        for name in ("dying_workers", "workflow_crashes", "sleeping")
    ]
    pytest(session, *tests, "-o", "timeout=0", env={"PGQRS_ACCEPTANCE": "full"})


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks against a raw driver in the same run; see benchmarks/README.md."""
    install(session, "test")
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session(name="bench-peers")
def bench_peers(session: nox.Session) -> None:
    """Workflows beside DBOS and absurd, on the same server, and beside DBOS on SQLite."""
    install(session, "test")
    session.install("dbos", "absurd-sdk", "absurdctl")
    session.run("python", "-m", "benchmarks.workflows", *session.posargs)
