"""Programs of operations on a processor's state: what runs them, and a plain model of what each has to tell.

An operation is a list: the variable or `timers`, what is done, and with what. Rows bring lists of operations; when a
timer is due, those of the program's `due` are done, where `"at"` stands for its time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

Operation = list[Any]
Told = tuple[Any, ...]
COLUMNS = "n bigint, k string, f double, t timestamp, do string"
SHOWN = "n bigint, said string"


class Programs(StatefulProcessor):
    """Carry out the operations of rows, and report their results.

    Args:
        lives: milliseconds that each variable lives: `v`, `l` and `m`. due: what is done when a timer is due.
        timed: whether there are timers. pandas: whether it sees frames.
    """

    def __init__(self, lives: Sequence[int], due: list[Operation], *, timed: bool, pandas: bool) -> None:
        self.lives, self.at_due, self.timed, self.pandas = lives, due, timed, pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        v, m = (
            handle.getValueState("v", "n int, s string", self.lives[0]),
            handle.getMapState("m", "n int", "x bigint", self.lives[2]),
        )
        items = handle.getListState("l", "n int", self.lives[1])
        self.calls: dict[tuple[str, str], Callable[..., Any]] = {
            ("v", "get"): v.get,
            ("v", "exists"): v.exists,
            ("v", "update"): lambda n, s: v.update((n, s)),
            ("v", "clear"): v.clear,
            ("l", "get"): lambda: [n for (n,) in items.get()],
            ("l", "exists"): items.exists,
            ("l", "append"): lambda n: items.appendValue((n,)),
            ("l", "extend"): lambda some: items.appendList([(n,) for n in some]),
            ("l", "put"): lambda some: items.put([(n,) for n in some]),
            ("l", "clear"): items.clear,
            ("m", "get"): lambda n: (found := m.getValue((n,))) and found.x,
            ("m", "contains"): lambda n: m.containsKey((n,)),
            ("m", "update"): lambda n, x: m.updateValue((n,), (x,)),
            ("m", "remove"): lambda n: m.removeKey((n,)),
            ("m", "items"): lambda: [(n, x) for (n,), (x,) in m.iterator()],
            ("m", "keys"): lambda: [n for (n,) in m.keys()],  # noqa: SIM118 -- a state variable is no dict
            ("m", "values"): lambda: [x for (x,) in m.values()],
            ("m", "exists"): m.exists,
            ("m", "clear"): m.clear,
            ("timers", "register"): handle.registerTimer,
            ("timers", "delete"): handle.deleteTimer,
            ("timers", "list"): lambda: sorted(handle.listTimers()),
        }

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        each = (row for frame in rows for row in frame.itertuples(index=False)) if self.pandas else rows
        return self.given((int(row.n), self.told(json.loads(row.do))) for row in each)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        return self.given((number, self.told(made(self.at_due, at))) for number in [-1])

    def told(self, operations: list[Operation]) -> str:
        return repr([self.calls[name, what](*given) for name, what, *given in operations])

    def given(self, answers: Iterable[Told]) -> Iterator[Any]:
        if not self.pandas:
            return (Row(n=n, said=said) for n, said in answers)
        import pandas as pd

        return (pd.DataFrame([answer], columns=["n", "said"]) for answer in answers)


def made(operations: list[Operation], at: int) -> list[Operation]:
    """Operations at a time; what is not a number there is reckoned from it."""
    return [
        [name, what, *(at + int(one[2:]) if _timed(one) else one for one in given)] for name, what, *given in operations
    ]


def _timed(given: Any) -> bool:
    return isinstance(given, str) and given.startswith("at")


def binary(n: int | None) -> bytes:
    """A map's key of one whole number as Spark orders it: whether it is null, then its bytes from the lowest."""
    word = b"\0" * 8 if n is None else n.to_bytes(4, "little", signed=True)
    return (n is None).to_bytes(8, "little") + word


