"""The `millpond` command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from millpond.errors import MillpondError, StateDamagedError
from millpond.humanize import counted
from millpond.key_groups import KEY_GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from millpond.checkpoint.formats.manifest import DeltaRef, PartitionManifest, TableState
    from millpond.files.refs import RunRef

app = typer.Typer(no_args_is_help=True, add_completion=False)
state = typer.Typer(help="Look at the state of a query, without Spark.", no_args_is_help=True)
app.add_typer(state, name="state")

Location = Annotated[
    str, typer.Argument(help="The query's checkpointLocation (or its folder in spark.millpond.state.location).")
]
Checkpoint = Annotated[str, typer.Argument(help="The query's checkpointLocation.")]
Operator = Annotated[int | None, typer.Option(help="Which operator of the query; the first that has state by default.")]
Version = Annotated[int | None, typer.Option(help="The state after batch VERSION-1; the newest by default.")]

_out = Console(markup=False, emoji=False)  # what is shown comes from state and paths, and is no markup
if not _out.is_terminal and "COLUMNS" not in os.environ:
    _out.width = 1000  # do not wrap tables in pipes and files


def _print_version(requested: bool) -> None:
    if requested:
        from millpond import __version__

        _out.print(f"millpond {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A state engine for PySpark Structured Streaming."""


@state.command("ls")
def list_state(location: Location) -> None:
    """List operators, partitions, versions and sizes."""
    from millpond.checkpoint.generation import deciding_claim
    from millpond.query.checkpoints.finding import find_state
    from millpond.state_reader.reader import StateReader, format_versions
    from millpond.time_slices import base_name

    reader = StateReader(find_state(location))
    versions, damage, newest = reader.versions(), reader.damage(), reader.newest()
    no_version = "no whole version" if damage else "no durable version yet"
    summary = format_versions(versions) if newest else no_version
    summary += f", damaged commits: {len(damage)} (`millpond state verify` names them)" if damage else ""
    partitions = counted(reader.partitions, "partition")
    claimed = deciding_claim(reader.files)
    if claimed is not None and claimed.partitions != reader.partitions:
        partitions += f" ({claimed.partitions:,} from the next start on)"
    _out.print(f"{reader.files.url}: generation {reader.claim.number}, {partitions}, {summary}")
    table = Table("operator", "table", "runs", "run rows", "run bytes", "deltas", "delta bytes")
    for operator in reader.operators:
        if not newest:  # tables exist from the first version on
            table.add_row(f"{operator.index}: {operator.title}", ", ".join(operator.tables), *("–" * 5))
            continue
        manifests = [reader.manifest(operator.index, p, newest) for p in range(reader.partitions)]
        for name in operator.tables:
            # State by event time has a table for each slice, whose name is that of the base table and the slice.
            states = [
                (table_name, table_state)
                for manifest in manifests
                for table_name, table_state in manifest.tables.items()
                if base_name(table_name) == name
            ]
            slices = len({table_name for table_name, _ in states if table_name != name})
            # A pending run is not part of the state yet: its rows are still counted in its inputs.
            runs = [run for run in _runs(table_state for _, table_state in states) if not run.pending]
            deltas = _deltas(table_state for _, table_state in states)
            table.add_row(
                f"{operator.index}: {operator.title}",
                f"{name} ({counted(slices, 'slice')})" if slices else name,
                *(f"{n:,}" for n in (len(runs), sum(r.rows for r in runs), sum(r.bytes for r in runs))),
                *(f"{n:,}" for n in (len(deltas), sum(d.length for d in deltas))),
            )
    _out.print(table)


