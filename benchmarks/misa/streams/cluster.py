"""TaskEvents: a cluster's tasks that are submitted, scheduled and end, in the schema of Google's cluster traces."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from benchmarks.misa.streams.records import TIME, Calendar, Rows, timestamps

SUBMIT, SCHEDULE, EVICT, FAIL, FINISH, KILL = range(6)
"""Types of events; an evicted task is submitted again, the others of the last four end it."""
CATEGORIES, PRIORITIES, USERS, MACHINES = 4, 12, 500, 12_500
"""Scheduling classes, priorities, users and machines of the cluster."""
JOB_TASKS = 10
"""Mean number of tasks in a job."""
RUN_SECONDS, LONGEST = 30.0, 300
"""How long a task runs, on average and at most."""
_ENDINGS = ((EVICT, FAIL, FINISH, KILL), (0.1, 0.2, 0.5, 0.2))
_UNIT = 1024
"""Requested resources are multiples of 1/1024, so that sums are exact in any order."""

SCHEMA = pa.schema(
    [
        ("timestamp", TIME),
        ("jobId", pa.int64()),
        ("taskId", pa.int64()),
        ("machineId", pa.int64()),
        ("eventType", pa.int32()),
        ("userId", pa.int32()),
        ("category", pa.int32()),
        ("priority", pa.int32()),
        ("cpu", pa.float64()),
        ("ram", pa.float64()),
        ("disk", pa.float64()),
    ]
)
_TASK = np.dtype([(field.name, field.type.to_pandas_dtype()) for field in list(SCHEMA)[1:]])
"""A task with the type of its next event."""


class TaskEvents:
    """Events of tasks, as many a second as asked for: those that are due, then new tasks."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 2])
        self._calendar = Calendar(_TASK, LONGEST + 1)
        self._jobs = self._tasks = 0

    def second(self, number: int, count: int) -> pa.Table:
        """Make the events of a second."""
        due = self._calendar.take(number, count)
        rows = self._rng.permutation(np.concatenate([due, self._submit(count - len(due))]))
        columns = [timestamps(number, count), *(pa.array(rows[name]) for name in SCHEMA.names[1:])]
        table = pa.Table.from_arrays(columns, schema=SCHEMA)
        self._follow(rows[rows["eventType"] <= EVICT], number)
        return table

    def _submit(self, count: int) -> Rows:
        rows, rng = np.zeros(count, _TASK), self._rng
        first = rng.random(count) < 1 / JOB_TASKS
        job = np.cumsum(first)
        jobs = count and int(job[-1]) + 1
        rows["jobId"] = self._jobs + job
        rows["taskId"] = self._tasks + np.arange(count)
        rows["machineId"] = -1
        for name, different in (("userId", USERS), ("category", CATEGORIES), ("priority", PRIORITIES)):
            rows[name] = rng.integers(0, different, jobs)[job]
        for name in ("cpu", "ram", "disk"):
            of_job = 1 + rng.gamma(2.0, 16.0, jobs)[job]
            rows[name] = np.clip(np.rint(of_job * rng.uniform(0.9, 1.1, count)), 1, _UNIT) / _UNIT
        self._jobs += jobs
        self._tasks += count
        return rows

    def _follow(self, rows: Rows, second: int) -> None:
        """Make the next events of tasks due: after its submission a task is scheduled, and after that it ends."""
        count, rng = len(rows), self._rng
        submitted, running = rows["eventType"] == SUBMIT, rows["eventType"] == SCHEDULE
        following = rows.copy()
        following["eventType"] = np.select(
            [submitted, running], [SCHEDULE, rng.choice(_ENDINGS[0], count, p=_ENDINGS[1])], SUBMIT
        )
        following["machineId"] = np.where(submitted, rng.integers(0, MACHINES, count), rows["machineId"])
        runs = np.minimum(LONGEST, 1 + rng.exponential(RUN_SECONDS, count)).astype(np.int64)
        waits = np.select([submitted, running], [rng.integers(1, 6, count), runs], 1)
        self._calendar.put(following, second + waits)
