"""The `millpond` command."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from millpond.conf import KEY_GROUP_BITS
from millpond.errors import MillpondError, StateDamagedError, UsageError
from millpond.words import counted

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

_out = Console()
if not _out.is_terminal and "COLUMNS" not in os.environ:
    _out.width = 1000  # lines of tables stay whole for what reads them


def _tell_version(asked: bool) -> None:
    if asked:
        from millpond import __version__

        _out.print(f"millpond {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A state engine for PySpark Structured Streaming."""


@state.command("ls")
def list_state(location: Location) -> None:
    """List operators, partitions, versions and sizes."""
    from millpond.checkpoint.generation import newest_claim
    from millpond.query.ledger.finding import find_state
    from millpond.slot.reading.reader import StateReader, span
    from millpond.time_slices import base_name

    reader = StateReader(find_state(location))
    versions, damage, newest = reader.versions(), reader.damage(), reader.newest()
    none = "no whole version" if damage else "no durable version yet"
    there = span(versions) if newest else none
    there += f", damaged commits: {len(damage)} (`millpond state verify` names them)" if damage else ""
    partitions = counted(reader.partitions, "partition")
    claimed = newest_claim(reader.files)
    if claimed is not None and claimed.partitions != reader.partitions:
        partitions += f" ({claimed.partitions:,} from the next start on)"
    _out.print(f"{reader.files.url}: generation {reader.claim.number}, {partitions}, {there}")
    table = Table("operator", "table", "runs", "run rows", "run bytes", "deltas", "delta bytes")
    for operator in reader.operators:
        if not newest:  # tables come into being with the first version
            table.add_row(f"{operator.index}: {operator.title}", ", ".join(operator.tables), *("–" * 5))
            continue
        manifests = [reader.manifest(operator.index, p, newest) for p in range(reader.partitions)]
        for name in operator.tables:
            # State by event time lies in a table for each slice, called after the table and the slice.
            held = [(at, one) for each in manifests for at, one in each.tables.items() if base_name(at) == name]
            slices = len({at for at, _ in held if at != name})
            # A pending run is not part of the state yet: what it holds is counted where it came from.
            runs = [run for run in _runs(one for _, one in held) if not run.pending]
            deltas = _deltas(one for _, one in held)
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
    from millpond.query.ledger.finding import find_state
    from millpond.slot.reading.reader import StateReader

    reader = StateReader(find_state(location))
    chosen = reader.choose(version)
    one = reader.choose_operator(chosen, operator)
    name, _ = one.part(variable)
    table, left = None, rows
    for number in range(reader.partitions_at(chosen)) if partition is None else [partition]:
        for batch in reader.read(one.index, number, chosen, name):
            table = table or Table(*batch.schema.names, title=f"operator {one.index}, version {chosen}")
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
    """Read everything that a version consists of and check every checksum.

    Without --version, that is the newest whole version, and the head of every commit of the newest run is checked, too.
    """
    from millpond.query.ledger.finding import find_state
    from millpond.slot.reading.reader import StateReader

    reader = StateReader(find_state(location))
    damage = reader.damage(version)
    for error in damage:
        _complain(error)
    failed, rows = len(damage), 0
    try:
        chosen = reader.choose(version)
    except StateDamagedError:  # it is among those just named
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
                    _complain(error.at(operator=str(operator.index), partition=partition, version=chosen))
    places = counted(partitions, "partition")
    places += f" of {counted(len(operators), 'operator')}" if len(operators) > 1 else ""
    _out.print(f"version {chosen}: {places}, {counted(rows, 'row')}, {failed} damaged")
    if failed:
        raise typer.Exit(1)


