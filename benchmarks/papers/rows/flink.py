"""The rows of Flink 2.0: checkpoints, recovery, costs, CPU, caches and asynchronous state."""

from benchmarks.papers.row import Command, Headline, Row

_STATE = "benchmarks.studies.disaggregated"
_ENGINES = ("millpond", "spark")
_LOCAL, _NONE = "local", "store, no copies"
_QUARTER, _WAITED = "store, ¼ copied", "store, no copies, commits waited for"
_SIZES = {"1m": "1,000,000 keys", "4m": "4,000,000 keys", "16m": "16,000,000 keys"}


def _restart(where: str, measured: str, theirs: float, place: str) -> Headline:
    return Headline(
        where=where,
        measured=measured,
        theirs=f"{theirs:g} × faster than Flink 1.20",
        metric="recovery_s",
        peers=("spark",),
        place=place,
        ratio=theirs,
        missed="The state is a hundred times smaller than the paper's 290 GB, so that there is less to leave behind.",
    )


def _processor(workload: str, engine: str, share: str, disk: str) -> Command:
    return Command(
        module="benchmarks",
        arguments=f"{workload} --rows-per-batch 10000 --slot-memory 32m --store-latency 1.5 --seconds 40"
        f" --set spark.millpond.cache.disk={disk}",
        engines=("millpond",),
        engine=engine,
        place=f"{share} copied",
    )


_CHECKPOINTS = Row(
    name="flink-checkpoints",
    paper="flink",
    title="Checkpoint durations by size of the state",
    commands=(
        Command(
            module=_STATE,
            arguments=f"checkpoints --keys {','.join(_SIZES)} --rows-per-batch 200k --seconds 60",
            quick="--keys 400k --rows-per-batch 100k --seconds 5",
            engines=_ENGINES,
        ),
        *(
            Command(
                module="benchmarks",
                arguments=f"rmw --keys {keys} --preload --rows-per-batch 200k --seconds 60",
                engines=("flink-rocksdb", "flink-forst"),
                place=place,
            )
            for keys, place in _SIZES.items()
        ),
    ),
    headlines=(
        Headline(
            where="Flink 2.0 §6.1, Fig. 9",
            measured="longest of 300 checkpoints of the logistics job, 290 GB of state",
            theirs="3 s at any size",
            metric="checkpoint_max_ms",
            peers=("spark", "flink-rocksdb"),
            beside=("flink-forst",),
            most=3_000.0,
        ),
        Headline(
            where="Flink 2.0 §6.1, Fig. 9",
            measured="duration of checkpoints against Flink 1.20",
            theirs="94 % shorter (16.7 ×)",
            metric="checkpoint_p99_ms",
            peers=("spark", "flink-rocksdb"),
            beside=("flink-forst",),
            ratio=16.7,
            missed="Spark's changelogs make its checkpoints short, too, which Flink 1.20 does not have.",
        ),
    ),
)

_RECOVERY = Row(
    name="flink-recovery",
    paper="flink",
    title="What state adds to a restart, local disk lost",
    commands=(
        Command(
            module=_STATE,
            arguments="recoveries --keys 10m --rows-per-batch 1m --seconds 15",
            quick="--partitions 2:2 --keys 400k --rows-per-batch 200k --seconds 2",
            engines=_ENGINES,
        ),
    ),
    headlines=(
        _restart("Flink 2.0 §6.1, Fig. 10", "recovery on another cluster", 16.0, "2 → 2"),
        _restart("Flink 2.0 §6.1, Fig. 10", "scale-out to twice the parallelism", 49.0, "2 → 4"),
        _restart("Flink 2.0 §6.1, Fig. 10", "scale-in to half the parallelism", 12.0, "4 → 2"),
    ),
)

