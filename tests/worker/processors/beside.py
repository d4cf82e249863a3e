"""A processor, its pipe and its operator in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from millpond.operators.processors.calls import Changes, FetchState, Phase
from millpond.operators.protocol import Times
from millpond.slot.process.messages import Call
from millpond.tasks.user_processor import UserProcessor
from millpond.worker.processors.start import start_processor
from tests.operators.rig import Rig, record_batch
from tests.stores.shelf import Shelf


class Beside:
    """Runs a processor, or a function over groups, beside its operator.

    Args:
        user: it. budget, store: of the operator (see `Rig`).
    """

    def __init__(self, user: UserProcessor, budget: int = 64 << 20, store: Shelf | None = None) -> None:
        self.user = user
        self.rig = Rig(user.spec, budget=budget, store=store)

    def run(
        self, rows: list[dict[str, Any]], now: int = 0, bits: int = 64, initial: list[dict[str, Any]] | None = None
    ) -> None:
        """Run a batch; hashes of its keys have `bits` bits."""
        asks: list[FetchState] = []
        running = start_processor(self.user, lambda table, asked: asks[0](table, asked))

        def caller(
            phase: Phase,
            times: tuple[int, int],
            tables: Mapping[str, pa.RecordBatch],
            take: Callable[[pa.RecordBatch], None],
            answer: FetchState,
        ) -> Changes:
            asked: list[pa.RecordBatch] = []

            def ask(table: str, which: pa.RecordBatch) -> pa.Array:
                asked.append(which)
                return answer(table, which)

            asks[:] = [ask]
            for shown in running.call(Call(phase, *times, list(tables)), tables):
                take(shown)
                self.shown(shown)
            before = len(asked)
            changed = running.changes()
            asks[:] = [_over]
            self.called(phase, tables, (before, len(asked) - before), changed)
            return changed

        operator: Any = self.rig.operator
        operator.caller = caller
        if initial:
            operator.initial_rows = iter([record_batch(self.user.spec, initial, ["k"], bits)])
        self.rig.batch(record_batch(self.user.spec, rows, ["k"], bits), times=Times(0, 0, now))

    def shown(self, rows: pa.RecordBatch) -> None:
        """Take the output of a call."""

    def called(
        self, phase: Phase, tables: Mapping[str, pa.RecordBatch], asked: tuple[int, int], changed: Changes
    ) -> None:
        """A call is over: what it was given, how often it asked for more, in the user's code and behind it, and what it
        has changed.
        """


def _over(table: str, asked: pa.RecordBatch) -> pa.Array:
    raise AssertionError("the call is over")