@dataclass
class Kept:
    """The model's state of one key; with each part the time when it expires."""

    v: tuple[Any, float] | None = None
    l: list[tuple[Any, float]] = field(default_factory=list)  # noqa: E741
    m: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    timers: set[int] = field(default_factory=set)

    def live(self, now: float) -> Kept:
        """The parts that have not expired."""
        value = self.v if self.v is not None and self.v[1] > now else None
        entries = {key: one for key, one in self.m.items() if one[1] > now}
        return Kept(value, [one for one in self.l if one[1] > now], entries, set(self.timers))

    def do(self, name: str, what: str, given: Sequence[Any], until: Sequence[float]) -> Any:
        """Do one operation; `until`: when what is written into `v`, `l`, `m` now expires."""
        return getattr(self, f"_{name}_{what}")(
            *given, *{"v": until[:1], "l": until[1:2], "m": until[2:]}.get(name, ())
        )

    def _v_get(self, _: float) -> Any:
        return None if self.v is None else self.v[0]

    def _v_exists(self, _: float) -> bool:
        return self.v is not None

    def _v_update(self, n: Any, s: Any, until: float) -> None:
        self.v = ((n, s), until)

    def _v_clear(self, _: float) -> None:
        self.v = None

    def _l_get(self, _: float) -> list[Any]:
        return [n for n, _ in self.l]

    def _l_exists(self, _: float) -> bool:
        return bool(self.l)

    def _l_append(self, n: Any, until: float) -> None:
        self.l.append((n, until))

    def _l_extend(self, some: list[Any], until: float) -> None:
        self.l += [(n, until) for n in some]

    def _l_put(self, some: list[Any], until: float) -> None:
        self.l = [(n, until) for n in some]

    def _l_clear(self, _: float) -> None:
        self.l = []

    def _m_get(self, n: Any, _: float) -> Any:
        return self.m[n][0] if n in self.m else None

    def _m_contains(self, n: Any, _: float) -> bool:
        return n in self.m

    def _m_update(self, n: Any, x: Any, until: float) -> None:
        self.m[n] = (x, until)

    def _m_remove(self, n: Any, _: float) -> None:
        self.m.pop(n, None)

    def _m_items(self, _: float) -> list[Any]:
        return [(n, self.m[n][0]) for n in sorted(self.m, key=binary)]

    def _m_keys(self, _: float) -> list[Any]:
        return sorted(self.m, key=binary)

    def _m_values(self, _: float) -> list[Any]:
        return [x for _, x in self._m_items(0)]

    def _m_exists(self, _: float) -> bool:
        return bool(self.m)

    def _m_clear(self, _: float) -> None:
        self.m = {}

    def _timers_register(self, at: int) -> None:
        self.timers.add(at)

    def _timers_delete(self, at: int) -> None:
        self.timers.discard(at)

    def _timers_list(self) -> list[int]:
        return sorted(self.timers)


class Model:
    """All keys: what each batch has to tell, and what is left."""

    def __init__(self) -> None:
        self.kept: dict[Any, Kept] = {}

    def batch(
        self,
        rows: Sequence[tuple[Any, int, list[Operation]]],
        due: list[Operation],
        lives: Sequence[int],
        now: int,
        limit: int | None,
    ) -> dict[Any, list[Told]]:
        """Return the reports of each key, in order.

        Args:
            rows: key, number, operations. due: what is done when a timer is due.
            lives: milliseconds that variables live. now: the batch's time, by which they expire.
            limit: up to when timers are due; None if there are none.
        """
        until = [now + each if each else float("inf") for each in lives]
        kept = {key: one.live(now) for key, one in self.kept.items()}
        told: dict[Any, list[Told]] = {}

        def run(key: Any, number: int, operations: list[Operation]) -> None:
            mine = kept.setdefault(key, Kept())
            said = [mine.do(name, what, given, until) for name, what, *given in operations]
            told.setdefault(key, []).append((number, repr(said)))

        for key, number, operations in rows:
            run(key, number, operations)
        if limit is not None:
            fired = {key: sorted(at for at in one.timers if at <= limit) for key, one in kept.items()}
            for key, times in fired.items():
                for at in times:
                    run(key, -1, made(due, at))
                    kept[key].timers.discard(at)
        self.kept = kept
        return told

    def of(self, name: str) -> dict[Any, Any]:
        """Values of a variable, or timers, by key: only of keys that have some."""
        plain: dict[str, Callable[[Kept], Any]] = {
            "v": lambda one: one.v and one.v[0],
            "l": lambda one: [n for n, _ in one.l],
            "m": lambda one: one._m_items(0),
            "timers": lambda one: sorted(one.timers),
        }
        return {key: has for key, one in self.kept.items() if (has := plain[name](one))}