@state.command("rescale")
def rescale_state(
    location: Location,
    partitions: Annotated[int, typer.Option(min=1, max=1 << KEY_GROUP_BITS, help="How many there shall be.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what each would be made of.")] = False,
) -> None:
    """Give the state another number of partitions from the query's next start on; no data moves.

    The query must not be running: its run is fenced. (spark.millpond.partitions does the same at a start.)
    """
    from millpond.checkpoint.generation import claim
    from millpond.checkpoint.rescale import rescaled
    from millpond.query.ledger.finding import find_state
    from millpond.slot.reading.reader import StateReader

    reader = StateReader(find_state(location))
    version = reader.choose()
    before = counted(reader.partitions, "partition")
    names = ("runs", "of them shared", "deltas", "of them shared", "delta bytes")
    table = Table("operator", "partition", "made of", "keys, about", *names)
    everywhere: dict[tuple[str, int], int] = {}
    for operator in reader.operators:

        def manifest(partition: int, index: int = operator.index) -> PartitionManifest:
            return reader.manifest(index, partition, version)

        for made in rescaled(reader.claim, partitions, operator.index, version, manifest):
            tables = made.manifest.tables.values()
            runs, deltas = _runs(tables), _deltas(tables)
            everywhere |= {(delta.commit, delta.offset): delta.length for delta in deltas}
            table.add_row(
                f"{operator.index}: {operator.title}",
                str(made.partition),
                ", ".join(map(str, made.parents)),
                f"{sum(one.runs.keys for one in tables):,}",
                f"{len(runs):,}",
                f"{sum(run.window is not None for run in runs):,}",
                f"{len(deltas):,}",
                f"{sum(delta.window is not None for delta in deltas):,}",
                f"{sum(delta.length for delta in deltas):,}",
            )
    _out.print(f"{reader.files.url}: version {version}, {before}, to become {partitions}")
    _out.print(table)
    deltas_of_all = f"{counted(len(everywhere), 'delta')} of {sum(everywhere.values()):,} bytes"
    _out.print(f"{deltas_of_all} in all; what partitions share stands in the line of each")
    if not dry_run:
        claim(
            reader.files,
            run="millpond state rescale",
            partitions=partitions,
            key_groups=reader.claim.key_groups,
            least=reader.claim.number + 1,
        )
        _out.print("The query's next start takes them, unless spark.millpond.partitions says otherwise.")


