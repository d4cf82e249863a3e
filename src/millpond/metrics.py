"""The figures that slots report with each batch, how they travel to Spark's listeners, and what commits keep of them.

A pipe ends its output with rows that are null but for one column, `__figure`; the transplanted plan observes that
column and filters the rows out again. Packing a figure's number and value into one nullable bigint keeps the cost for
ordinary rows at one null check per figure (about 8 ns a row and figure; a struct costs twice that, a string more).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

FIGURE_COLUMN = "__figure"
_BITS = 6

SUMMED = ("input_rows", "output_rows", "late_rows", "state_rows", "state_bytes", "cache_hits", "cache_misses")
"""Figures added up over partitions: rows in and out in this batch, and dropped as late; rows and bytes of the state;
keys that were looked for and were in memory; those that were sought in files."""

LAG, COMMIT = "commit_lag_ms", "commit_ms"
FETCH = "fetch_ms"
LOOKAHEAD, PREFETCH = "lookahead", "prefetch_ms"
GREATEST = (LAG, COMMIT, FETCH, LOOKAHEAD, PREFETCH)
"""Figures of which the greatest counts: how long the batch waited for the commit of the one before; how long the slot's
last commit took, from sealed state to the durable one; how long the slowest request of a lookup join took, with its
further tries; see `AHEAD` for the others."""

SLACK = "slack_ms"
LEAST = (SLACK,)
"""Figures of which the least counts: see `AHEAD`."""

READ_AHEAD = ("read_ahead_hits", "read_ahead_misses", "fetched_rows", "taken_rows")
"""Figures added up likewise, of operators that keep rows until a session closes: lists on disk that were asked for and
had been read ahead, or had not; rows read from disk, for those that closed and ahead of time; rows on disk of lists
that were asked for. The hit ratio is hits / (hits + misses), the read amplification fetched / taken rows."""

OBSERVED = ("appending", "moved_rows", "left_rows")
"""Figures added up likewise, of operators whose store is chosen while they run: partitions whose rows are appended;
appended rows that the batch has made groups of; those that are still to become groups."""

REQUESTS = ("puts", "put_bytes", "gets", "get_bytes", "lists", "heads", "request_cost", "hedges")
"""Figures added up likewise, where the state is on an object store, of what slots have asked of it since the figures
before: objects (or parts of large ones) put, and their bytes; ranges got, and bytes; pages of lists; looks whether an
object is there; what that costs, in micro-dollars; and how many of the ranges were asked for a second time, because the
first answer took long. Operators of a slot share them: who reports first has all."""

TIERS = ("memory_blocks", "disk_blocks", "remote_blocks", "copied_bytes")
"""Figures added up and shared likewise: blocks of files, and filters of such, that were read from the cache in memory,
from local copies, and from the object store; bytes of local copies that were made of files there."""

WAITING = "waiting_compactions"
COMPACTIONS = (WAITING, "remote_compactions", "local_compactions", "remote_compacted_bytes", "compaction_ms")
"""Figures added up and shared likewise, with `spark.millpond.compaction=remote`: compactions that wait for a compactor
at the end of the batch; those that compactors have done, whose results the slots have taken; those that slots have done
themselves, as no compactor did; bytes of the files that were taken; processor time of compactions in slots."""

AHEAD = ("prefetched_keys", "prefetched_used", "dropped_hints", "hint_bytes", PREFETCH, SLACK, LOOKAHEAD)
"""Figures of operators whose keys may be announced before their rows come. Added up: keys that were not in memory and
were read ahead; how many of them the batch asked for; keys that were announced in vain, as there was no memory for them
or their batch was over; bytes of all hints that came. The greatest counts of `prefetch_ms`, how long the longest read
took, the least of `slack_ms`, how long before its first row the first hint for a batch came, if one came. `lookahead`
says who was asked to announce the keys of the batch: see `LOOKAHEADS`."""

LOOKAHEADS = ("off", "exchange", "source, exchange", "stage, exchange")
"""What the figure `lookahead` stands for; a stage is one of the user's plan (`millpond.lookahead`)."""

PROCESSORS = ("called_keys", "due_timers")
"""Figures added up likewise, of processors of the user: keys with rows that one was called for; due timers."""

LOOKUPS = ("fetches", "fetched_keys", FETCH, "announced_keys", "failed_keys")
"""Figures added up likewise, but for `FETCH`, of lookup joins: requests to a table outside of Spark; keys that they
asked for; those of the keys that were announced before their rows came; keys that could not be looked up."""

COMBINED = ("exchanged_rows", "combined_rows", "changed_rows")
"""Figures added up likewise, of operators whose rows may be combined before the exchange: rows that reached the slots,
combined or not; rows of the source that were combined; rows of the state that the batch changed."""

PRICES = {"puts": 5.0, "gets": 0.4, "lists": 5.0, "heads": 0.4}
"""Micro-dollars a request: the list price of S3 Standard in us-east-1 as of November 2026, 0.005 dollars for 1,000 PUT,
COPY, POST and LIST requests, 0.0004 for 1,000 of any other kind; deletions are free (https://aws.amazon.com/s3/pricing).
docs/guides/state-on-s3.md says so, too."""

COUNTED = ("input_rows", "output_rows", "late_rows", "cache_hits", "cache_misses")
"""Of the figures, those that count what happened in a batch: they add up over batches."""

FIGURES = (*SUMMED, LAG)
"""What every operator reports."""

REMOTE = (*REQUESTS, *TIERS, COMMIT)
"""What it reports where the state is on an object store."""

DURABLE = (
    "late_rows",
    "state_rows",
    "memory_bytes",
    "cache_hits",
    "cache_misses",
    "process_ms",
    *AHEAD,
    *LOOKUPS,
    *PRICES,
    *TIERS,
    *COMPACTIONS,
)
"""Figures that a partition's manifest keeps beside its input rows, for those who look from outside: `memory_bytes` of
the state in memory; `process_ms`, how long the operator took over the batch; what is told of hints, lookups, requests,
tiers and compactions, where there are any."""

_NUMBERED = FIGURES + READ_AHEAD + OBSERVED + REMOTE + COMPACTIONS + PROCESSORS + AHEAD + LOOKUPS + COMBINED
_SCALES = {"request_cost": 10}
"""Of figures that are no whole numbers, what makes them so."""


def observation(operator: int) -> str:
    """Under which name Spark's `observedMetrics` have an operator's figures."""
    return f"millpond-{operator}" if operator else "millpond"


def together(name: str) -> Callable[[Iterable[int]], int]:
    """How the partitions' values of a figure become the operator's."""
    return max if name in GREATEST else min if name in LEAST else sum


def pack(metrics: Mapping[str, float]) -> list[int]:
    """The `__figure` values of one partition's figures; unknown ones are left out."""
    return [
        round(metrics[name] * _SCALES.get(name, 1)) << _BITS | number
        for number, name in enumerate(_NUMBERED)
        if name in metrics
    ]


def unpacking(name: str) -> str:
    """SQL that gives one figure from the column of its partitions' values."""
    mine = f"{FIGURE_COLUMN} & {(1 << _BITS) - 1} = {_NUMBERED.index(name)}"
    value = f"if({mine}, shiftright({FIGURE_COLUMN}, {_BITS}), null)"
    total = f"{together(name).__name__}({value})"
    return f"{total} / {_SCALES[name]}" if name in _SCALES else total


def request_cost(figures: Mapping[str, float]) -> float:
    """What the requests among some figures cost, in micro-dollars."""
    return sum(price * figures.get(name, 0.0) for name, price in PRICES.items())
