"""The rows of MiSA: batch times, throughput, slope, trigger and usage of Linear Road and Cluster Monitoring."""

from benchmarks.papers.row import NOT_KNOWN, Command, Headline, Row

HIGHEST = "highest rate kept up with"
"""The place of the highest of the measured rates that Spark as shipped keeps up with."""
_MODULE = "benchmarks.misa"
_SHIPPED = ("spark-shipped",)
_OTHERS = ("spark-best", "spark-deadline", "millpond-sync")
_PAPER_RATE, _ALL = "1,500/s", "all"
_RANGES = "--warmup 20"
"""Batches of 3 s until the longest range of a query, a minute, is full."""
_SHORT_RANGES = "--warmup 12"
"""The same for LR2 and LR4, whose ranges are half a minute at most."""
_WARMUP = {"LR4": 50, "CM1": 50}
"""Batches until the JVM's compiler is idle. Other queries have fewer, because Spark takes half a minute for a batch."""
_USAGE = (
    Headline(
        where="MiSA §5.5, Fig. 15",
        measured="LR2: what a batch waits for commits, p99: Spark for its own, Millpond for that of the batch"
        " before (at least 1 ms); Millpond reports no time of reads of state (Fig. 15b)",
        theirs="constant, where Spark's time of checkpoints rises",
        metric="commit_p99_ms",
        peers=_SHIPPED,
        place=_PAPER_RATE,
        ratio=1.0,
    ),
    Headline(
        where="MiSA §5.6, Table 4",
        measured="LR2: CPU; here cores in use",
        theirs="0.70 to 0.90 × (MiSA uses more than the baseline)",
        metric="cores",
        peers=_SHIPPED,
        place=_PAPER_RATE,
        ratio=0.7,
        missed="Python workers and slots run beside the JVM.",
    ),
    Headline(
        where="MiSA §5.6, Table 4",
        measured="LR2: memory of all processes",
        theirs="2.5 to 3.5 × less",
        metric="memory_mb",
        peers=_SHIPPED,
        place=_PAPER_RATE,
        ratio=2.5,
        missed="Python workers and slots run beside a JVM whose heap is the same for both engines.",
    ),
)
"""Headlines on LR2's waits for commits, CPU and memory, at the paper's rate."""

_ANY_SIZE = (
    "Most of a batch is what a batch of any size takes, its planning, tasks and logs: a hundredth of the records takes"
    " Millpond more than half as long.",
    "What a batch of any size takes, its planning, tasks and logs, is alike on both engines: Millpond does without the"
    " commit alone.",
)
_TIMES_MISSED = {
    "LR4": _ANY_SIZE,
    "CM1": _ANY_SIZE,
    "CM2": (
        "Most of a batch is what a batch of any size takes: a tenth of the records takes Millpond four fifths as long.",
        _ANY_SIZE[1],
    ),
}
"""Reasons for longer batches than the paper's, where they are known: for the p99, and for the paper's rate."""


def _query(query: str, p99: float, p99_theirs: str, throughput: float, throughput_theirs: str) -> Row:
    p99_missed, throughput_missed = _TIMES_MISSED.get(query, (NOT_KNOWN, NOT_KNOWN))
    return Row(
        name=f"misa-{query.lower()}",
        paper="misa",
        title=f"{query}: batch times by records a second",
        commands=(
            Command(
                module=_MODULE,
                arguments=f"--query {query} --s3 --rates 15000,1500,2500,150000 --trigger 3 --batches 100 {_RANGES}",
                quick="--rates 1500 --batches 10 --warmup 5" if query == "LR2" else None,
                engines=(*_SHIPPED, "millpond"),
            ),
            Command(
                module=_MODULE,
                arguments=f"--query {query} --s3 --rates 1500 --trigger 3 --batches 100 {_RANGES}",
                engines=_OTHERS,
                place=_PAPER_RATE,
            ),
        ),
        headlines=(
            Headline(
                where="MiSA §5.3, Fig. 11, 12",
                measured=f"{query}: p99 of batch times, at the highest of four rates that Spark as shipped keeps"
                " up with",
                theirs=p99_theirs,
                metric="batch_p99_ms",
                peers=_SHIPPED,
                place=HIGHEST,
                ratio=p99,
                missed=p99_missed,
            ),
            Headline(
                where="MiSA §5.3, Fig. 13",
                measured=f"{query}: rows of a batch by its time, on average, at 1,500 records a second",
                theirs=throughput_theirs,
                metric="batch_rows_per_second",
                peers=_SHIPPED,
                beside=_OTHERS,
                place=_PAPER_RATE,
                ratio=throughput,
                missed=throughput_missed,
            ),
            *(_USAGE if query == "LR2" else ()),
        ),
    )


