"""The rows of Keyed Prefetching: latencies of rows by query, by skew, memory, threshold and change, and throughput."""

from benchmarks.papers.row import Command, Headline, Row

_MODULE = "benchmarks.prefetch"
_KEYED, _POLICIES = "prefetching", ("lru", "clock")
_BOTH = "LRU, Clock and asynchronous I/O"
_READ = "A batch reads the keys that it misses side by side, so that hints have a few milliseconds to save."
_BUSY = "At this rate two cores are nearly busy, and hints take more time than the reads that they save."
_MAKING = "Half of a batch is making and parsing the events; hints take more time than the reads that they save."
_CORES = {
    "q18": ("68.4 % against 42.2 %", 1.62),
    "q19": ("69.8 % against 46.3 %", 1.51),
    "q20": ("61.7 % against 29.3 %", 2.11),
}
_HINTS = {"q18": 1.8, "q19": 2.4, "q20": 2.7}
_TIMES = "--seconds 40 --warmup 60"
"""A minute of warm-up: before, the JVM is so slow that events queue up, which later batches make up for."""
_WHOLE = f"{_TIMES} --variants memory,prefetching,lru,clock"
_REGIME = "--query q18 --rate 6000 --interval 0.2 --stage 150 --latency 23"
_SLOW_WORK = "Q18 behind slow work, small batches, 23 ms a request"
_Q18 = f"--query q18 --rate 10k {_WHOLE}"
_QUICK = "--loaded 500k --rate 6000 --seconds 6 --warmup 4 --variants prefetching,lru"
_PERCENTILES = (("row_p50_ms", "p50"), ("row_p99_ms", "p99"), ("row_p999_ms", "p99.9"))


def _latencies(
    subject: str, ours: str, peers: tuple[str, ...], beside: tuple[str, ...], missed: str = _READ
) -> tuple[Headline, ...]:
    """Return a headline for each percentile of row latency."""
    return tuple(
        Headline(
            where="Keyed Prefetching §VI-A, Fig. 6",
            measured=f"{subject}: {name} of row latency",
            theirs="the same as asynchronous I/O, or lower" if name == "p50" else f"lower than {_BOTH}",
            metric=metric,
            ours=ours,
            peers=peers,
            beside=beside,
            ratio=0.97 if name == "p50" else 1.0,
            missed=missed,
        )
        for metric, name in _PERCENTILES
    )


def _query(query: str, rate: str) -> Row:
    used, ratio = _CORES[query]
    return Row(
        name=f"prefetch-{query}",
        paper="prefetch",
        title=f"{query}: row latency, a batch a second, 1.5 ms a request",
        commands=(
            Command(
                module=_MODULE,
                arguments=f"latencies --query {query} --rate {rate} --latency 1.5 {_WHOLE}",
                quick=_QUICK,
            ),
        ),
        headlines=(
            *_latencies(query.upper(), _KEYED, _POLICIES, ("memory",)),
            Headline(
                where="Keyed Prefetching §VI-C, Table I",
                measured=f"{query.upper()}: time that threads are busy or wait; here cores in use",
                theirs=f"{used} ({ratio:g} ×)",
                metric="cores",
                ours=_KEYED,
                peers=_POLICIES,
                ratio=ratio,
                missed="Flink's metric counts a thread that waits for a read as busy; a core that waits is not in use.",
            ),
            Headline(
                where="Keyed Prefetching §VI-C, Table II",
                measured=f"{query.upper()}: network traffic of hints",
                theirs=f"{_HINTS[query]:g} %",
                metric="hint_share",
                ours=_KEYED,
                most=_HINTS[query],
                missed="A hint takes 8 bytes and a bid 180 here, and more than half of the bids need one.",
            ),
        ),
    )


def _lookup(name: str, query: str, rate: str, timed: str, missed: str) -> Row:
    """Return a row of four runs: all keys in the cache; a tenth of them, with hints and without; pipelines by hand.

    Args:
        timed: arguments for the time to measure, and for the batches to leave out.
    """
    whole = f"--query {query} --rate {rate} --ads 1000000 --delay-ms 1 {timed}"
    quick = "--rate 20000 --ads 100000 --seconds 20 --warmup 3"
    variants = (
        ("memory", "millpond", "--cache 2000000 --ttl -1 --hints off", None),
        (_KEYED, "millpond", "--cache 100000 --hints on", f"{quick} --cache 10000"),
        ("lru", "millpond", "--cache 100000 --hints off", f"{quick} --cache 10000"),
        ("pipelines", "pipelines", "", quick),
    )
    return Row(
        name=f"prefetch-{name}",
        paper="prefetch",
        title=f"{name}: rows looked up in Redis behind 1 ms, row latency",
        commands=tuple(
            Command(
                module="benchmarks.studies.enrichment",
                arguments=f"{whole} {options}".strip(),
                quick=quick_options,
                engines=(engine,),
                engine=variant,
                place=name,
            )
            for variant, engine, options, quick_options in variants
        ),
        headlines=_latencies(name.upper(), _KEYED, ("lru", "pipelines"), ("memory",), missed),
    )