@state.command("show")
def show_state(
    location: Location,
    operator: Operator = None,
    version: Version = None,
    partition: Annotated[int | None, typer.Option(help="Only this partition.")] = None,
    rows: Annotated[int, typer.Option(help="How many rows to print.")] = 20,
    variable: Annotated[str | None, typer.Option(help="Of a processor, the state variable, or timers.")] = None,
) -> None:
    """Print rows of an operator's state."""
    from millpond.query.checkpoints.finding import find_state
    from millpond.state_reader.reader import StateReader
    from millpond.state_reader.values import printable_value

    reader = StateReader(find_state(location))
    chosen = reader.choose(version)
    chosen_operator = reader.choose_operator(chosen, operator)
    name, _ = chosen_operator.part(variable)
    table, rows_left = None, rows
    for number in range(reader.partitions_at(chosen)) if partition is None else [partition]:
        for batch in reader.read(chosen_operator.index, number, chosen, name):
            table = table or Table(*batch.schema.names, title=f"operator {chosen_operator.index}, version {chosen}")
            for row in range(min(rows_left, batch.num_rows)):
                table.add_row(*(_shown(printable_value(column[row])) for column in batch.columns))
            rows_left -= min(rows_left, batch.num_rows)
            if not rows_left:
                break
        if not rows_left:
            break
    _out.print(table or "no rows")


def _shown(value: Any) -> str:
    """Return a value of a row as text: structs and lists as JSON."""
    if isinstance(value, dict | list):
        return json.dumps(value, default=str, ensure_ascii=False)
    return "null" if value is None else str(value)


@state.command("verify")
def verify_state(location: Location, version: Version = None) -> None:
    """Read all files of a version and check every checksum.

    Without --version, this is the newest whole version, and the head of every commit of the newest run is checked, too.
    """
    from millpond.query.checkpoints.finding import find_state
    from millpond.state_reader.reader import StateReader

    reader = StateReader(find_state(location))
    damage = reader.damage(version)
    for error in damage:
        _print_error(error)
    failed, rows = len(damage), 0
    try:
        chosen = reader.choose(version)
    except StateDamagedError as error:
        if error not in damage:  # the claim or base of an earlier run
            _print_error(error)
            failed += 1
        _out.print(f"{'no version is' if version is None else f'version {version} is not'} whole, {failed} damaged")
        raise typer.Exit(1) from None
    operators, partitions = reader.operators_at(chosen), reader.partitions_at(chosen)
    for operator in operators:
        for partition in range(partitions):
            for name in operator.tables:
                try:
                    rows += sum(b.num_rows for b in reader.read(operator.index, partition, chosen, name))
                except MillpondError as error:
                    failed += 1
                    _print_error(error.at(operator=str(operator.index), partition=partition, version=chosen))
    places = counted(partitions, "partition")
    places += f" of {counted(len(operators), 'operator')}" if len(operators) > 1 else ""
    _out.print(f"version {chosen}: {places}, {counted(rows, 'row')}, {failed} damaged")
    if failed:
        raise typer.Exit(1)


@state.command("rescale")
def rescale_state(
    location: Location,
    partitions: Annotated[int, typer.Option(min=1, max=KEY_GROUPS, help="The new number of partitions.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the parts that each partition would be made of.")
    ] = False,
) -> None:
    """Change the number of partitions of the state from the query's next start on; no data moves.

    The query must not be running: its run is fenced. (spark.millpond.partitions does the same at a start.)
    """
    from millpond.checkpoint.generation import RESCALE_RUN, claim
    from millpond.checkpoint.rescale import rescaled
    from millpond.query.checkpoints.finding import find_state
    from millpond.state_reader.reader import StateReader

    reader = StateReader(find_state(location))
    version = reader.choose()
    before = counted(reader.partitions, "partition")
    names = ("runs", "of them shared", "deltas", "of them shared", "delta bytes")
    table = Table("operator", "partition", "made of", "keys, about", *names)
    lengths: dict[tuple[str, int], int] = {}
    for operator in reader.operators:

        def manifest(partition: int, index: int = operator.index) -> PartitionManifest:
            return reader.manifest(index, partition, version)

        for part in rescaled(reader.claim, partitions, operator.index, version, manifest):
            tables = part.manifest.tables.values()
            runs, deltas = _runs(tables), _deltas(tables)
            lengths |= {(delta.commit, delta.offset): delta.length for delta in deltas}
            table.add_row(
                f"{operator.index}: {operator.title}",
                str(part.partition),
                ", ".join(map(str, part.parents)),
                f"{sum(state_of_table.runs.keys for state_of_table in tables):,}",
                f"{len(runs):,}",
                f"{sum(run.visible is not None for run in runs):,}",
                f"{len(deltas):,}",
                f"{sum(delta.visible is not None for delta in deltas):,}",
                f"{sum(delta.length for delta in deltas):,}",
            )
    _out.print(f"{reader.files.url}: version {version}, {before}, to become {partitions}")
    _out.print(table)
    deltas_of_all = f"{counted(len(lengths), 'delta')} of {sum(lengths.values()):,} bytes"
    _out.print(f"{deltas_of_all} in all; what partitions share stands in the line of each")
    if not dry_run:
        claim(
            reader.files,
            run=RESCALE_RUN,
            partitions=partitions,
            key_groups=reader.claim.key_groups,
            minimum=reader.claim.number + 1,
        )
        _out.print("The query's next start takes them, unless spark.millpond.partitions says otherwise.")


