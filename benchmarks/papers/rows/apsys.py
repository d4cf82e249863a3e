"""The row of APSys '18."""

from benchmarks.papers.row import Command, Headline, Row

ROWS = (
    Row(
        name="apsys-read-write",
        paper="apsys",
        title="ReadWrite: count and 100 bytes of padding for each of ten million keys",
        commands=(
            Command(
                module="benchmarks",
                arguments="read_write --keys 10m --preload --rows-per-batch 1m --seconds 60",
                quick="--keys 1m --rows-per-batch 250k --seconds 6 --warmup-batches 5",
                engines=("millpond", "spark", "flink-rocksdb"),
            ),
        ),
        headlines=(
            Headline(
                where="APSys '18 §3.3, Fig. 2",
                measured="ReadWrite, 10 M keys, 100 bytes of padding: throughput over RocksDB",
                theirs="2.16 to 3.42 ×",
                metric="rows_per_second",
                peers=("spark", "flink-rocksdb"),
                ratio=3.42,
            ),
        ),
    ),
)
