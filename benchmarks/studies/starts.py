"""Starts that never fail: `python -m benchmarks.studies.starts --starts 2000 --applications 3 --busy 2`.

Several applications at once start and stop real queries over and over, two queries each at a time. Other processes keep
the cores busy. Most stops fall into the middle of a batch or of a start's first moments. After some starts an
application ends, in an orderly way or by SIGKILL, and another one goes on with its checkpoints. At the end every row of
every batch is compared with the row that follows from the input. The study prints how many starts failed, and why.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import millpond
from benchmarks.measuring.arguments import count

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS = ("aggregate", "deduplicate")
"""The queries of an application; each has a checkpoint of its own."""

_KEYS = 50
_ROWS = 100
_TIMEOUT = 300.0
"""A start and stop that takes longer than this number of seconds counts as failed."""

_FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Spark's default starts two or three processes for each file that a batch writes."""

_BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10_000_000): pass
"""


class Query:
    """One query of an application. Its input, its checkpoint and its output rows are below one folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.source = folder / "in"
        self.output = folder / "output.jsonl"
        self.source.mkdir(parents=True, exist_ok=True)

    def add(self) -> None:
        """Add a file of input, which becomes a batch of its own."""
        number = len(list(self.source.glob("*.json")))
        drawn = random.Random(number)
        rows = [{"k": drawn.randrange(_KEYS * (1 + number // 10)), "v": drawn.randrange(100)} for _ in range(_ROWS)]
        staged = self.folder / "staged"
        staged.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(staged, (1_700_000_000 + number,) * 2)
        staged.rename(self.source / f"{number:06d}.json")

    def start_and_stop(self, spark: SparkSession, how: str, pause: float) -> str | None:
        """Start and stop the query; return the error, or None.

        Args:
            how: `end` stops after all input, `batch` in the first batch, `moment` after `pause` seconds.
        """
        from pyspark.sql import functions as f

        entered = threading.Event()

        def keep(batch: DataFrame, number: int) -> None:
            entered.set()
            rows = sorted(tuple(row) for row in batch.collect())
            with self.output.open("a") as file:
                file.write(json.dumps([number, self._last_file(number), rows]) + "\n")

        rows = spark.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1).json(str(self.source))
        if self.kind == "aggregate":
            frame, mode = rows.groupBy("k").agg(f.count("*"), f.sum("v")), "update"
        else:
            frame, mode = rows.select("k").dropDuplicates(["k"]), "append"
        writer = millpond.writeStream(frame).outputMode(mode).foreachBatch(keep)
        try:
            query = writer.option("checkpointLocation", str(self.folder / "checkpoint")).start()
            try:
                if how == "end":
                    self._finish(query)
                elif how == "batch":
                    while query.isActive and not entered.wait(0.1):
                        pass
                else:
                    time.sleep(pause)
            finally:
                failure = query.exception()
                query.stop()
                failure = failure or query.exception()
            return None if failure is None else str(failure)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _last_file(self, batch: int) -> int:
        """Return the number of a batch's last file. A batch has two files if a start stopped before planning one."""
        entry = (self.folder / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()
        return int(json.loads(entry[2])["logOffset"])

    def _finish(self, query: Any) -> None:
        """Wait until all input is processed. `processAllAvailable` would wait for ever if the query died."""
        last_file = len(list(self.source.glob("*.json"))) - 1
        while query.isActive and not self._committed(last_file):
            time.sleep(0.05)

    def _committed(self, file: int) -> bool:
        names = (path.name for path in (self.folder / "checkpoint" / "commits").glob("*"))
        newest = max((int(name) for name in names if name.isdigit()), default=None)
        return newest is not None and self._last_file(newest) >= file

    def wrong(self) -> str | None:
        """Return a description of an error in the output rows, or None."""
        batches: dict[int, tuple[int, list[list[int]]]] = {}
        for line in self.output.read_text().splitlines():
            number, last, rows = json.loads(line)
            if batches.setdefault(number, (last, rows)) != (last, rows):
                return f"{self.folder}: batch {number} has other rows when it is repeated"
        files = sorted(self.source.glob("*.json"))
        if sorted(batches) != list(range(len(batches))) or batches[len(batches) - 1][0] != len(files) - 1:
            return f"{self.folder}: {len(files)} files, but the batches are {sorted(batches)}"
        images: dict[int, list[int]] = {}
        before = -1
        for number, (last, output) in sorted(batches.items()):
            touched = {}
            lines = [line for file in files[before + 1 : last + 1] for line in file.read_text().splitlines()]
            before = last
            for row in map(json.loads, lines):
                known = images.get(row["k"])
                if self.kind == "deduplicate" and known is not None:
                    continue
                _, row_count, total = known or (0, 0, 0)
                images[row["k"]] = [row["k"], row_count + 1, total + row["v"]]
                touched[row["k"]] = images[row["k"]] if self.kind == "aggregate" else [row["k"]]
            if output != sorted(touched.values()):
                return f"{self.folder}: batch {number} has other rows than follow from the input"
        return None


def be_application(folder: Path, starts: int, seed: int) -> None:
    """Start and stop this application's queries; write a JSON line to the standard output for each start."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "512m")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.checkpointFileManagerClass", _FILE_MANAGER)
        .config("spark.millpond.slot.memory", "64m")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    logging.getLogger("millpond").setLevel(logging.ERROR)
    drawn = random.Random(seed)

    def cycle(kind: str, plan: list[tuple[str, float]]) -> None:
        query = Query(kind, folder / kind)
        for how, pause in plan:
            query.add()
            begun = time.monotonic()
            error = query.start_and_stop(spark, how, pause)
            line = json.dumps([error, time.monotonic() - begun, how]) + "\n"
            os.write(sys.stdout.fileno(), line.encode())  # in one piece: the other query's thread writes, too

    plans = [
        [(drawn.choice(("end", "batch", "batch", "moment")), drawn.uniform(0.0, 1.5)) for _ in range(starts // 2)]
        for _ in KINDS
    ]
    with ThreadPoolExecutor(len(KINDS)) as pool:
        list(pool.map(cycle, KINDS, plans))
    if drawn.random() < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    spark.stop()


class Tally:
    """Counts the results of all starts so far."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.errors: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._lock = threading.Lock()

    def add(self, error: str | None, seconds: float, how: str) -> None:
        """Add the result of a start."""
        with self._lock:
            self.seconds.append(seconds)
            if error is not None:
                self.errors[error[:2000]] += 1
                print(f"FAILED ({how}) after {seconds:.1f} s: {error}", flush=True)
            if len(self.seconds) % 50 == 0:
                print(self.line(), flush=True)

    def line(self) -> str:
        """Return the results so far in one line."""
        ordered = sorted(self.seconds) or [0.0]
        middle, late = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
        return (
            f"{time.strftime('%H:%M:%S')} {len(self.seconds)} of {self.planned} starts, {sum(self.errors.values())} "
            f"failed; start to stop: median {middle:.1f} s, p99 {late:.1f} s, longest {ordered[-1]:.1f} s"
        )


def drive(number: int, folder: Path, starts: int, life: int, tally: Tally) -> None:
    """Run one application after another on the same checkpoints, until all starts are done."""
    done = 0
    while done < starts:
        planned = min(life, starts - done + (starts - done) % 2)
        application = [str(folder), str(planned), str(number * 1000 + done)]
        command = [sys.executable, "-m", "benchmarks.studies.starts", "--be", *application]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL)
        watch = threading.Timer(planned * _TIMEOUT, process.kill)
        watch.start()
        reported = 0
        assert process.stdout is not None
        for line in process.stdout:
            tally.add(*json.loads(line))
            reported += 1
        process.wait()
        watch.cancel()
        for _ in range(planned - reported):
            tally.add(f"the application ended with status {process.returncode}; {folder}/log", 0.0, "lost")
        done += planned


def main(arguments: Sequence[str] | None = None) -> int:
    """Start and stop queries, and check their rows. Return 1 if a start failed or a row is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.starts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--starts", type=count, default=2000, metavar="N", help="starts of queries in all")
    parser.add_argument("--applications", type=count, default=3, metavar="N", help="at a time")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="processes that keep the cores busy")
    parser.add_argument("--life", type=count, default=60, metavar="N", help="starts after which an application ends")
    parser.add_argument("--be", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.be is not None:
        be_application(Path(options.be[0]), int(options.be[1]), int(options.be[2]))
        return 0
    work = Path(tempfile.mkdtemp(prefix="millpond-starts-"))
    tally = Tally(options.starts)
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())]) for _ in range(options.busy)]
    try:
        folders = [work / str(number) for number in range(options.applications)]
        for folder in folders:
            folder.mkdir()
        shares = [options.starts // options.applications + 1] * options.applications
        with ThreadPoolExecutor(options.applications) as pool:
            driven = partial(drive, life=options.life, tally=tally)
            list(pool.map(driven, range(options.applications), folders, shares))
        wrong = check(folders)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(tally.line())
    for error, times in tally.errors.most_common():
        print(f"{times} x {error}")
    for text in wrong:
        print(f"WRONG ROWS: {text}")
    if not tally.errors and not wrong:
        print("no start failed, all rows are right")
        shutil.rmtree(work, ignore_errors=True)
        return 0
    print(f"see {work}")
    return 1


def check(folders: Sequence[Path]) -> list[str]:
    """Run every query to the end of its input, and return descriptions of errors in its rows."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false").getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    queries = [Query(kind, folder / kind) for folder in folders for kind in KINDS if (folder / kind).exists()]
    ends: list[Any] = [query.start_and_stop(spark, "end", 0.0) for query in queries]
    spark.stop()
    return [text for text in [*ends, *(query.wrong() for query in queries)] if text is not None]


if __name__ == "__main__":
    sys.exit(main())
