"""The `millpond` command."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from millpond.errors import MillpondError, UsageError

app = typer.Typer(help="A state engine for PySpark Structured Streaming.", no_args_is_help=True, add_completion=False)
state = typer.Typer(help="Look at the state of a query, without Spark.", no_args_is_help=True)
app.add_typer(state, name="state")

Location = Annotated[str, typer.Argument(help="The query's checkpointLocation (or its spark.millpond.state.location).")]
Operator = Annotated[int, typer.Option(help="Which operator of the query.")]
Version = Annotated[int | None, typer.Option(help="The state after batch VERSION-1; the newest by default.")]

_out = Console()


@state.command("ls")
def list_state(location: Location) -> None:
    """List operators, partitions, versions and sizes."""
    from millpond.slot.reader import StateReader

    reader = StateReader(location)
    versions = reader.versions()
    span = f"versions {versions[0]} to {versions[-1]}" if versions else "no durable version yet"
    _out.print(f"{reader.files.url}: generation {reader.claim.number}, {reader.partitions} partitions, {span}")
    table = Table("operator", "table", "runs", "run rows", "run bytes", "deltas", "delta bytes")
    for operator in reader.operators if versions else ():
        manifests = [reader.manifest(operator.index, p, versions[-1]) for p in range(reader.partitions)]
        for name in operator.tables:
            states = [manifest.tables[name] for manifest in manifests if name in manifest.tables]
            runs = [run for one in states for run in one.runs.runs]
            deltas = [delta for one in states for delta in one.deltas]
            table.add_row(
                f"{operator.index}: {operator.title}",
                name,
                *(f"{n:,}" for n in (len(runs), sum(r.rows for r in runs), sum(r.bytes for r in runs))),
                *(f"{n:,}" for n in (len(deltas), sum(d.length for d in deltas))),
            )
    _out.print(table)


@state.command("show")
def show_state(
    location: Location,
    operator: Operator = 0,
    version: Version = None,
    partition: Annotated[int | None, typer.Option(help="Only this partition.")] = None,
    rows: Annotated[int, typer.Option(help="How many rows to print.")] = 20,
) -> None:
    """Print rows of an operator's state."""
    from millpond.slot.reader import StateReader

    reader = StateReader(location)
    chosen = _version(reader.versions(), version)
    table, left = None, rows
    for number in range(reader.partitions) if partition is None else [partition]:
        for batch in reader.read(operator, number, chosen):
            table = table or Table(*batch.schema.names, title=f"operator {operator}, version {chosen}")
            for row in batch.slice(0, left).to_pylist():
                table.add_row(*("null" if value is None else str(value) for value in row.values()))
            left -= min(left, batch.num_rows)
            if not left:
                break
        if not left:
            break
    _out.print(table or "no rows")


@state.command("verify")
def verify_state(location: Location, version: Version = None) -> None:
    """Read everything that a version consists of and check every checksum."""
    from millpond.slot.reader import StateReader

    reader = StateReader(location)
    chosen = _version(reader.versions(), version)
    failed = rows = 0
    for operator in reader.operators:
        for partition in range(reader.partitions):
            for name in operator.tables:
                try:
                    rows += sum(b.num_rows for b in reader.read(operator.index, partition, chosen, name))
                except MillpondError as error:
                    failed += 1
                    _out.print(f"[red]{error.at(operator=str(operator.index), partition=partition, version=chosen)}")
    places = len(reader.operators) * reader.partitions
    _out.print(f"version {chosen}: {places} partitions, {rows:,} rows, {failed} damaged")
    if failed:
        raise typer.Exit(1)


@app.command()
def demo() -> None:
    """Run NEXMark q17 on Spark's RocksDB and on Millpond, kill both in mid-stream, and compare every row."""
    from millpond.demo import run_demo

    raise typer.Exit(run_demo())


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="WORKLOAD [OPTIONS]",
)
def bench(context: typer.Context) -> None:
    """Measure Millpond and other engines side by side (`--help` tells the workloads and options)."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise UsageError(
            "The benchmarks are part of Millpond's source tree, which this installation does not come from.",
            action="Clone the repository, run `make setup` there, and use its `millpond`.",
        )
    sys.path.insert(0, str(root))
    raise typer.Exit(import_module("benchmarks.cli").main(context.args))


def _version(known: list[int], wanted: int | None) -> int:
    if not known:
        _out.print("There is no durable version yet.")
        raise typer.Exit(1)
    return known[-1] if wanted is None else wanted


def main() -> None:
    """Run the command line; errors of Millpond are printed without a traceback."""
    try:
        app()
    except MillpondError as error:
        _out.print(f"[red]{error}")
        raise SystemExit(1) from None
