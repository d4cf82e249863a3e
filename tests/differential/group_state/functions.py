"""Functions over groups as users write them. Spark's workers import this module: it needs no pytest and no session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.differential.processors.processors import KNOWN, START_MS, outcome, seconds, shown, text

SAID = "k string, n int, said string"


class Script:
    """Evaluate the expressions that rows bring (`do`, in the order of `n`), and report their results.

    Expressions name `state`, `key`, `row`, and times in seconds from the start: `until` sets a timeout of event time,
    `watermark()` is the watermark. `due` is evaluated for keys that time out.
    """

    def __init__(self, due: str = "state.getOption", *, strict: bool = False) -> None:
        self.due = due
        self.strict = strict

    def __call__(self, key: Any, frames: Any, state: Any) -> Iterator[Any]:
        import pandas as pd

        scope = {
            **KNOWN,
            "state": state,
            "key": key,
            "until": lambda second: state.setTimeoutTimestamp(START_MS + int(second * 1000)),
            "watermark": lambda: seconds(state.getCurrentWatermarkMs()),
        }
        tell = (lambda run: shown(run())) if self.strict else outcome
        if state.hasTimedOut:
            (frame,) = frames
            said = tell(lambda: eval(self.due, scope))
            rows = [(text(key), -1, f"{list(frame.columns)}, {len(frame)}: {said}")]
        else:
            data = sorted((row for frame in frames for row in frame.itertuples(index=False)), key=lambda row: row.n)
            rows = [
                (text(key), row.n, tell(lambda row=row: eval(row.do, {**scope, "row": row})))  # type: ignore[misc]
                for row in data
            ]
        yield pd.DataFrame(rows, columns=["k", "n", "said"])


def count(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """How many rows there were, and what the key is."""
    import pandas as pd

    total = state.getOption[0] if state.exists else 0
    now = sum(map(len, frames))
    state.update((total + now,))
    yield pd.DataFrame({"said": [shown(key)], "total": [total + now], "now": [now]})


COUNTED = "said string, total bigint, now int"


def types(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """Describe the frames of a call: how large, and the types of columns and values."""
    import pandas as pd

    for frame in frames:
        kinds = ", ".join(f"{name} {kind}" for name, kind in frame.dtypes.items())
        values = ", ".join("|".join(sorted({type(one).__name__ for one in frame[name]})) for name in frame)
        frame.loc[:, frame.columns[0]] = None  # the rows of others are not touched by that
        told = ", ".join(f"{type(one).__name__} {one}" for one in key)
        said = f"{kinds}; {values}; {frame.index}, {frame.columns.dtype}"
        yield pd.DataFrame({"k": [told], "n": [len(frame)], "said": [said]})
