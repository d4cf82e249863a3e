"""Fake engine for tests of the demo: known times and rows, and a detached child.

If the plan names no end, it runs six batches and hangs in the seventh, where the demo kills it.

`python demo_engine.py [WRONG] PLAN.json PARENT`: batch WRONG of Millpond has a row that differs from Spark's. If WRONG
is `fail`, Millpond's process fails in its second batch.
"""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

MS = {"spark": 400.0, "millpond": 32.0}
ROWS, BEFORE_KILL = 5, 6

plan = msgspec.json.decode(Path(sys.argv[-2]).read_bytes())
wrong = sys.argv[1] if plan["engine"] == "millpond" and len(sys.argv) > 3 else ""
folder = Path(plan["folder"])
figures_path = folder / "figures.jsonl"
done = len(figures_path.read_bytes().splitlines()) if figures_path.exists() else 0
about = {"versions": "Spark 4.3 · Java 17", "explained": "[millpond 0] <aggregate>"}
(folder / "about.json").write_bytes(msgspec.json.encode(about))
# As slots do, it leaves the session of its parent; the test recognizes it by its name.
child = subprocess.Popen(["sleep", "600"], start_new_session=True, cwd=folder)
while not plan["batches"] or done < plan["batches"]:
    start = time.time()
    time.sleep(600 if done == BEFORE_KILL and not plan["batches"] else 0.02)
    if wrong == "fail" and done == 1:
        child.kill()
        sys.exit("the engine failed on purpose")
    counts = [(row + 1 if wrong == str(done) and row == 3 else row) for row in range(ROWS)]
    rows = folder / "rows" / f"batch={done:06d}"
    rows.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"user": list(range(ROWS)), "clicks": counts}), rows / "part.parquet")
    figures = {
        "batch": done,
        "start": start,
        "ms": MS[plan["engine"]],
        "rows": plan["rows_per_batch"],
        "commit_wait_ms": 3.0,
    }
    with figures_path.open("ab") as out:
        out.write(msgspec.json.encode(figures) + b"\n")
    done += 1
child.kill()