@state.command("gc")
def collect_state(
    checkpoint: Checkpoint,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove files of the state that nobody needs any more; the query may run meanwhile.

    What retained versions need and is not there is named: then nothing is removed, and the exit status is 1.
    """
    from millpond.files.backends.filesystem import MissingFileError
    from millpond.query.ledger.orphans import orphans_of, still_shared

    files, orphans = orphans_of(checkpoint)
    table = Table("kind", "objects", "bytes")
    for kind, infos in orphans.found.items():
        table.add_row(kind, f"{len(infos):,}", f"{sum(info.size for info in infos):,}")
    _out.print(f"{files.url}:")
    _out.print(table)
    for name, pin in orphans.pins.items():
        held = counted(len(pin.objects), "object")
        _out.print(f"{held} of version {pin.version} kept for {pin.fork} ({files.locate(name)})", soft_wrap=True)
    for name, version in orphans.missing.items():
        try:
            files.size(name)
        except MissingFileError as error:  # as whoever reads it is told: it may be of another checkpoint
            _complain(error.at(version=version))
    if orphans.missing:
        _out.print(f"{counted(len(orphans.missing), 'file')} missing, nothing was removed")
        raise typer.Exit(1)
    if not dry_run:
        orphans.remove(files)
    number = sum(len(infos) for infos in orphans.found.values())
    _out.print(f"{counted(number, 'object')} {'would be removed' if dry_run else 'removed'}")
    for location, objects in still_shared(files, orphans).items():
        _out.print(f"{counted(objects, 'object')} of {location} still needed", soft_wrap=True)
    for parent in orphans.parents.values():
        _out.print(f"nothing of {parent.location} is needed any more", soft_wrap=True)


@state.command("fork")
def fork_state(
    checkpoint: Checkpoint,
    new: Annotated[str, typer.Argument(help="The checkpointLocation to be made.")],
    version: Version = None,
) -> None:
    """Make a checkpoint that goes on from the state of another, sharing its files; the query may run meanwhile.

    It is a query of its own from then on: give it a sink of its own, and keep the original where it is.
    """
    from millpond.query.ledger.fork import fork

    made = fork(checkpoint, new, version)
    shared = f"{counted(made.partitions, 'partition')}, {counted(made.objects, 'object')} shared"
    _out.print(f"{made.checkpoint}: query {made.query}, version {made.version}, {shared}", soft_wrap=True)


@state.command("export")
def export_state(
    location: Location,
    target: Annotated[str, typer.Argument(help="A folder (path or URL) without any file.")],
    version: Version = None,
    operator: Annotated[int | None, typer.Option(help="Only this operator; all by default.")] = None,
) -> None:
    """Write the state of a version to Parquet files, with the columns of read_state; the query may run meanwhile.

    There is a folder for each operator, with a file for each partition, and at last a file _SUCCESS.
    """
    from millpond.query.ledger.finding import find_state
    from millpond.slot.reading.export import export_state as export

    made = export(find_state(location), target, version, operator)
    what = f"version {made.version}, {counted(made.files, 'file')}, {counted(made.rows, 'row')}"
    _out.print(f"{made.target}: {what}", soft_wrap=True)


@app.command()
def top(
    checkpoint: Checkpoint,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end; so it is without a terminal.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show how a query gets on, from outside and without Spark: rows a second, batch time, state, commit lag."""
    from millpond.top import watch

    watch(checkpoint, _out, interval, once=once)


@app.command()
def compactor(
    locations: Annotated[
        list[str],
        typer.Argument(help="Checkpoints of queries with spark.millpond.compaction=remote, or their folders of state."),
    ],
    once: Annotated[bool, typer.Option("--once", help="Do what there is to do, and end.")] = False,
    idle_exit: Annotated[
        float | None, typer.Option(min=0.0, help="End when there was nothing to do for so many seconds.")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks for something to do.")] = 2.0,
    lease: Annotated[
        float, typer.Option(min=1.0, help="Seconds of silence after which another compactor's work is taken over.")
    ] = 30.0,
) -> None:
    """Compact the state of queries in their place, on any machine that reads and writes it; run as many as you like.

    A compactor keeps nothing: it may be killed at any time. SIGTERM ends it cleanly.
    """
    from millpond.compactor import work

    work(locations, poll=poll, lease=lease, once=once, idle_exit=idle_exit)


@app.command()
def docs(
    topic: Annotated[
        str | None, typer.Argument(help="The page, as `troubleshooting`; without it the pages are listed.")
    ] = None,
) -> None:
    """Print a page of the documentation of this version: errors name those that help."""
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
        typer.echo(page(topic), nl=False)  # the source, for what reads it


@app.command()
def demo(
    query: Annotated[str, typer.Option(help="`clicks`, or a NEXMark query as `q17`.")] = "clicks",
    report: Annotated[Path | None, typer.Option(help="The folder for the report; millpond-demo by default.")] = None,
    picture: Annotated[Path | None, typer.Option(help="An SVG file to draw the result into as well.")] = None,
) -> None:
    """Run a query on Spark's RocksDB and on Millpond, kill both in mid-stream, and compare every row."""
    from millpond.demo.run import run_demo

    raise typer.Exit(run_demo(query, folder=report, picture_path=picture))


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


def _runs(tables: Iterable[TableState]) -> list[RunRef]:
    """The run files of some tables, each once: what partitions share is named several times, for other hashes each."""
    return list({run.name: run for one in tables for run in one.runs.runs}.values())


def _deltas(tables: Iterable[TableState]) -> list[DeltaRef]:
    """The deltas of some tables, likewise."""
    return list({(delta.commit, delta.offset): delta for one in tables for delta in one.deltas}.values())


def _complain(error: MillpondError) -> None:
    """Print an error: as one line, so that the name of a file in it can be copied."""
    _out.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; errors of Millpond are printed without a traceback."""
    try:
        app()
    except MillpondError as error:
        _complain(error)
        raise SystemExit(1) from None
