"""The rows of FlowKV: eight NEXMark variants, tail latency, and the settings of the append stores."""

from benchmarks.papers.row import NOT_KNOWN, Command, Headline, Row

_ENGINES = ("millpond", "spark", "flink-rocksdb")
_PEERS = ("spark", "flink-rocksdb")
_WHOLE = "--event-rate 1m --driver-memory 1g --seconds 15 --warmup-batches 14 --warmup-seconds 120"
"""Two minutes of warm-up: before, the JVM's compiler takes up to half of two cores. Code that plans batches runs once a
batch, and is compiled late."""
_QUICK = "--rows-per-batch 200k --event-rate 200k --seconds 4 --warmup-batches 4 --warmup-seconds 0 --max-batches 12"
_CLOCK = (
    "More than half of a batch is making the events; code with a batch's time in it is compiled in every batch,"
    " on both engines."
)
_BIDS = (
    "Three quarters of a batch pass in the slots: each whole bid is written with the batch and to a segment, by"
    " compactions again, and read once."
)
_BROKEN_DOWN = ("q7", "q11-median", "q11")
"""The queries whose CPU time the paper breaks down."""


def _variant(query: str, pattern: str, theirs: str, ratio: float, memory: str, missed: str = NOT_KNOWN) -> Row:
    """Return a row of the engines, and of the events without an engine, which no engine can be faster than."""
    whole = f"nexmark --query {query} {_WHOLE} {memory}"
    headlines = [
        Headline(
            where="FlowKV §6.1, Fig. 8",
            measured=f"{query.upper()} ({pattern}): throughput over RocksDB",
            theirs=theirs,
            metric="rows_per_second",
            peers=_PEERS,
            beside=("events",),
            ratio=ratio,
            missed=missed,
        )
    ]
    if query in _BROKEN_DOWN:
        headlines.append(
            Headline(
                where="FlowKV §6.3, Fig. 10",
                measured=f"{query.upper()}: CPU time of store operations over RocksDB; here of all processes",
                theirs="less by 1.75 to 10.56 ×",
                metric="cpu_s",
                peers=_PEERS,
                ratio=1.75,
                missed="All processes count here: making, moving and decoding rows outweigh the store on both engines.",
            )
        )
    return Row(
        name=f"flowkv-{query}",
        paper="flowkv",
        title=f"{query}: windows larger than memory",
        commands=(
            Command(module="benchmarks", arguments=whole, quick=_QUICK, engines=_ENGINES),
            Command(module="benchmarks", arguments=whole, engines=("events",)),
        ),
        headlines=tuple(headlines),
    )


def _sweep(name: str, sweep: str, title: str, *headlines: Headline) -> Row:
    return Row(
        name=f"flowkv-{name}",
        paper="flowkv",
        title=title,
        lines=True,
        commands=(
            Command(
                module="benchmarks.studies.append_stores",
                arguments=f"--plot '' --sweep '{sweep}'",
                quick="--keys 1500 --active 100 --gap 100",
            ),
        ),
        headlines=headlines,
    )


_TWO, _THREE = "--slot-memory 64m --memory-limit 2g", "--slot-memory 64m --memory-limit 3g"
_OPEN = "--slot-memory 160m --memory-limit 3g"

ROWS = (
    _variant("q5", "read-modify-write, twice", "2.64 to 4.12 ×", 4.12, _THREE),
    _variant("q5-append", "read-modify-write, then append and aligned read", "2.64 to 4.12 ×", 4.12, _THREE),
    _variant("q7", "append and aligned read", "1.87 to 1.99 ×", 1.99, _THREE),
    _variant("q7-session", "append and unaligned read", "1.68 to 2.02 ×", 2.02, _OPEN, _BIDS),
    _variant("q8", "append and aligned read", "1.55 to 1.65 ×", 1.65, _TWO),
    _variant("q11", "read-modify-write", "1.89 to 2.52 ×", 2.52, _TWO),
    _variant("q11-median", "append and unaligned read", "1.68 to 2.02 ×", 2.02, _OPEN),
    _variant("q12", "read-modify-write", "1.89 to 2.52 ×", 2.52, _TWO, _CLOCK),
    Row(
        name="flowkv-latency",
        paper="flowkv",
        title="Batch times at the highest rate that Spark keeps up with",
        commands=(
            Command(
                module="benchmarks",
                arguments="nexmark --query q7,q11-median,q11 --highest-rate-of spark --warmup-seconds 40 --seconds 20",
                engines=("millpond", "spark"),
            ),
        ),
        headlines=(
            Headline(
                where="FlowKV §6.2, Fig. 9",
                measured="Q7, Q11-MEDIAN, Q11: p95 latency at given rates",
                theirs="lower than RocksDB, or the same",
                metric="batch_p95_ms",
                peers=("spark",),
                ratio=1.0,
                each=True,
            ),
        ),
    ),
    _sweep(
        "read-batch",
        "read batch ratio",
        "Append and unaligned read, by read batch ratio",
        Headline(
            where="FlowKV §6.4, Fig. 11",
            measured="predictive batch read at a ratio of 0.02 against none; here the store alone",
            theirs="2.5 × (without it, 38.3 to 39.9 %)",
            metric="rows_per_second",
            peers=("millpond",),
            place="0.02",
            peer_place="0",
            ratio=2.5,
            missed="Windows that close in one batch are read together, whether they were foreseen or not.",
        ),
        Headline(
            where="FlowKV §6.4, Fig. 11",
            measured="hit ratio of what is read ahead, at a ratio of 0.02",
            theirs="0.93",
            metric="hit_ratio",
            place="0.02",
            least=0.93,
            missed="Fewer windows are read ahead at a time than close in one batch.",
        ),
    ),
    _sweep(
        "space",
        "maximum space amplification",
        "Append and unaligned read, by maximum space amplification",
        Headline(
            where="FlowKV §6.4, Fig. 12",
            measured="throughput at a maximum space amplification of 1.5 against 3; here the store alone",
            theirs="no significant difference",
            metric="rows_per_second",
            peers=("millpond",),
            place="1.5",
            peer_place="3",
            ratio=0.9,
            missed="Each is one run, and runs differ by a tenth and more.",
        ),
    ),
)
