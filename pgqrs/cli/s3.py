"""`pgqrs s3 …`: the object in a bucket, what it costs, and going back to an older state of it."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

import pgqrs
from pgqrs.cli import parameters
from pgqrs.cli.output import print_json, print_table
from pgqrs.cli.target import Target
from pgqrs.s3_cost import PAGE_BYTES, S3Cost, S3Load, S3Prices, predicted

LOOK_EVERY_SECONDS = 1.0
AT_ONCE = 1e-6
"""Seconds of a PUT, where every upload was seen and none are to be shared."""
PRICES = S3Prices()


@click.group()
def s3() -> None:
    """Look at a store in S3: its object, its cost, its older states."""


@s3.command()
@parameters.as_json
@click.pass_obj
def stats(target: Target, as_json: bool) -> None:
    """Show the size of the object, and what it took to look at it."""
    with target.open() as store:
        admin = store.admin()
        admin.pull_from_s3()
        state, found = admin.s3_state(), admin.s3_stats()
    if as_json:
        print_json({"state": state, **asdict(found)})
        return
    rows = [("state", state), ("bytes", found.pages * PAGE_BYTES), *asdict(found).items()]
    print_table(["what", "value"], rows, empty="")


@s3.command()
@click.option("--watch", type=float, default=10.0, help="Seconds to watch the object for.")
@click.option("--writes", type=float, help="Planned operations per second, of all processes.")
@click.option("--processes", type=int, default=1, help="Processes that write or wait.")
@click.option("--object-bytes", type=int, help="Planned size; else that of the object.")
@click.option("--put-seconds", type=float, default=0.06, help="How long a PUT takes.")
@click.option("--hours", type=float, default=24.0, help="Hours a day of this load.")
@click.option("--put-price", type=float, default=PRICES.thousand_puts, help="$ per 1,000 PUTs.")
@click.option("--get-price", type=float, default=PRICES.thousand_gets, help="$ per 1,000 GETs.")
@click.option("--storage-price", type=float, default=PRICES.gigabyte_month, help="$ per GB-month.")
@click.option("--transfer-price", type=float, default=PRICES.gigabyte_out, help="$ per GB fetched.")
@parameters.as_json
@click.pass_obj
def cost(
    target: Target,
    watch: float,
    writes: float | None,
    processes: int,
    object_bytes: int | None,
    put_seconds: float,
    hours: float,
    put_price: float,
    get_price: float,
    storage_price: float,
    transfer_price: float,
    as_json: bool,
) -> None:
    """Show what the store costs in a month.

    Measured: the object is watched for a while, with one look a second; uploads between two looks
    count once, so it is at least that. Predicted: with --writes, from the planned load.
    """
    prices = S3Prices(
        thousand_puts=put_price,
        thousand_gets=get_price,
        gigabyte_month=storage_price,
        gigabyte_out=transfer_price,
    )
    with target.open() as store:
        rate, size = _watched(store, watch)
    shown = S3Load(
        writes=rate,
        object_bytes=size,
        processes=processes,
        put_seconds=AT_ONCE,
        hours_per_day=hours,
    )
    costs = {"measured": predicted(shown, prices)}
    if writes is not None:
        planned = S3Load(
            writes=writes,
            object_bytes=size if object_bytes is None else object_bytes,
            processes=processes,
            put_seconds=put_seconds,
            hours_per_day=hours,
        )
        costs["predicted"] = predicted(planned, prices)
    _print(costs, as_json=as_json)


def _watched(store: pgqrs.Store, seconds: float) -> tuple[float, int]:
    """How many uploads there were in a second, and the size of the object in bytes."""
    admin = store.admin()
    admin.pull_from_s3()
    began, changes = time.monotonic(), 0
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_EVERY_SECONDS))
        changes += admin.pull_from_s3()
    return changes / seconds if seconds > 0 else 0.0, admin.s3_stats().pages * PAGE_BYTES


def _print(costs: dict[str, S3Cost], *, as_json: bool) -> None:
    if as_json:
        print_json({n: {**asdict(found), "dollars": found.dollars} for n, found in costs.items()})
        return
    rows = [
        (
            name,
            f"{found.puts:,.0f}",
            f"{found.gets:,.0f}",
            f"{found.uploaded_bytes / 1e9:,.2f}",
            f"{found.downloaded_bytes / 1e9:,.2f}",
            f"{found.dollars:,.2f}",
        )
        for name, found in costs.items()
    ]
    headings = ["per month", "PUTs", "GETs", "GB uploaded", "GB fetched", "$"]
    print_table(headings, rows, empty="")


@s3.command()
@parameters.limit
@parameters.as_json
@click.pass_obj
def versions(target: Target, limit: int, as_json: bool) -> None:
    """List the states of the object that a versioned bucket keeps."""
    with target.open() as store:
        found = store.admin().s3_versions(limit)
    if as_json:
        print_json(found)
        return
    print_table(
        ["version", "modified", "bytes", "latest"],
        ((v.id, v.modified_at, v.size, v.is_latest) for v in found),
        empty="The bucket keeps no versions.",
    )


@s3.command()
@click.option("--version", required=True, help="As `pgqrs s3 versions` lists it.")
@parameters.yes
@click.pass_obj
def restore(target: Target, version: str, yes: bool) -> None:
    """Make an older state of the object the newest one.

    What is there now stays among the versions. Stop producers and consumers before: what they did since
    that state is undone for all of them.
    """
    if not yes:
        click.confirm("Everything since that version will be undone. Go on?", abort=True)
    with target.open() as store:
        store.admin().restore_s3(version)
    click.echo(f"Restored version {version}.")