def _figure(figure: str, title: str, headline: Headline, *more: Command, lines: bool = False) -> Row:
    """Return a row of one figure of `benchmarks.prefetch`, which no quick run has."""
    command = Command(module=_MODULE, arguments=f"{figure} {_Q18}")
    return Row(
        name=f"prefetch-{figure}",
        paper="prefetch",
        title=title,
        commands=(command, *more),
        headlines=(headline,),
        lines=lines,
    )


_BASELINES = Command(module=_MODULE, arguments=f"latencies {_Q18} --variants lru,clock", place="any")

ROWS = (
    _lookup("q13", "q13", "200000", "--seconds 60 --warmup 10", _BUSY),
    _query("q18", "10k"),
    _query("q19", "3000"),
    _query("q20", "6000"),
    _lookup("ysb", "ysb", "40000", "--seconds 90 --warmup 30", _MAKING),
    Row(
        name="prefetch-regime",
        paper="prefetch",
        title="q18 behind a stage of 150 ms: row latency, batches as often as they end, 23 ms a request",
        commands=(
            Command(
                module=_MODULE,
                arguments=f"latencies {_REGIME} {_WHOLE}",
            ),
        ),
        headlines=_latencies(_SLOW_WORK, _KEYED, _POLICIES, ("memory",)),
    ),
    Row(
        name="prefetch-auto",
        paper="prefetch",
        title="q18 behind a stage of 150 ms: row latency by spark.millpond.prefetch",
        commands=(Command(module=_MODULE, arguments=f"latencies {_REGIME} {_TIMES} --variants auto,timestamp"),),
        headlines=(
            Headline(
                where="Keyed Prefetching §VI-A, Fig. 6",
                measured=f"{_SLOW_WORK}: p99 of row latency, prefetch=auto against off",
                theirs=f"lower than {_BOTH}; asked for is a fifth",
                metric="row_p99_ms",
                ours="auto",
                peers=("timestamp",),
                ratio=1.2,
                missed="Files come every half second, and how batches meet them moves a row's latency by as much as all"
                " reads take, which hints hide.",
            ),
        ),
    ),
    _figure(
        "skews",
        "q18: p99.9 of row latency by the share of bids for the hot auction",
        Headline(
            where="Keyed Prefetching §VI-B, Fig. 7",
            measured="Q13 with more and less skew, here Q18: p99.9 of row latency",
            theirs=f"lower than {_BOTH} at each skew",
            metric="row_p999_ms",
            ours=_KEYED,
            peers=_POLICIES,
            ratio=1.0,
            each=True,
            missed="Hints gain without skew, where most keys are missing. With nearly all bids on one auction few are,"
            " and runs differ by more than reads take.",
        ),
        lines=True,
    ),
    _figure(
        "caches",
        "q18: p99.9 of row latency by memory",
        Headline(
            where="Keyed Prefetching §VI-B, Fig. 8",
            measured="Q13 and Q20 by size of the cache, here Q18: p99.9 of row latency",
            theirs=f"lower than {_BOTH} at each size",
            metric="row_p999_ms",
            ours=_KEYED,
            peers=_POLICIES,
            ratio=1.0,
            each=True,
            missed="Hints gain where memory is smallest, at 24 MB. With more of it fewer keys are missing, and runs"
            " differ by more than reads take.",
        ),
        lines=True,
    ),
    _figure(
        "thresholds",
        "q18: p99.9 of row latency by the count from which a key has no hints",
        Headline(
            where="Keyed Prefetching §VI-C, Fig. 9",
            measured="Q13 by the threshold of hot keys, here Q18: p99.9 of row latency at the default of 8",
            theirs=f"lower than {_BOTH} at each threshold",
            metric="row_p999_ms",
            ours=_KEYED,
            peers=_POLICIES,
            place="8",
            peer_place="any",
            ratio=1.0,
            each=True,
            missed="Thresholds of 1 to 64 give 1,427 to 1,753 ms in no order: runs differ by more than hints save.",
        ),
        _BASELINES,
        lines=True,
    ),
    _figure(
        "changes",
        "q18: batches where in mid-run many more auctions are bid on",
        Headline(
            where="Keyed Prefetching §VI-C, Fig. 10",
            measured="keys change in mid-run; here p99 of batch times",
            theirs="misses stay few",
            metric="batch_p99_ms",
            ours=_KEYED,
            peers=_POLICIES,
            ratio=1.0,
            missed="The median is that of LRU, 347 and 348 ms. Of 40 batches, p99 is the slowest, here one of 617 ms.",
        ),
    ),
    _figure(
        "highest",
        "Highest rate that is kept up with",
        Headline(
            where="Keyed Prefetching §VI-D, Fig. 11",
            measured="Q18, Q19, Q20, here Q18: highest rate that is kept up with",
            theirs=f"higher than {_BOTH}",
            metric="rows_per_second",
            ours=_KEYED,
            peers=_POLICIES,
            beside=("memory",),
            ratio=1.0,
            missed="Where a batch begins as soon as the one before has ended, there is no time to read ahead in.",
        ),
    ),
)
