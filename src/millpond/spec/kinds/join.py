"""A join of two streams by equal keys, with an optional time range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import msgspec

from millpond.humanize import duration
from millpond.spec.functions import INPUT_TYPE, unsupported_value
from millpond.spec.operators import Field
from millpond.spec.protocol import AccessPattern, KindFacts, Spec
from millpond.spec.traits import Trait, columns_trait

FROM_TIME = -(1 << 16)
"""Place of a side's column that is its event time (see `JoinSide.places`)."""


class JoinSide(msgspec.Struct, frozen=True):
    """One input of a join.

    Attributes:
        columns: the side's columns in the output.
        places: where each output column is stored: value number *n* ≥ 0, key −1 − *n*, or the time (`FROM_TIME`).
        values: the stored columns besides the key and the time.
        keeps: whether rows without a match are emitted, with nulls for the other side (outer joins).
        late: the input column that defines lateness: `time`, `late` (a column of its own) or `none`.
        expiry_ms: the watermark of the side's state minus the input's (mostly negative); None: state is kept for ever.
        expiry_cap_ms: an upper bound of the watermark of the side's state, if there is one.
        filtered: whether the input's column `__able` says which rows may have a match at all.
    """

    columns: tuple[Field, ...]
    places: tuple[int, ...]
    values: tuple[Field, ...]
    keeps: bool = False
    late: str = "none"
    expiry_ms: int | None = None
    expiry_cap_ms: int | None = None
    filtered: bool = False

    def name_of(self, place: int) -> str | None:
        """Return the query's name for the column stored at `place`; None if the query does not show it."""
        return next(
            (field.name for field, stored in zip(self.columns, self.places, strict=True) if stored == place), None
        )

    def traits(self, name: str) -> Iterator[tuple[str, Trait]]:
        """Yield the traits of this side; `name` is `left` or `right`."""
        shown = ", ".join(f"{field.name}@{place}" for field, place in zip(self.columns, self.places, strict=True))
        kept = ", ".join(field.type for field in self.values)
        columns = columns_trait(f"shows the {name} columns", self.columns)
        yield f"{name} columns", columns
        if self.values or self.places:
            yield (
                f"{name} values",
                Trait(
                    f"keeps {len(self.values)} {name} columns beside the keys",
                    f"keeps {name} columns of the types ({kept})" + f" for ({shown})",
                ),
            )
        yield f"{name} outer", Trait(f"{'shows' if self.keeps else 'does not show'} {name} rows without a partner")
        late = {"time": "their event time", "late": "another column than their event time"}.get(self.late)
        yield f"{name} late", Trait(f"drops {name} rows that are late by {late}" if late else f"takes late {name} rows")
        yield f"{name} expiry", Trait(f"keeps {name} rows {_until(self.expiry_ms)}")
        yield f"{name} cap", Trait(f"keeps {name} rows, at most, {_until(self.expiry_cap_ms)}")
        yield (
            f"{name} filter",
            Trait(f"{'has' if self.filtered else 'has no'} conditions on {name} rows alone, beside what it joins by"),
        )


def _until(milliseconds: int | None) -> str:
    return "for ever" if milliseconds is None else f"until the watermark is {duration(-milliseconds * 1000)} past them"