@state.command("gc")
def collect_state(
    checkpoint: Checkpoint,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the files that would be removed.")] = False,
) -> None:
    """Remove unneeded files of the state; the query may run meanwhile.

    If files are missing that retained versions need, their names are printed, no file is removed, and the exit status
    is 1.
    """
    from millpond.files.backends.filesystem import MissingFileError
    from millpond.query.checkpoints.orphans import orphans_of, still_shared

    files, orphans = orphans_of(checkpoint)
    table = Table("kind", "objects", "bytes")
    for kind, infos in orphans.unneeded.items():
        table.add_row(kind, f"{len(infos):,}", f"{sum(info.size for info in infos):,}")
    _out.print(f"{files.url}:")
    _out.print(table)
    for name, pin in orphans.pins.items():
        pinned = counted(len(pin.objects), "object")
        _out.print(f"{pinned} of version {pin.version} kept for {pin.fork} ({files.locate(name)})", soft_wrap=True)
    for name, version in orphans.missing.items():
        try:
            files.size(name)
        except MissingFileError as error:  # the error that a reader gets: the file may be of another checkpoint
            _print_error(error.at(version=version))
    if orphans.missing:
        _out.print(f"{counted(len(orphans.missing), 'file')} missing, nothing was removed")
        raise typer.Exit(1)
    if not dry_run:
        orphans.remove(files)
    number = sum(len(infos) for infos in orphans.unneeded.values())
    _out.print(f"{counted(number, 'object')} {'would be removed' if dry_run else 'removed'}")
    for location, objects in still_shared(files, orphans).items():
        _out.print(f"{counted(objects, 'object')} of {location} still needed", soft_wrap=True)
    for parent in orphans.parents.values():
        _out.print(f"nothing of {parent.location} is needed any more", soft_wrap=True)


@state.command("fork")
def fork_state(
    checkpoint: Checkpoint,
    new: Annotated[str, typer.Argument(help="The new checkpointLocation.")],
    version: Version = None,
) -> None:
    """Make a checkpoint that goes on from the state of another one and shares its files; the query may run meanwhile.

    The fork is an independent query: give it its own sink, and do not move the original checkpoint.
    """
    from millpond.query.checkpoints.fork import fork

    forked = fork(checkpoint, new, version)
    shared = f"{counted(forked.partitions, 'partition')}, {counted(forked.objects, 'object')} shared"
    _out.print(f"{forked.checkpoint}: query {forked.query}, version {forked.version}, {shared}", soft_wrap=True)


