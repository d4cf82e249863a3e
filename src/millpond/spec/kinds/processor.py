"""A user's own stateful processing of the rows of each key (`transformWithState`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self
from urllib.parse import quote

import msgspec

from millpond.errors import UsageError
from millpond.metrics import PROCESSORS
from millpond.spec.calls import ONCE
from millpond.spec.functions import INPUT_TYPE
from millpond.spec.operators import EventTime, Field
from millpond.spec.protocol import AccessPattern, Spec
from millpond.spec.traits import Trait, columns_trait
from millpond.spec.types import DataType, has_twins, parse_type

TIMERS = "timers"
"""The name of the table of timers: for each key, the times at which they are due, in order."""

VARIABLE = "variable."
"""What the names of variables' tables begin with, so that a variable may be called as it likes."""

PARTS = "parts."
"""What the names of the tables begin with that hold parts of variables (see `Variable.parts`)."""

HEAD = "struct<first:bigint,stop:bigint,entries:bigint,bytes:bigint,expiry:bigint>"
"""What is known, as DDL, of the parts that a key has beside its row: their numbers, from `first` to before `stop`; how
many entries of a map are in them, and how many bytes, roughly; and when the last element or entry of them expires."""

TimeMode = Literal["none", "processing", "event"]


class Variable(msgspec.Struct, frozen=True):
    """A state variable.

    Attributes:
        name: the user's.
        kind: whether a key has one value, a list of them, or a map.
        value: the type of a value, of an element, or of a map's value: a struct, as DDL.
        key: the type of a map's keys: a struct, as DDL.
        ttl_ms: how long after it was written a value, an element or an entry lives; 0 for ever.
        idle: whether the processor does not ask for it any more: it is kept, for a processor that will.
        evolves: whether the type of values may change between runs (`spec.types.evolves`), by the names of fields.
        earlier: the types that values have had before, oldest first.
    """

    name: str
    kind: Literal["value", "list", "map"]
    value: str
    key: str = ""
    ttl_ms: int = 0
    idle: bool = False
    evolves: bool = False
    earlier: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        """The name of the table that holds it, of plain letters."""
        return VARIABLE + quote(self.name, safe="")

    @property
    def parts(self) -> str:
        """The name of the table that holds, in numbered parts of the type `stored`, what a key has much of.

        Of lists, the elements before those in the key's row; of maps, all entries, by a hash of their keys. None of
        values.
        """
        return "" if self.kind == "value" else PARTS + quote(self.name, safe="")

    @property
    def description(self) -> str:
        """The variable in words."""
        key = f"{self.key} → " if self.key else ""
        evolves = ", whose type may change" if self.evolves else ""
        return (
            f"{self.name}: a {self.kind} of {key}{self.value}{', with a time to live' if self.ttl_ms else ''}{evolves}"
        )

    @property
    def stored(self) -> str:
        """The type of what a key has in the table, as DDL: never null, and never empty unless there are parts beside.

        With a time to live, `expiry` says when each part expires, in milliseconds. Maps are in the order of their keys.
        """
        return self._of(f"versions<{','.join((*self.earlier, self.value))}>" if self.evolves else self.value)

    @property
    def shown(self) -> str:
        """The same as a user reads it."""
        return self._of(self.value)

    def _of(self, value: str) -> str:
        if self.kind == "map":
            expiry = ",expiry:bigint" if self.ttl_ms else ""
            return f"array<struct<key:{self.key},value:{value}{expiry}>>"
        one = f"struct<value:{value},expiry:bigint>" if self.ttl_ms else value
        return f"array<{one}>" if self.kind == "list" else one