def _most(query: str, ratio: float, theirs: str, missed: str) -> Row:
    warmup = _WARMUP.get(query, 5)
    return Row(
        name=f"misa-{query.lower()}-most",
        paper="misa",
        title=f"{query}: as many records a second as an engine takes",
        commands=(
            Command(
                module=_MODULE,
                arguments=f"--query {query} --s3 --rates 0 --batches 10 --warmup {warmup}",
                engines=(*_SHIPPED, "spark-best", "millpond"),
                place=_ALL,
            ),
        ),
        headlines=(
            Headline(
                where="MiSA §5.3, Fig. 13",
                measured=f"{query}: rows a second, here as many as an engine takes",
                theirs=theirs,
                metric="rows_per_second",
                peers=_SHIPPED,
                beside=("spark-best",),
                place=_ALL,
                ratio=ratio,
                missed=missed,
            ),
        ),
    )


def _slope(query: str, missed: str) -> Row:
    return Row(
        name=f"misa-{query.lower()}-slope",
        paper="misa",
        title=f"{query}: batch times over a thousand batches, 1,500 records a second",
        commands=(
            Command(
                module=_MODULE,
                arguments=f"--query {query} --s3 --rates 1500 --trigger 1 --batches 1000 --warmup 60",
                engines=(*_SHIPPED, "millpond"),
                place=_PAPER_RATE,
            ),
        ),
        headlines=(
            Headline(
                where="MiSA §5.2, Fig. 9, 10",
                measured=f"{query}: growth of batch times over the run: slope of the line through them × batches"
                " ÷ median",
                theirs="stable, where Spark's rise",
                metric="growth",
                beside=_SHIPPED,
                place=_PAPER_RATE,
                most=10.0,
                missed=missed,
            ),
        ),
    )


_TRIGGERS = Row(
    name="misa-triggers",
    paper="misa",
    title="Latency and throughput by trigger, 1,500 records a second",
    commands=tuple(
        Command(
            module=_MODULE,
            arguments=f"--query LR2,LR4 --s3 --rates 1500 --trigger {trigger} --batches 25 {_SHORT_RANGES}",
            engines=(*_SHIPPED, "spark-deadline", "millpond"),
            place=f"{trigger} s",
        )
        for trigger in (3, 4, 5)
    ),
    headlines=tuple(
        Headline(
            where="MiSA §5.4, Fig. 14",
            measured=f"LR2, LR4 with triggers of 3, 4 and 5 s: {figure}",
            theirs=f"the {best} at each trigger",
            metric=metric,
            peers=(*_SHIPPED, "spark-deadline"),
            ratio=1.0,
            each=True,
            missed=f"On LR2, Millpond is the best at each trigger ({gains} ×). A batch of LR4 takes 0.4 to 0.9 s, by "
            "engine and trigger. Half of it is reading records and writing Spark's logs, and the best engine changes "
            "with the trigger.",
        )
        for metric, figure, best, gains in (
            ("batch_mean_ms", "average batch time", "lowest", "1.2 to 2.3"),
            ("batch_rows_per_second", "rows by batch time", "highest", "1.5 to 2.6"),
        )
    ),
)

_QUERIES = (
    ("LR2", 2.6, "2.6 × (9,729 against 3,694 ms)", 1.5, "1.47 ×"),
    ("LR4", 4.9, "up to 4.9 × (than the worst engine)", 4.9, "4.87 ×"),
    ("CM1", 13.4, "13.4 × zStream (5,908 against 439 ms)", 10.4, "10.4 × zStream, 7.6 × the baseline"),
    ("CM2", 5.0, "no figure in the text; asked for as throughput, 5 ×", 5.1, "5.1 ×"),
)
_GROWS = {"CM1": "In complete mode every batch gives all windows so far, on both engines."}
"""Reasons for growing batch times, where they are known."""
_READING = "Half of a batch is reading records and writing Spark's logs to the server, alike on both engines."
_MISSED = {"LR4": _READING, "CM1": _READING}
"""Reasons why an engine takes no more records, where they are known."""

ROWS = (
    *(_query(*query) for query in _QUERIES),
    *(_most(query, ratio, theirs, _MISSED.get(query, NOT_KNOWN)) for query, _, _, ratio, theirs in _QUERIES),
    *(_slope(query, _GROWS.get(query, NOT_KNOWN)) for query, *_ in _QUERIES),
    _TRIGGERS,
)
