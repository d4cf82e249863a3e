"""`millpond top`: the progress of a running query in the terminal, read from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millpond.errors import MillpondError, TransientError, UsageError
from millpond.humanize import counted
from millpond.metrics import (
    COMPACTION_METRICS,
    FETCH,
    LOOKAHEAD,
    LOOKAHEADS,
    PREFETCH,
    REQUEST_PRICES,
    SLACK,
    TIER_METRICS,
    WAITING,
    request_cost,
)
from millpond.query.progress.reader import BatchProgress, Progress, ProgressReader
from millpond.slot.process.client import query_status
from millpond.slot.process.messages import QueryStatus
from millpond.slot.process.queries import find_running_query

_SILENCE_SECONDS = 3.0
_BARS = "▁▂▃▄▅▆▇█"
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_LENGTHS = (("d", 86_400), ("h", 3_600), ("min", 60))


def watch(checkpoint: str, console: Console, interval: float, *, once: bool) -> None:
    """Show a query until the user interrupts; show one frame if the output is not a terminal or `once` is set.

    Args:
        checkpoint: the query's checkpoint location.
        console: the output.
        interval: seconds between two frames.
        once: whether to show one frame only.

    Raises:
        UsageError: the location has no Millpond state, or is not the checkpoint.
    """
    reader = ProgressReader(checkpoint)
    if not reader.has_logs:
        raise UsageError(
            "There are no offset log and commit log of Spark here, which show the query's progress.",
            action="Give the query's checkpointLocation, also if its state lies elsewhere.",
            file=checkpoint,
        )
    if once or not console.is_terminal:
        console.print(frame(reader.read(), *_running(reader.state)))
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                live.update(frame(reader.read(), *_running(reader.state)), refresh=True)
            except TransientError as error:  # the store may answer next time
                live.update(Text(str(error), style="red"), refresh=True)
            time.sleep(interval)


def _running(state: str) -> tuple[int | None, QueryStatus | None]:
    """Return the process of the query's application, if it runs on this host, and the query's status in its slots."""
    running = find_running_query(state)
    if running is None:
        return None, None
    directory, note = running
    try:
        return note.process.pid, query_status(directory, note.query, _SILENCE_SECONDS)
    except MillpondError:  # a slot is busy or has ended: its next caller handles that
        return note.process.pid, None


def frame(progress: Progress, process: int | None, status: QueryStatus | None) -> RenderableType:
    """Draw one frame.

    Args:
        progress: the query's progress, from its checkpoint.
        process: the process id of its application; None if it does not run on this host.
        status: the query's status in its slots; None if they did not answer.
    """
    parts: list[RenderableType] = [_head(progress, process)]
    if status is not None and status.commit_failures:
        parts += [Text(trouble, style="bold red") for trouble in status.commit_failures]
    if not progress.batches:
        return Group(*parts, Text("no durable version yet"))
    timed = [batch for batch in progress.batches if batch.seconds is not None]
    parts.append(_batches(progress, timed, status))
    parts.append(_operators(progress.batches[-1], timed[-1] if timed else None))
    if any(operator.prefetched for operator in progress.batches[-1].operators):
        parts.append(_prefetching(progress.batches[-10:]))
    if any(operator.looked_up for operator in progress.batches[-1].operators):
        parts.append(_lookups(progress.batches[-10:]))
    return Group(*parts)


def _head(progress: Progress, process: int | None) -> Text:
    head = Text(progress.state, style="bold")
    head.append(f"  run {progress.generation}, {counted(progress.partitions, 'partition')}  ", style="not bold")
    if process is None:
        head.append("not running on this host", style="yellow")
    else:
        head.append(f"running (process {process})", style="green")
    return head


def _batches(progress: Progress, timed: list[BatchProgress], status: QueryStatus | None) -> Table:
    last = timed[-1] if timed else None
    since = "" if progress.last is None else f", last seen {_time(max(0.0, time.time() - progress.last))} ago"
    working = f", batch {progress.planned} planned" if progress.planned > progress.committed else ""
    recent = timed[-10:]
    rates = _rates(timed)
    mean = _per_second(sum(batch.rows for batch in recent), sum(batch.seconds or 0.0 for batch in recent))
    table = Table.grid(padding=(0, 2))
    table.add_row("batch", f"{progress.committed} committed{working}{since}")
    table.add_row("batch time", "–" if last is None else _time(last.seconds or 0.0))
    table.add_row(
        "rows/s",
        f"{_rate(rates[-1] if rates else None)}, {_rate(mean)} over {counted(len(recent), 'batch', 'batches')}",
    )
    if rates:
        table.add_row("", "".join(_BARS[round(rate / (max(rates) or 1.0) * (len(_BARS) - 1))] for rate in rates))
    failed = f", {counted(status.failed_commits, 'failed try', 'failed tries')}" if status is not None else ""
    table.add_row("commit lag", f"{counted(progress.commit_lag, 'version')}{failed}")
    if progress.hosts:
        table.add_row("hosts", ", ".join(f"{host}: {count}" for host, count in progress.hosts.items()) + " partitions")
    if moved := sum(operator.moved_partitions for batch in recent for operator in batch.operators):
        table.add_row("moved", f"{counted(moved, 'partition')} in {counted(len(recent), 'batch', 'batches')}")
    if opened := max((operator.open_seconds for batch in recent for operator in batch.operators), default=0.0):
        table.add_row("opening", f"{_time(opened)} at most in {counted(len(recent), 'batch', 'batches')}")
    if progress.restart is not None:
        ago = _time(max(0.0, time.time() - progress.started))
        table.add_row("restarts", f"{progress.restart.number}, the last {ago} ago: {progress.restart}")
    if recent and recent[-1].requests:
        table.add_row("requests", _requests(recent))
    if line := _tiers(recent):
        table.add_row("blocks", line)
    if line := _compactions(progress.batches[-10:]):
        table.add_row("compactions", line)
    return table


def _tiers(recent: list[BatchProgress]) -> str:
    """Describe the tiers that blocks were read from; empty without reads."""
    counts = {name: sum(batch.tiers.get(name, 0) for batch in recent) for name in TIER_METRICS}
    places = {"memory_blocks": "memory", "disk_blocks": "local copies", "remote_blocks": "the object store"}
    read = sum(counts[name] for name in places)
    if not read:
        return ""
    shares = ", ".join(f"{counts[name] / read:.1%} from {place}" for name, place in places.items())
    return f"{read / len(recent):,.3g} a batch: {shares}; {_size(counts['copied_bytes'])} copied"


def _compactions(recent: Sequence[BatchProgress]) -> str:
    """Describe compactions, by compactors and by slots; empty without `compaction=remote`."""
    last = recent[-1].compactions
    if WAITING not in last:
        return ""
    counts = {name: sum(batch.compactions.get(name, 0) for batch in recent) for name in COMPACTION_METRICS}
    return (
        f"{last[WAITING]} waiting, {counts['remote_compactions']} by compactors ("
        f"{_size(counts['remote_compacted_bytes'])}), {counts['local_compactions']} by slots "
        f"({_time(counts['compaction_ms'] / 1000)}) in {counted(len(recent), 'batch', 'batches')}"
    )


def _requests(recent: list[BatchProgress]) -> str:
    """Describe the requests to the object store for each batch; from two batches on, their cost a day at this rate."""
    counts = [batch.requests for batch in recent]
    means = {name: sum(count.get(name, 0) for count in counts) / len(counts) for name in REQUEST_PRICES}
    per_batch = ", ".join(f"{mean:.3g} {name}" for name, mean in means.items()) + " a batch"
    span = (recent[-1].planned or 0.0) - (recent[0].planned or 0.0)
    if span <= 0.0:
        return per_batch
    # The figures of the first batch are of the time before its plan, outside of the span.
    dollars = sum(request_cost(count) for count in counts[1:]) / 1e6 / span * 86_400
    return f"{per_batch}, {dollars:,.2f} dollars a day at the list price of S3 Standard in us-east-1"


def _operators(last: BatchProgress, timed: BatchProgress | None) -> Table:
    """Return a table of the operators after the newest durable batch; rows a second are of the last timed batch."""
    table = Table(title=f"after batch {last.batch}", title_justify="left")
    table.add_column("operator")
    for name in ("rows/s", "rows", "late rows", "state rows", "in memory", "in files", "cache hits", "time"):
        table.add_column(name, justify="right")
    for index, operator in enumerate(last.operators):
        lookups = operator.cache_hits + operator.cache_misses
        rate = None if timed is None else _per_second(timed.operators[index].rows, timed.seconds)
        table.add_row(
            f"{index}: {operator.title}",
            _rate(rate),
            f"{operator.rows:,}",
            f"{operator.late_rows:,}",
            f"{operator.state_rows:,}",
            _size(operator.memory_bytes),
            _size(operator.file_bytes),
            f"{operator.cache_hits / lookups:.1%}" if lookups else "–",
            _time(operator.seconds),
        )
    return table


def _prefetching(recent: Sequence[BatchProgress]) -> Table:
    """Return a table of prefetching in the last batches; the sender of the hints is that of the newest batch."""
    table = Table(title=f"prefetching in {counted(len(recent), 'batch', 'batches')}", title_justify="left")
    table.add_column("operator")
    table.add_column("announced by")
    for name in ("read ahead", "used", "dropped hints", "longest read", "least slack"):
        table.add_column(name, justify="right")
    for index, operator in enumerate(recent[-1].operators):
        if not operator.prefetched:
            continue
        batches = [batch.operators[index].prefetched for batch in recent]
        read, used, dropped = (
            sum(metrics.get(name, 0) for metrics in batches)
            for name in ("prefetched_keys", "prefetched_used", "dropped_hints")
        )
        slack = [metrics[SLACK] for metrics in batches if SLACK in metrics]
        longest = max(metrics.get(PREFETCH, 0) for metrics in batches)
        table.add_row(
            f"{index}: {operator.title}",
            LOOKAHEADS[operator.prefetched[LOOKAHEAD]],
            f"{read:,}",
            f"{used / read:.1%}" if read else "–",
            f"{dropped:,}",
            _time(longest / 1000) if read else "–",
            _time(min(slack) / 1000) if slack else "–",
        )
    return table


def _lookups(recent: Sequence[BatchProgress]) -> Table:
    """Return a table of the requests of lookup joins in the last batches."""
    table = Table(title=f"lookups in {counted(len(recent), 'batch', 'batches')}", title_justify="left")
    table.add_column("operator")
    for name in ("requests", "keys", "announced", "failed", "longest request"):
        table.add_column(name, justify="right")
    for index, operator in enumerate(recent[-1].operators):
        if not operator.looked_up:
            continue
        batches = [batch.operators[index].looked_up for batch in recent]
        requests, *keys = (
            sum(metrics.get(name, 0) for metrics in batches)
            for name in ("fetches", "fetched_keys", "announced_keys", "failed_keys")
        )
        longest = max(metrics.get(FETCH, 0) for metrics in batches)
        cells = [f"{requests:,}", *(f"{count:,}" for count in keys), _time(longest / 1000) if requests else "–"]
        table.add_row(f"{index}: {operator.title}", *cells)
    return table


def _rates(timed: list[BatchProgress]) -> list[float]:
    """Return rows a second by batch; a batch of 0 s counts with the next one that took longer.

    Object stores may round times to whole seconds. A rate over several batches is right on average all the same.
    """
    rates: list[float] = []
    rows = 0
    for batch in timed:
        rows += batch.rows
        if batch.seconds:
            rates.append(rows / batch.seconds)
            rows = 0
    return rates


def _per_second(rows: int, seconds: float | None) -> float | None:
    return rows / seconds if seconds else None


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _size(value: int) -> str:
    return next((f"{value / unit:.1f} {name}" for name, unit in _UNITS if value >= unit), f"{value} B")


def _time(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1000:.0f} ms"
    return next((f"{seconds / unit:.1f} {name}" for name, unit in _LENGTHS if seconds >= unit), f"{seconds:.1f} s")
