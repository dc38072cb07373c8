"""`pgqrs spark …`: the ready pipelines. Each runs here, as a run of a workflow.

Should this process die, the same command with the same `--key` goes on, and so does any worker that
knows the pipeline: `pgqrs worker run pgqrs.spark.report`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pgqrs.cli import parameters
from pgqrs.cli.errors import Commands
from pgqrs.cli.output import make_console, print_json, print_table
from pgqrs.cli.target import Target

LOOK_EVERY = 0.5
MASTER = click.option(
    "--master", help="Where Spark runs: local[4], spark://…  [default: all cores]"
)
REMOTE = click.option("--remote", metavar="URL", help="A Spark Connect server: sc://host:15002.")
CONF = click.option(
    "--conf", "conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark; repeatable."
)
KEY = click.option("--key", help="Names the run: the same key again goes on with it, or shows it.")


@click.group(cls=Commands)
def spark() -> None:
    """Work on much data with Spark.

    Needs `pip install 'pgqrs[spark]'`.
    """


def require_spark() -> None:
    """Say how to install it, if it is not there."""
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise click.ClickException("Spark is not installed: `pip install 'pgqrs[spark]'`")


def on_spark(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say where Spark is, and which run this is."""
    for option in (KEY, CONF, REMOTE, MASTER):
        command = option(command)
    return command


def start_spark(name: str, *, master: str | None, remote: str | None, conf: tuple[str, ...]) -> Any:
    """The session that the options ask for."""
    require_spark()
    from pgqrs.spark import session

    settings = dict(_setting(pair) for pair in conf)
    if remote is not None:
        settings["remote"] = remote
    elif master is not None:
        settings["master"] = master
    settings.setdefault("ui.showConsoleProgress", "false")
    return session(f"pgqrs {name}", **settings)


def _setting(pair: str) -> tuple[str, str]:
    name, separator, value = pair.partition("=")
    if not separator:
        raise click.BadParameter(f"{pair!r} is not of the form NAME=VALUE")
    return name, value


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A bar for the tasks of the jobs that run meanwhile, where somebody looks."""
    console = make_console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    done = threading.Event()
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(what, total=None)

        def look() -> None:
            while not done.wait(LOOK_EVERY):
                finished, total = _tasks()
                bar.update(task, completed=finished, total=total or None)

        thread = threading.Thread(target=look, daemon=True)
        if console.is_terminal:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if console.is_terminal:
                thread.join()


def _tasks() -> tuple[int, int]:
    """Of the stages that run now, the tasks that are done and all of them. Connect does not tell."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        return 0, 0
    tracker, finished, total = context.statusTracker(), 0, 0
    for id in tracker.getActiveStageIds():
        stage = tracker.getStageInfo(id)
        if stage is not None:
            finished, total = finished + stage.numCompletedTasks, total + stage.numTasks
    return finished, total


@spark.command()
@click.option("--queue", "queues", multiple=True, help="Only this queue; may be repeated.")
@click.option("--since", type=parameters.moment, metavar="TIME", help="Ended then or later.")
@click.option("--until", type=parameters.moment, metavar="TIME", help="Ended before.")
@click.option(
    "--out",
    default="pgqrs-report",
    metavar="DIRECTORY",
    help="Where report.html and report.json go; a bucket will do.",
)
@on_spark
@parameters.as_json
@click.pass_obj
def report(
    target: Target,
    /,
    queues: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    out: str,
    key: str | None,
    as_json: bool,
    **where: Any,
) -> None:
    """How queues did, hour by hour, from what is in their archive.

    Throughput, time until claimed and time to run, failures and retries: as a table here, as a page
    with charts, and as JSON.
    """
    require_spark()
    from pgqrs.spark.files import absolute
    from pgqrs.spark.hours import from_json, totals
    from pgqrs.spark.pages import count, duration, percent
    from pgqrs.spark.pipelines import read_text
    from pgqrs.spark.report import report as pipeline

    with target.open() as store, progress("summing up the archive"):
        for name in queues:
            store.admin().get_queue(name)
        start_spark("report", **where)
        files = pipeline.run_inline(
            absolute(out), list(queues) or None, since, until, key=key, store=store
        )
    text = read_text(files["json"])
    if as_json:
        click.echo(text)
        return
    rows = [
        (
            *(total.queue, count(total.ended), count(total.per_hour)),
            *(percent(total.failure_rate), count(total.retries)),
            *(duration(value) for value in (total.wait_p50, total.wait_p99)),
            *(duration(value) for value in (total.run_p50, total.run_p99)),
        )
        for total in totals(from_json(text))
    ]
    headings = ["queue", "ended", "per hour", "failed", "retries"]
    times = ["wait, typical", "p99 at worst", "run, typical", "p99 at worst"]
    print_table(headings + times, rows, empty="Nothing ended in this time.")
    click.echo(f"The report is in {files['html']}.")