_UNITS = Row(
    name="flink-units",
    paper="flink",
    title="What a million rows cost: CPU and memory of all processes",
    commands=(
        Command(
            module="benchmarks",
            arguments="rmw --keys 10m --preload --rows-per-batch 200k --driver-memory 2g --seconds 60",
            quick="--keys 500k --rows-per-batch 100k --seconds 5 --warmup-batches 5",
            engines=("millpond", "spark", "flink-rocksdb", "flink-forst"),
        ),
    ),
    headlines=(
        Headline(
            where="Flink 2.0 §6.1, Table 2",
            measured="compute units (a core and 4 GB) for the logistics job; here CU seconds for a million rows",
            theirs="8 in place of 16 (2 ×)",
            metric="compute_unit_s",
            peers=("spark", "flink-rocksdb"),
            beside=("flink-forst",),
            ratio=2.0,
        ),
        Headline(
            where="Flink 2.0 §6.1, Table 2",
            measured="of these, CPU seconds for a million rows",
            theirs="Flink 1.20 uses 9 % more",
            metric="cpu_s",
            peers=("spark", "flink-rocksdb"),
            beside=("flink-forst",),
            ratio=1.09,
        ),
        Headline(
            where="Flink 2.0 §6.1, Table 2",
            measured="of these, GB-seconds for a million rows",
            theirs="half the units (2 ×)",
            metric="memory_gb_s",
            peers=("spark", "flink-rocksdb"),
            beside=("flink-forst",),
            ratio=2.0,
        ),
    ),
)

_CPU = Row(
    name="flink-cpu",
    paper="flink",
    title="Compaction elsewhere: how even the use of CPU is",
    commands=(
        Command(
            module=_STATE,
            arguments="cpu --keys 10m --rows-per-batch 200k --seconds 120",
        ),
    ),
    headlines=(
        Headline(
            where="Flink 2.0 §6.1, Fig. 11",
            measured="CPU of the task managers over an hour, with compaction in them and in processes of its own",
            theirs="smoother, without peaks at checkpoints",
            metric="cores_deviation",
            ours="by a compactor",
            peers=("compaction in slots",),
            ratio=1.0,
            missed="The compactor shares the cores with the query here; it is for machines of its own.",
        ),
    ),
)

_CACHES = Row(
    name="flink-caches",
    paper="flink",
    title="NEXMark with state on a store, by what is copied to the local disk",
    commands=(
        Command(
            module=_STATE,
            arguments="caches --query q7,q9,q18,q19,q20 --rows-per-batch 200k --seconds 30",
            quick="--query q18 --rows-per-batch 50k --seconds 4",
        ),
    ),
    headlines=(
        Headline(
            where="Flink 2.0 §6.2, Fig. 12",
            measured="NEXMark with a local cache smaller than the state, against all state on the local disk",
            theirs="4 % faster (1.04 ×)",
            metric="rows_per_second",
            ours=_QUARTER,
            peers=(_LOCAL,),
            ratio=1.04,
            missed="The store shares the query's two cores, so that each read costs CPU twice.",
        ),
        Headline(
            where="Flink 2.0 §6.2, Fig. 12",
            measured="NEXMark without any local cache, against all state on the local disk",
            theirs="48 % slower (0.52 ×)",
            metric="rows_per_second",
            ours=_NONE,
            peers=(_LOCAL,),
            ratio=0.52,
            missed="The store shares the query's two cores, so that each read costs CPU twice.",
        ),
        Headline(
            where="Flink 2.0 §6.2, Fig. 13",
            measured="the five queries with the most I/O, asynchronous against synchronous access to state; here"
            " asynchronous against synchronous commits",
            theirs="about 2 ×",
            metric="rows_per_second",
            ours=_NONE,
            peers=(_WAITED,),
            ratio=2.0,
            missed="A batch reads many keys at a time even where it waits for its commit, so there is less to overlap.",
        ),
        Headline(
            where="Flink 2.0 §6.2, Fig. 13",
            measured="the same with a local cache against none, both asynchronous",
            theirs="up to 3.7 ×",
            metric="rows_per_second",
            ours=_QUARTER,
            peers=(_NONE,),
            ratio=3.7,
            missed="Reads of what is not copied are made side by side, so that a copy saves less.",
        ),
    ),
)

_ASYNC = Row(
    name="flink-async",
    paper="flink",
    title="A processor that awaits its state, by the share of the state that is copied",
    commands=tuple(
        _processor(workload, engine, share, disk)
        for share, disk in (("a tenth", "50m"), ("half", "250m"))
        for workload, engine in (("processor_map", "millpond, synchronous"), ("processor_map_async", "millpond"))
    ),
    headlines=(
        Headline(
            where="Flink 2.0 §6.2, Fig. 13",
            measured="a processor that reads state of many keys at once, against one key after the other",
            theirs="about 2 ×",
            metric="rows_per_second",
            peers=("millpond, synchronous",),
            ratio=2.0,
        ),
    ),
)

ROWS = (_CHECKPOINTS, _RECOVERY, _UNITS, _CPU, _CACHES, _ASYNC)