class JoinSpec(Spec, frozen=True, tag="join"):
    """A join of two streams by equal keys, with an optional time range and further conditions.

    The slot stage's input is the union of both sides, with these columns:

    - `__right`: the row's side.
    - `__time`: microseconds since the epoch.
    - `__late`: the same, if a side defines lateness by another column.
    - `__able`: if a side is filtered.
    - The keys, the values of the left side (null in right rows), the values of the right side.

    Attributes:
        kind: inner | left_outer | right_outer | full_outer | left_semi.
        keys: the key columns, of the same types on both sides.
        null_safe: for each key, whether null equals null.
        left, right: the sides.
        earliest, latest: inclusive bounds of the left time minus the right time, in microseconds.
        condition: the further condition of a pair: `["<", a, b]` (`=`, `<=>`, `<`, `<=`, `>`, `>=`), `["and", …]`,
            `["or", …]`, `["not", a]`; operands `["left", n]` and `["right", n]` are stored values.
        right_first: for left_semi, whether new right rows are joined with stored left rows before new left rows arrive
            (since Spark 4.2). Left rows of a batch then miss a right row that expires in this batch.
        lag_ms: lag of the operator's watermark behind the query's.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=False, supports_complete=False, beyond_spark=False, reads_updates_as_rows=False
    )

    kind: str
    keys: tuple[Field, ...]
    null_safe: tuple[bool, ...]
    left: JoinSide
    right: JoinSide
    earliest: int | None = None
    latest: int | None = None
    condition: list[Any] | None = None
    right_first: bool = False
    lag_ms: int = 0

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The join's keys, kind and conditions, and the state of both sides."""
        names = []
        for number, key in enumerate(self.keys):
            pair = (self.left.name_of(-1 - number), self.right.name_of(-1 - number))
            operator = "<=>" if self.null_safe[number] else "="
            names.append(f" {operator} ".join(name or f"a {key.type}" for name in pair))
        types = ", ".join(key.type for key in self.keys)
        return {
            "kind": Trait(f"has a join of the kind {self.kind.replace('_', ' ')}"),
            "keys": Trait(f"joins by ({', '.join(names)})", f"joins by ({', '.join(names)}), of the types ({types})"),
            "range": Trait(f"joins rows {_range(self.earliest, self.latest)}"),
            "condition": Trait(f"has {self._condition(self.condition)} as its further condition"),
            **dict(self.left.traits("left")),
            **dict(self.right.traits("right")),
        }

    @property
    def compatibility_spec(self) -> Self:
        """The spec without the order of sides, which depends on the version of Spark; the state is the same."""
        return msgspec.structs.replace(self, right_first=False)

    def _condition(self, condition: Any) -> str:
        if not isinstance(condition, list) or not condition:
            return "nothing" if condition is None else repr(condition)
        head, *rest = condition
        if head in ("left", "right") and len(rest) == 1:
            side = self.left if head == "left" else self.right
            return f"{head}.{side.name_of(rest[0]) or f'value {rest[0]}'}"
        parts = [self._condition(part) for part in rest]
        if len(parts) == 1:
            return f"{head} ({parts[0]})"
        return "(" + f" {head} ".join(parts) + ")"

    @property
    def expires(self) -> bool:
        """Whether the watermark expires rows of the state."""
        return any(side.expiry_ms is not None for side in (self.left, self.right))

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns."""
        return self.keys

    @property
    def ranged(self) -> bool:
        """Whether the time range can exclude pairs."""
        return self.earliest is not None or self.latest is not None

    @property
    def hint_columns(self) -> tuple[int, ...]:
        """The row's side, and its time if there is a time range: they limit the rows it may match."""
        return (0, 1) if self.ranged else (0,)

    @property
    def header(self) -> tuple[Field, ...]:
        """The input columns before the keys."""
        sides = (self.left, self.right)
        header = [Field("__right", "boolean"), Field("__time", "bigint")]
        if any(side.late == "late" for side in sides):
            header.append(Field("__late", "bigint"))
        if any(side.filtered for side in sides):
            header.append(Field("__able", "boolean"))
        return tuple(header)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""
        return self.header + self.keys + self.left.values + self.right.values

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""
        return self.left.columns + (() if self.kind == "left_semi" else self.right.columns)

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The stored rows of both sides: side, whether matched, time, keys and values."""
        own = (Field("side", "string"), Field("matched", "boolean"), Field("time", "timestamp"))
        return own + self.keys + self.left.values + self.right.values

    @property
    def lag(self) -> int | None:
        """Lag of the operator's watermark behind the query's, in ms; None if it uses no watermark."""
        # Late rows are dropped by the watermark even where the state never expires.
        timed = self.expires or any(side.late != "none" for side in (self.left, self.right))
        return self.lag_ms if timed else None

    def with_lag(self, lag_ms: int) -> Self:
        """Return the spec for a watermark that lags `lag_ms` behind the query's."""
        return msgspec.structs.replace(self, lag_ms=lag_ms)

    @property
    def needs_no_data_batches(self) -> bool:
        """Whether the watermark expires rows of the state."""
        return self.expires

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        why = "rows of both sides are kept by key and event time, and read by intervals of time"
        return AccessPattern("ordered", why + ("; they expire with the watermark" if self.expires else ""))

    @property
    def unsupported_values(self) -> str | None:
        """The reason code why rows of a side cannot be stored; None if they can."""
        values = self.left.values + self.right.values
        return INPUT_TYPE if any(unsupported_value(field.type) for field in values) else None


def _range(earliest: int | None, latest: int | None) -> str:
    """Describe the range of the left time relative to the right time."""
    if earliest is None and latest is None:
        return "of any times"
    least = "any time" if earliest is None else duration(earliest)
    most = "any time" if latest is None else duration(latest)
    return f"whose left time is from {least} to {most} after the right one"