@spark.command()
@click.argument("queue")
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option("--batch", type=int, default=5000, help="Messages that a task claims at a time.")
@click.option(
    "--lease", type=parameters.duration, default="1m", help="How long claims of a dead task last."
)
@click.option("--tasks", type=int, help="Tasks of the job.  [default: as many as run at a time]")
@on_spark
@parameters.as_json
@click.pass_obj
def drain(
    target: Target,
    /,
    queue: str,
    function: str,
    batch: int,
    lease: float,
    tasks: int | None,
    key: str | None,
    as_json: bool,
    **where: Any,
) -> None:
    """Work off what is in QUEUE now, by tasks of a Spark job.

    FUNCTION is called with each message, as a worker would; what it returns is kept in the archive. It
    must be there to import wherever Spark runs; what is in this directory is, on this host.
    """
    require_spark()
    from pgqrs.spark.drain import drain as pipeline
    from pgqrs.spark.drain import load

    with here_to_import():
        load(function)
        with target.open() as store, progress(f"draining {queue}"):
            store.admin().get_queue(queue)
            start_spark("drain", **where)
            total = pipeline.run_inline(queue, function, batch, lease, tasks, key=key, store=store)
    if as_json:
        print_json(total)
    else:
        click.echo(
            f"Completed {total['completed']} message(s); {total['failed']} failed for good, "
            f"{total['retried']} were to be tried again."
        )


@contextmanager
def here_to_import() -> Iterator[None]:
    """Modules of this directory can be imported, also by the Python processes that Spark starts."""
    here, before = str(Path.cwd()), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = here if not before else os.pathsep.join((here, before))
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@spark.command()
@click.argument("root", metavar="DIRECTORY")
@click.option(
    "--grace", type=parameters.duration, default="1d", help="For attempts of runs that go on."
)
@click.pass_obj
def sweep(target: Target, root: str, grace: float) -> None:
    """Remove what attempts at Spark steps left behind in DIRECTORY.

    Attempts that are on record are never removed.
    """
    require_spark()
    from pgqrs.spark import sweep as remove

    with target.open() as store:
        swept = remove(store, root, grace=grace)
    for path in swept.removed:
        click.echo(f"removed {Path(path)}")
    click.echo(
        f"Removed {len(swept.removed)}; kept {swept.recorded} on record, {swept.recent} of runs that "
        f"go on, {swept.unknown} of runs that are not known here."
    )


@spark.command()
@click.argument("out", metavar="DIRECTORY")
@click.option("--queue", "queues", multiple=True, help="Only this queue; may be repeated.")
@click.option("--since", type=parameters.moment, metavar="TIME", help="Ended then or later.")
@click.option("--until", type=parameters.moment, metavar="TIME", help="Ended before.")
@click.option(
    "--delete", is_flag=True, help="Delete from the archive what was exported, after that."
)
@click.option("--delta", metavar="TABLE", help="Append it to this Delta table too.")
@on_spark
@parameters.as_json
@click.pass_obj
def export(
    target: Target,
    /,
    out: str,
    queues: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    delete: bool,
    delta: str | None,
    key: str | None,
    as_json: bool,
    **where: Any,
) -> None:
    """Write the archive to DIRECTORY as Parquet, by queue and day.

    Rows are counted on both sides. What attempts left behind that died is never read: manifests in
    the directory name what was exported.
    """
    require_spark()
    from pgqrs.spark.export import export as pipeline
    from pgqrs.spark.files import absolute

    with target.open() as store, progress("exporting the archive"):
        for name in queues:
            store.admin().get_queue(name)
        start_spark("export", **where)
        done = pipeline.run_inline(
            absolute(out), list(queues) or None, since, until, delete, delta, key=key, store=store
        )
    if as_json:
        click.echo(json.dumps(done))
        return
    click.echo(f"Exported {done['rows']:,} message(s) to {done['path']}.")
    if delete:
        click.echo("They are no longer in the archive.")


@spark.command()
@click.argument("source", metavar="DIRECTORY")
@click.argument("queue")
@click.option("--from", "queues", multiple=True, help="Only what was in this queue; repeatable.")
@click.option("--reason", "reasons", multiple=True, help="Only what ended so: failed, expired, …")
@on_spark
@parameters.as_json
@click.pass_obj
def replay(
    target: Target,
    /,
    source: str,
    queue: str,
    queues: tuple[str, ...],
    reasons: tuple[str, ...],
    key: str | None,
    as_json: bool,
    **where: Any,
) -> None:
    """Enqueue into QUEUE what was exported to DIRECTORY, or other Parquet with a column `payload`.

    All at once, and exactly once for each run.
    """
    require_spark()
    from pgqrs.spark.files import absolute
    from pgqrs.spark.replay import replay as pipeline

    with target.open() as store, progress("enqueueing"):
        store.admin().get_queue(queue)
        start_spark("replay", **where)
        done = pipeline.run_inline(
            absolute(source),
            queue,
            list(queues) or None,
            list(reasons) or None,
            key=key,
            store=store,
        )
    if as_json:
        click.echo(json.dumps(done))
        return
    click.echo(f"Enqueued {done['messages']:,} message(s) into {queue}.")


@spark.command()
@click.argument("out", metavar="DIRECTORY")
@click.option("--delete", is_flag=True, help="Delete the files of the exports it stands for.")
@on_spark
@parameters.as_json
@click.pass_obj
def compact(
    target: Target, /, out: str, delete: bool, key: str | None, as_json: bool, **where: Any
) -> None:
    """Make one export of all that are in DIRECTORY, with one file for each queue and day."""
    require_spark()
    from pgqrs.spark.compact import compact as pipeline
    from pgqrs.spark.files import absolute

    with target.open() as store, progress("writing files again"):
        start_spark("compact", **where)
        done = pipeline.run_inline(absolute(out), delete, key=key, store=store)
    if as_json:
        click.echo(json.dumps(done))
    elif done["path"] is None:
        click.echo("There is nothing to put together.")
    else:
        click.echo(f"{done['exports']} exports are one now: {done['rows']:,} message(s).")
