"""The checks of the project. What there is: `nox -l`.

nox              what a change should pass: ten minutes on two cores, with nothing but Python and pip
nox -s quick     the inner loop: a minute and a half
nox -s full      everything else; what this machine lacks for it is named in the summary
nox -s "conformance(postgres)"    one session; arguments behind `--` go to pytest
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False
nox.options.stop_on_first_error = False
nox.options.sessions = ["lint", "unit", "docs", "conformance", "spark-smoke", "build"]

FULL = (
    "conformance-rest(sqlite)",
    "conformance-rest(postgres)",
    "conformance-rest(s3)",
    "faults",
    "acceptance",
    "lowest",
    "pythons-3.12",
    "pythons-3.13",
    "old-postgres",
    "pgbouncer",
    "seaweedfs",
    "spark",
)
"""The sessions of `full`."""

# Pythons that pyenv has but does not put on the path.
PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
for found in sorted(PYENV.glob("3.1[23].*/bin")) if os.access(PYENV, os.R_OK) else ():
    os.environ["PATH"] += f"{os.pathsep}{found}"

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
SYSTEM_POSTGRES = Path("/usr/lib/postgresql")
UNIT = ("tests/unit", "tests/api", "tests/cli", "tests/migrations", "tests/plans")
VERSIONED = ("tests/unit", "tests/api", "tests/conformance", "tests/migrations", "tests/faults")
"""The tests that depend on versions of Python, databases and libraries."""
TWO_BACKENDS = (
    *("-k", "not conformance or sqlite-sync or postgres-async"),
    *("-m", "not (logic and postgres)"),
)
"""Of the conformance suite two backends, which use all that depends on versions."""
DATABASES = nox.parametrize(
    "database", ["sqlite", "postgres", "s3"], ids=["sqlite", "postgres", "s3"]
)

Session = Callable[..., None]


def budget(seconds: float) -> Callable[[Session], Session]:
    """Say how long the session took, and whether that is longer than it should on two quiet cores."""

    def limited(function: Session) -> Session:
        @wraps(function)
        def timed(session: nox.Session, *args: object, **kwargs: object) -> None:
            began = time.monotonic()
            function(session, *args, **kwargs)
            took = time.monotonic() - began
            if took > seconds:
                session.warn(f"OVER BUDGET: {took:.0f} s, should be {seconds:.0f} s at most")
            else:
                session.log(f"took {took:.0f} s of {seconds:.0f} s")

        return timed

    return limited


def install(session: nox.Session, *groups: str, extras: str = "s3") -> None:
    """Install the project as it is in the checkout, and the tools of these groups."""
    session.install("-e", f".[{extras}]", *nox.project.dependency_groups(PROJECT, *groups))


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A temporary directory, in memory where that can be: what tests wait for is the disk."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pgqrs-", dir=place) as temporary:
        Path(temporary).chmod(0o755)  # PostgreSQL runs as another user
        yield Path(temporary)


def pytest(session: nox.Session, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run tests in two processes, and print the slowest.

    Processes that they start find bytecode: many are Spark's, and each would else compile all it
    imports.
    """
    with memory_directory() as temporary:
        always = {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": None}
        slowest = ("--durations=8", "--durations-min=2")
        session.run(
            *("pytest", "-q", "-n", "2", *slowest, *arguments, *session.posargs),
            env=always | (env or {}),
        )


def lack(session: nox.Session, what: str, remedy: str) -> None:
    """End the session: the summary shows it as skipped, and this line says why."""
    session.skip(f"this machine has no {what}: {remedy}")


# What `nox` runs


@nox.session
@budget(60)
def lint(session: nox.Session) -> None:
    """Formatting, lint, types, and the direction of imports."""
    install(session, "lint", "test")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
    session.run("pyright")
    session.run("lint-imports")


@nox.session
@budget(90)
def unit(session: nox.Session) -> None:
    """Units, the public face, the command line, migrations and query plans."""
    install(session, "test")
    pytest(session, *UNIT, "-m", "not slow")


@nox.session
@budget(60)
def docs(session: nox.Session) -> None:
    """Every block of the documentation and of the seeds, run."""
    install(session, "test")
    pytest(session, "tests/docs")


@nox.session
@DATABASES
@budget(150)
def conformance(session: nox.Session, database: str) -> None:
    """The conformance suite on the telling variants of a database, sync and async."""
    install(session, "test")
    pytest(session, "tests/conformance", "-m", f"{database} and telling")


@nox.session(name="spark-smoke")
@budget(120)
def spark_smoke(session: nox.Session) -> None:
    """The main pipelines on a real Spark, in one process. Brings Java along where there is none."""
    install_spark(session)
    pytest(session, "-n", "0", "tests/spark", "-m", "smoke")


@nox.session
@budget(30)
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


# The inner loop


@nox.session
@budget(90)
def quick(session: nox.Session) -> None:
    """What changed is linted; units, the public face, and the conformance suite on two backends."""
    install(session, "lint", "test")
    if changed := changed_files():
        session.run("ruff", "format", "--check", *changed)
        session.run("ruff", "check", *changed)
    session.run("mypy")
    two = "not conformance or sqlite-memory-sync or postgres-async"
    selected = ("tests/unit", "tests/api", "tests/conformance", "-k", two, "-m", "not slow")
    pytest(session, *selected)


def changed_files() -> list[str]:
    """Returns the Python files that differ from the last commit, new ones too."""
    questions = (
        ("diff", "--name-only", "--diff-filter=d", "HEAD"),
        ("ls-files", "--others", "--exclude-standard"),
    )
    answers = [subprocess.check_output(("git", *words), text=True) for words in questions]
    return [name for name in "".join(answers).split() if name.endswith(".py")]


# What `nox -s full` runs


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Everything that `nox` leaves out; the summary names what this machine lacks."""
    for name in FULL:
        session.notify(name)


@nox.session(name="conformance-rest")
@DATABASES
@budget(240)
def conformance_rest(session: nox.Session, database: str) -> None:
    """The conformance suite on all other variants of a database."""
    install(session, "test")
    pytest(session, "tests/conformance", "-m", f"{database} and not telling and not twin")


@nox.session
@budget(180)
def faults(session: nox.Session) -> None:
    """Faults of databases and networks, random programs, and stores in S3 step by step."""
    install(session, "test")
    pytest(session, "tests/faults", "tests/property", "tests/s3", "-m", "not processes")
    pytest(session, *UNIT, "-m", "slow")


@nox.session
@budget(300)
def acceptance(session: nox.Session) -> None:
    """Processes that are killed, at the size for CI. `PGQRS_ACCEPTANCE=full` is the large one:
    20,000 tasks and 500 runs on each database, and ten thousand runs that sleep.
    """
    install(session, "test")
    full_size = os.environ.get("PGQRS_ACCEPTANCE") == "full"
    unlimited = ("-o", "timeout=0") if full_size else ()
    without = "--ignore=tests/acceptance/test_pgbouncer.py"
    pytest(session, "tests/acceptance", without, *unlimited)
    pytest(session, "tests/faults", "tests/s3", "-m", "processes")


@nox.session
@budget(240)
def lowest(session: nox.Session) -> None:
    """The oldest libraries that pyproject.toml allows, SQLAlchemy 2.0 among them."""
    install(session, "test")
    oldest = [
        dependency.partition(",")[0].replace(">=", "==")
        for dependency in PROJECT["project"]["dependencies"]
    ]
    session.install(*oldest)
    pytest(session, *VERSIONED, *TWO_BACKENDS)


@nox.session(python=["3.12", "3.13"])
@budget(240)
def pythons(session: nox.Session) -> None:
    """The other Pythons, where they are installed."""
    install(session, "test")
    pytest(session, *VERSIONED, *TWO_BACKENDS)


@nox.session(name="old-postgres")
@budget(180)
def old_postgres(session: nox.Session) -> None:
    """The oldest PostgreSQL server that the system has, beside the newest from the wheel."""
    found = sorted(SYSTEM_POSTGRES.glob("*/bin/initdb"))
    if not found:
        lack(session, f"server below {SYSTEM_POSTGRES}", "install your system's postgresql package")
    install(session, "test")
    env = {"PGQRS_TEST_POSTGRES": str(found[0].parent)}
    tests = ("tests/conformance", "tests/migrations", "tests/faults")
    pytest(session, "-k", "postgres and not engine", "-m", "not logic", *tests, env=env)


@nox.session
@budget(60)
def pgbouncer(session: nox.Session) -> None:
    """Behind PgBouncer in transaction mode. Debian's package is unpacked, not installed."""
    install(session, "test")
    with memory_directory() as directory:
        env = find_pgbouncer(session, directory)
        pytest(session, "-n", "0", "tests/acceptance/test_pgbouncer.py", env=env)


def find_pgbouncer(session: nox.Session, directory: Path) -> dict[str, str]:
    """Returns the environment in which tests find the program."""
    places = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    if found := shutil.which("pgbouncer", path=places):
        return {"PGQRS_TEST_PGBOUNCER": found}
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        lack(session, "pgbouncer", "install it your system's way")
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (directory / name).mkdir(parents=True)
    own = (f"Dir::State::Lists={directory / 'lists'}", f"Dir::Cache={directory / 'cache'}")
    apt = ("apt-get", "-qq", "-o", own[0], "-o", own[1])
    with session.chdir(directory / "packages"):
        session.run(*apt, "update", external=True)
        wanted = ("pgbouncer", "libevent-2.1-7", "libc-ares2")
        session.run(*apt, "download", *wanted, external=True)
    for package in (directory / "packages").glob("*.deb"):
        session.run("dpkg-deb", "-x", str(package), str(directory / "root"), external=True)
    (libraries,) = {str(path.parent) for path in directory.glob("root/usr/lib/*/libevent-2*.so*")}
    program = directory / "root/usr/sbin/pgbouncer"
    return {"PGQRS_TEST_PGBOUNCER": str(program), "LD_LIBRARY_PATH": libraries}


@nox.session
@budget(300)
def seaweedfs(session: nox.Session) -> None:
    """Stores in S3 on a second server."""
    install(session, "test")
    env = {"PGQRS_TEST_S3": "seaweedfs", "PGQRS_TEST_S3_KILLS": "20"}
    pytest(session, "tests/s3", env=env)
    two = ("-k", "s3-durable-sync or s3-local-async", "-m", "not logic")
    pytest(session, "tests/conformance", *two, env=env)


@nox.session
@budget(480)
def spark(session: nox.Session) -> None:
    """The data pipeline on a real Spark, but for what `spark-smoke` runs."""
    install_spark(session)
    by_file = ("--dist", "loadfile", "--no-loadscope-reorder")
    pytest(session, *by_file, "tests/spark", "-m", "not smoke")


def install_spark(session: nox.Session) -> None:
    install(session, "test", "spark", extras="s3,spark,delta")


# By hand


@nox.session
def twins(session: nox.Session) -> None:
    """What is built on queues, on those variants of a backend whose twin, sync or async, `full` runs."""
    install(session, "test")
    pytest(session, "tests/conformance", "-m", "twin")


@nox.session
def chaos(session: nox.Session) -> None:
    """The chaos test of queues for about an hour. `PGQRS_CHAOS_SEED` begins it with another seed."""
    install(session, "test")
    rounds = {"PGQRS_CHAOS_ROUNDS": os.environ.get("PGQRS_CHAOS_ROUNDS", "80")}
    pytest(session, "-rP", "tests/acceptance/test_chaos.py", env=rounds)


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
