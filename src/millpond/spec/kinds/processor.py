"""User-defined stateful processing of the rows of each key (`transformWithState`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self
from urllib.parse import quote

import msgspec

from millpond.errors import UsageError
from millpond.metrics import PROCESSOR_METRICS
from millpond.spec.functions import INPUT_TYPE
from millpond.spec.operators import EventTime, Field
from millpond.spec.protocol import AccessPattern, KindFacts, Spec
from millpond.spec.traits import Trait, columns_trait
from millpond.spec.types import DataType, has_duplicate_fields, parse_type

TIMERS = "timers"
"""Name of the timers' table: for each key, its due times in ascending order."""

VARIABLE = "variable."
"""Prefix of the names of variables' tables, so that a variable may have any name."""

PARTS = "parts."
"""Prefix of the names of tables that hold parts of variables (see `Variable.parts`)."""

HEAD = "struct<first:bigint,stop:bigint,entries:bigint,bytes:bigint,expiry:bigint>"
"""Type, as DDL, of the summary in a key's row about the parts stored beside it.

Parts have the numbers `first` to `stop` − 1. `entries` counts map entries in them, `bytes` is their approximate size,
and `expiry` is when the last element or entry expires.
"""

TimeMode = Literal["none", "processing", "event"]


class Variable(msgspec.Struct, frozen=True):
    """A state variable.

    Attributes:
        name: the user's name.
        kind: whether a key has one value, a list of values, or a map.
        value: the type of a value, of an element, or of a map's value: a struct, as DDL.
        key: the type of a map's keys: a struct, as DDL.
        ttl_ms: the time to live of a value, an element or an entry after it was written; 0 means for ever.
        idle: whether the current processor does not use it; it is kept for a later processor.
        evolves: whether the type of values may change between runs (`spec.types.evolves`); fields are matched by name.
        earlier: the earlier types of the values, oldest first.
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
        """The name of the variable's table, URL-quoted."""
        return VARIABLE + quote(self.name, safe="")

    @property
    def parts(self) -> str:
        """The name of the table that holds a key's large values in numbered parts of the type `stored`.

        A list has its older elements there; the newest are in the key's row. A map has all entries there, by a hash of
        their keys. A single value has no parts.
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
        """The stored type, as DDL: never null, and empty only if there are parts.

        With a time to live, `expiry` is the expiry time of each element in milliseconds. Maps are sorted by key.
        """
        return self._of(f"versions<{','.join((*self.earlier, self.value))}>" if self.evolves else self.value)

    @property
    def user_type(self) -> str:
        """The stored type as a user reads it."""
        return self._of(self.value)

    def _of(self, value: str) -> str:
        if self.kind == "map":
            expiry = ",expiry:bigint" if self.ttl_ms else ""
            return f"array<struct<key:{self.key},value:{value}{expiry}>>"
        element = f"struct<value:{value},expiry:bigint>" if self.ttl_ms else value
        return f"array<{element}>" if self.kind == "list" else element


class InitialState(msgspec.Struct, frozen=True):
    """Initial state: the rows that a query's first batch starts with.

    Attributes:
        columns: the columns of its rows.
        keys: positions of the key columns, of the same types as the input's.
    """

    columns: tuple[Field, ...]
    keys: tuple[int, ...]


class ProcessorSpec(Spec, frozen=True, tag="processor"):
    """A user's processor, called with the rows and the state of each key that has rows in the batch.

    Attributes:
        columns: the input columns.
        keys: positions of the key columns.
        outputs: the output columns.
        variables: the state variables of each key.
        time_mode: the clock of timers and times to live.
        output_mode: `append`, `update` or `complete`.
        time: the event-time column that defines lateness; only in time mode `event`.
        marked: whether there is a watermark.
        lag_ms: lag of the operator's watermark behind the query's.
        purged: names of variables of earlier runs to delete. A variable that is also used starts empty in each batch,
            as in Spark, which calls `init` in each batch.
        emitted: position among the outputs of the event time that closes state in operators above; None if there is
            none. No emitted row may be late there.
        initial: the initial state of the first batch, if any.
        full: names of variables whose values have fields that are never null.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=False,
        supports_complete=True,
        beyond_spark=False,
        reads_updates_as_rows=True,
        variables_may_change=True,
    )

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
        """The key columns, the variables and the modes."""
        return {
            "keys": columns_trait("groups by", self.key_fields),
            "variables": Trait(
                f"has the state variables ({', '.join(variable.description for variable in self.variables)})"
            ),
            "times": Trait(f"has {self.time_mode} time" if self.timed else "has no times"),
            "mode": Trait(f"runs in output mode {self.output_mode}"),
        }

    def with_idle_state(self, before: Spec) -> Self:
        """Return the spec with the idle variables of an earlier run added, in the order of their names.

        Raises:
            UsageError: the types of values may change, but have fields that are never null (as in Spark).
        """
        # A purged variable must not come back as idle state.
        left_out = {*self.purged, *(variable.name for variable in self.variables)}
        earlier = before.variables if isinstance(before, ProcessorSpec) else ()
        idle = (msgspec.structs.replace(variable, idle=True) for variable in earlier if variable.name not in left_out)
        known = {variable.name: variable for variable in earlier}
        # whether types may change was fixed by the first run
        evolves = earlier[0].evolves if earlier else any(variable.evolves for variable in self.variables)
        if evolves and self.full:
            raise UsageError(
                "[TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE] The query began with spark.sql.streaming.stateStore."
                f"encodingFormat=avro, so all fields of the state variable {self.full[0]!r} must be nullable.",
                action="Leave NOT NULL out.",
            )
        own = (
            _with_earlier_types(known.get(variable.name), msgspec.structs.replace(variable, evolves=evolves))
            for variable in self.variables
        )
        # In the order of names, so that the order in which a program declares variables does not matter.
        variables = sorted([*own, *idle], key=lambda variable: variable.name)
        return msgspec.structs.replace(self, variables=tuple(variables))

    @property
    def compatibility_spec(self) -> Self:
        """The key, the modes, and each variable's types and whether it has a time to live.

        The other input columns and the output may change between runs, as in Spark.
        """
        variables = (
            # The stored type depends on whether there is a time to live, not on how long it is.
            msgspec.structs.replace(variable, ttl_ms=min(variable.ttl_ms, 1), idle=False)
            for variable in self.variables
        )
        return type(self)(
            columns=self.key_fields,
            keys=tuple(range(len(self.keys))),
            outputs=(),
            variables=tuple(sorted(variables, key=lambda variable: variable.name)),
            time_mode=self.time_mode,
            output_mode=self.output_mode,
        )

    @property
    def timed(self) -> bool:
        """Whether the processor may have timers."""
        return self.time_mode != "none"

    @property
    def tables(self) -> Mapping[str, tuple[str, bool]]:
        """Table → the stored type of a key's value there, as DDL, and whether parts of it have due times."""
        timers = {TIMERS: ("array<bigint>", True)} if self.timed else {}
        return {variable.table: (variable.stored, variable.ttl_ms > 0) for variable in self.variables} | timers

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""
        return self.columns

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The output columns."""
        return self.outputs

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key columns; `table_columns` has the further columns of each table."""
        return self.key_fields

    @property
    def parts(self) -> Mapping[str, str]:
        """The tables of the variables and of the timers."""
        timers = {TIMERS: TIMERS} if self.timed else {}
        return timers | {variable.name: variable.table for variable in self.variables}

    def part_of(self, table: str) -> str | None:
        """Return the variable whose table, or table of parts, this is; or `timers`."""
        owners = (variable.name for variable in self.variables if variable.parts == table)
        return super().part_of(table) or next(owners, None)

    def table_columns(self, table: str) -> tuple[Field, ...]:
        """Return the columns of a table's rows as a user reads them: the key, then the variable under its name."""
        name, stored = next(
            ((v.name, v.user_type) for v in self.variables if v.table == table), (TIMERS, "array<bigint>")
        )
        taken = {field.name for field in self.key_fields}
        while name in taken:
            name += "_state"
        return (*self.key_fields, Field(name, stored))

    @property
    def lag(self) -> int | None:
        """Lag of the operator's watermark behind the query's, in ms; None if it uses no times."""
        return self.lag_ms if self.timed else None

    def with_lag(self, lag_ms: int) -> Self:
        """Return the spec for a watermark that lags `lag_ms` behind the query's; itself if it uses no times."""
        return msgspec.structs.replace(self, lag_ms=lag_ms) if self.timed else self

    @property
    def needs_no_data_batches(self) -> bool:
        """Whether no-data batches follow a moved watermark: also without timers, as in Spark."""
        return self.marked and not self.due_by_processing_time and self.output_mode != "complete"

    @property
    def due_by_processing_time(self) -> bool:
        """Whether processing-time timers make further batches necessary."""
        return self.time_mode == "processing"

    @property
    def access_pattern(self) -> AccessPattern:
        """The statically chosen store."""
        why = "the state of each key that has rows or due timers is handed to the user's processor and taken back"
        return AccessPattern("read-modify-write", why)

    @property
    def functions(self) -> tuple[str, ...]:
        """The state variables in use."""
        return tuple(
            f"{variable.name}: {variable.kind}" + (f", {variable.ttl_ms} ms to live" if variable.ttl_ms else "")
            for variable in self.variables
            if not variable.idle
        )

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Additional metrics that slots report for the operator."""
        return PROCESSOR_METRICS

    @property
    def unsupported_values(self) -> str | None:
        """The reason code why a type cannot be stored, or an output has no Arrow form; None if all can and have."""
        columns = self.columns + (self.initial.columns if self.initial else ())
        types = [parse_type(item.stored) for item in self.variables] + [parse_type(item.type) for item in columns]
        supported = all(map(_is_storable, types)) and all(_has_arrow_form(field.type) for field in self.outputs)
        return None if supported else INPUT_TYPE


def _with_earlier_types(before: Variable | None, now: Variable) -> Variable:
    """Return the variable with the earlier types of its values."""
    if before is None or not now.evolves:
        return now
    new = () if before.value == now.value else (before.value,)
    return msgspec.structs.replace(now, earlier=(*before.earlier, *new))


def _is_storable(dtype: DataType) -> bool:
    if dtype.nested:
        return not has_duplicate_fields(dtype) and all(_is_storable(inner) for _, inner in dtype.fields)
    return dtype.machine is not None


def _has_arrow_form(ddl: str) -> bool:
    try:
        return parse_type(ddl).arrow is not None
    except UsageError:  # a type that only Spark knows
        return False