@state.command("export")
def export_state(
    location: Location,
    target: Annotated[str, typer.Argument(help="An empty folder (path or URL).")],
    version: Version = None,
    operator: Annotated[int | None, typer.Option(help="Only this operator; all by default.")] = None,
) -> None:
    """Write the state of a version to Parquet files, with the columns of read_state; the query may run meanwhile.

    Each operator has a folder with a file for each partition. A file _SUCCESS is written last.
    """
    from millpond.query.checkpoints.finding import find_state
    from millpond.state_reader.export import export_state as export

    exported = export(find_state(location), target, version, operator)
    summary = f"version {exported.version}, {counted(exported.files, 'file')}, {counted(exported.rows, 'row')}"
    _out.print(f"{exported.target}: {summary}", soft_wrap=True)


@app.command()
def top(
    checkpoint: Checkpoint,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and exit; the default without a terminal.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two frames.")] = 2.0,
) -> None:
    """Show the progress of a running query, without Spark: rows a second, batch time, state, commit lag."""
    from millpond.top import watch

    watch(checkpoint, _out, interval, once=once)


@app.command()
def compactor(
    locations: Annotated[
        list[str],
        typer.Argument(help="Checkpoints of queries with spark.millpond.compaction=remote, or their folders of state."),
    ],
    once: Annotated[bool, typer.Option("--once", help="Do all open requests, and exit.")] = False,
    idle_exit: Annotated[
        float | None, typer.Option(min=0.0, help="Exit after this number of seconds without a request.")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks for requests.")] = 2.0,
    lease: Annotated[
        float,
        typer.Option(
            min=1.0, help="Seconds without a new lease after which another compactor's request is taken over."
        ),
    ] = 30.0,
) -> None:
    """Compact the state of queries remotely, on any machine that can read and write it; run any number of compactors.

    A compactor keeps no state and may be killed at any time. SIGTERM ends it cleanly.
    """
    from millpond.compactor.process import work

    work(locations, poll=poll, lease=lease, once=once, idle_exit=idle_exit)


@app.command()
def docs(
    topic: Annotated[
        str | None, typer.Argument(help="The page, e.g. `troubleshooting`; all pages are listed without it.")
    ] = None,
) -> None:
    """Print a page of the documentation of this version; error messages name the pages that help."""
    from millpond.documentation import page, pages, title

    if topic is None:
        table = Table("topic", "page")
        for name, path in pages().items():
            table.add_row(name, title(path))
        _out.print(table)
    elif _out.is_terminal:
        from rich.markdown import Markdown

        _out.print(Markdown(page(topic)))
    else:
        typer.echo(page(topic), nl=False)  # the Markdown source, for pipes and files


@app.command()
def demo(
    query: Annotated[
        str, typer.Option(help="`clicks`, or, in a source tree, a NEXMark query such as `q17`.")
    ] = "clicks",
    report: Annotated[Path | None, typer.Option(help="The folder for the report; millpond-demo by default.")] = None,
    picture: Annotated[Path | None, typer.Option(help="An SVG file to draw the result into, too.")] = None,
) -> None:
    """Run a query on Spark's RocksDB and on Millpond, kill both in mid-stream, and compare every row."""
    from millpond.demo.run import run_demo

    raise typer.Exit(run_demo(query, folder=report, picture_path=picture))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="WORKLOAD [OPTIONS]",
)
def bench(context: typer.Context) -> None:
    """Measure Millpond and other engines side by side (`--help` lists the workloads and options)."""
    from millpond.demo.jobs import import_benchmarks

    raise typer.Exit(import_benchmarks("cli").main(context.args))


def _runs(tables: Iterable[TableState]) -> list[RunRef]:
    """Return the run files of tables without duplicates: partitions share files, each with its own hash interval."""
    return list({run.name: run for table in tables for run in table.runs.runs}.values())


def _deltas(tables: Iterable[TableState]) -> list[DeltaRef]:
    """Return the deltas of tables without duplicates."""
    return list({(delta.commit, delta.offset): delta for table in tables for delta in table.deltas}.values())


def _print_error(error: MillpondError) -> None:
    """Print an error as one line, so that the name of a file in it can be copied."""
    _out.print(str(error), style="red", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; print errors of Millpond without a traceback."""
    try:
        app()
    except MillpondError as error:
        _print_error(error)
        raise SystemExit(1) from None