class InitialState(msgspec.Struct, frozen=True):
    """What a query's first batch begins with.

    Attributes:
        columns: of its rows. keys: positions of those that make up the key, of the same types as the input's.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]


class ProcessorSpec(Spec, frozen=True, tag="processor"):
    """A user's processor, called beside the pipe with the rows and the state of each key that a batch has rows of.

    Attributes:
        columns: of the input. keys: positions of those that make up the key.
        outputs: of the rows that it gives out.
        variables: what it keeps for each key.
        time_mode: what its timers and times to live go by.
        output_mode: `append`, `update` or `complete`.
        time: the column whose event time says which rows are late; only in time mode `event`.
        marked: whether there is a watermark.
        lag_ms: how far the watermark that reaches the operator lags behind the query's.
        purged: names of variables of earlier runs that are to be deleted. Those that are asked for as well begin anew
            in each batch, as in Spark, where each of them begins with `init`.
        emitted: position among the outputs of the event time of rows, by which operators above close; none if there is
            none. No row may be late there.
        initial: what the first batch begins with; none if with nothing.
        full: names of variables whose values have fields that are never null.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    outputs: tuple[Field, ...]
    variables: tuple[Variable, ...]
    time_mode: TimeMode
    output_mode: str
    time: EventTime | None = None
    marked: bool = False
    lag_ms: int = 0
    purged: tuple[str, ...] = ()
    emitted: int | None = None
    initial: InitialState | None = None
    full: tuple[str, ...] = ()

    @property
    def traits(self) -> Mapping[str, Trait]:
        """What it groups by, its variables and its modes."""
        return {
            "keys": columns_trait("groups by", self.key_fields),
            "variables": Trait(f"has the state variables ({', '.join(one.description for one in self.variables)})"),
            "times": Trait(f"has {self.time_mode} time" if self.timed else "has no times"),
            "mode": Trait(f"runs in output mode {self.output_mode}"),
        }

    def keeping(self, before: Spec) -> Self:
        """The same, with the variables of an earlier run that it does not ask for, in the order of their names.

        Raises:
            UsageError: the types of values may change, and have fields that are never null, as in Spark.
        """
        left_out = {*self.purged, *(one.name for one in self.variables)}
        earlier = before.variables if isinstance(before, ProcessorSpec) else ()
        idle = (msgspec.structs.replace(one, idle=True) for one in earlier if one.name not in left_out)
        known = {one.name: one for one in earlier}
        evolves = earlier[0].evolves if earlier else any(one.evolves for one in self.variables)  # as it was at first
        if evolves and self.full:
            raise UsageError(
                "[TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE] The query began with spark.sql.streaming.stateStore."
                f"encodingFormat=avro, so all fields of the state variable {self.full[0]!r} must be nullable.",
                action="Leave NOT NULL out.",
            )
        own = (_followed(known.get(one.name), msgspec.structs.replace(one, evolves=evolves)) for one in self.variables)
        variables = sorted([*own, *idle], key=lambda one: one.name)
        return msgspec.structs.replace(self, variables=tuple(variables))

    @property
    def lasting(self) -> Self:
        """Its key, its modes, and of its variables what they are made of, and whether they have a time to live.

        What else it sees, and what it gives out, is its own affair, as in Spark.
        """
        variables = (msgspec.structs.replace(one, ttl_ms=min(one.ttl_ms, 1), idle=False) for one in self.variables)
        return type(self)(
            columns=self.key_fields,
            keys=tuple(range(len(self.keys))),
            outputs=(),
            variables=tuple(sorted(variables, key=lambda one: one.name)),
            time_mode=self.time_mode,
            output_mode=self.output_mode,
        )

    @property
    def timed(self) -> bool:
        """Whether it may have timers."""
        return self.time_mode != "none"

    @property
    def tables(self) -> Mapping[str, tuple[str, bool]]:
        """By table, the type of what a key has there, as DDL, and whether parts of that are due at times."""
        timers = {TIMERS: ("array<bigint>", True)} if self.timed else {}
        return {one.table: (one.stored, one.ttl_ms > 0) for one in self.variables} | timers

    @property
    def varies(self) -> bool:
        """Yes: variables come and go, and names are the user's."""
        return True

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The columns that make up the key."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The columns of the input, after `__hash`."""
        return self.columns

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The columns of the output."""
        return self.outputs

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key; what a table has beside it, `shown` says."""
        return self.key_fields

    @property
    def parts(self) -> Mapping[str, str]:
        """The variables, and the timers."""
        timers = {TIMERS: TIMERS} if self.timed else {}
        return timers | {one.name: one.table for one in self.variables}

    def part_of(self, table: str) -> str | None:
        """The variable that a table, or one of parts, is of, or the timers."""
        beside = (one.name for one in self.variables if one.parts == table)
        return super().part_of(table) or next(beside, None)

    def shown(self, table: str) -> tuple[Field, ...]:
        """The columns of a table's rows as a user reads them: the key, and what it has there, called as that is."""
        name, stored = next(((v.name, v.shown) for v in self.variables if v.table == table), (TIMERS, "array<bigint>"))
        taken = {field.name for field in self.key_fields}
        while name in taken:
            name += "_state"
        return (*self.key_fields, Field(name, stored))

    @property
    def keeps_columns(self) -> bool:
        """No: what comes out is the user's."""
        return False

    @property
    def lag(self) -> int | None:
        """How far the operator's watermark lags behind the query's, in milliseconds; None if it asks for no times."""
        return self.lag_ms if self.timed else None

    def with_lag(self, lag_ms: int) -> Self:
        """The same, reached by a watermark that lags behind the query's."""
        return msgspec.structs.replace(self, lag_ms=lag_ms)

    @property
    def closes(self) -> bool:
        """Whether batches without rows follow a watermark that has moved: as in Spark, also without timers."""
        return self.marked and not self.ticks and self.output_mode != "complete"

    @property
    def ticks(self) -> bool:
        """Whether the clock makes timers due, so that there is always another batch."""
        return self.time_mode == "processing"

    @property
    def updates(self) -> bool:
        """No: rows come out once, as far as anybody knows."""
        return False

    @property
    def shows_all(self) -> bool:
        """Yes, as in Spark, where complete mode shows what the processor gives out."""
        return True

    @property
    def beyond_spark(self) -> bool:
        """No: Spark has it on streams."""
        return False

    @property
    def takes_updates(self) -> bool:
        """Yes, as the rows that they are."""
        return True

    def consuming(self) -> Self | str:
        """A row that a processor has seen cannot be taken back."""
        return ONCE

    def emitting(self) -> Self | str:
        """The same: nothing changes."""
        return self

    @property
    def access_pattern(self) -> AccessPattern:
        """The static choice of a store."""
        why = "the state of each key that has rows or due timers is handed to the user's processor and taken back"
        return AccessPattern("read-modify-write", why)

    @property
    def functions(self) -> tuple[str, ...]:
        """The state variables."""
        return tuple(
            f"{one.name}: {one.kind}" + (f", {one.ttl_ms} ms to live" if one.ttl_ms else "")
            for one in self.variables
            if not one.idle
        )

    @property
    def figures(self) -> tuple[str, ...]:
        """What slots report of it beside what they report of every operator."""
        return PROCESSORS

    @property
    def unsupported_values(self) -> str | None:
        """A type that cannot be kept."""
        columns = self.columns + (self.initial.columns if self.initial else ())
        types = [parse_type(one.stored) for one in self.variables] + [parse_type(one.type) for one in columns]
        return None if all(_held(one) for one in types) else INPUT_TYPE


def _followed(before: Variable | None, now: Variable) -> Variable:
    """A variable with the types that it has had."""
    if before is None or not now.evolves:
        return now
    new = () if before.value == now.value else (before.value,)
    return msgspec.structs.replace(now, earlier=(*before.earlier, *new))


def _held(dtype: DataType) -> bool:
    if dtype.nested:
        return not has_twins(dtype) and all(_held(inner) for _, inner in dtype.fields)
    return dtype.machine is not None
