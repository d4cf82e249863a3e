"""Input of a join's slot stage: both sides in the columns of `JoinSpec`, computed by Spark."""

from __future__ import annotations

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression
from millpond.plan.reading.join import JoinReading, SideReading
from millpond.spec.kinds.join import JoinSide, JoinSpec
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.tasks.ddl import quoted


def side_projections(catalyst: Catalyst, reading: JoinReading) -> list[tuple[list[Expression], list[str]]]:
    """Return for each side the projection of its rows, and SQL over that for the input columns, the hash last."""
    spec = reading.spec
    return [
        _side(catalyst, spec, spec.left, reading.left, right=False),
        _side(catalyst, spec, spec.right, reading.right, right=True),
    ]


def hint_columns(reading: JoinReading, columns: list[str]) -> list[str]:
    """Return the columns of a side's input that a prefetch hint carries, the hash first."""
    return [columns[-1], *(columns[position] for position in reading.spec.hint_columns)]


def _side(
    catalyst: Catalyst, spec: JoinSpec, side: JoinSide, reading: SideReading, *, right: bool
) -> tuple[list[Expression], list[str]]:
    aliases: list[Expression] = []

    def raw(expression: Expression) -> str:
        name = f"raw{len(aliases)}"
        aliases.append(catalyst.alias(expression, name))
        return name

    able: Expression | None = None
    for conjunct in reading.match_conditions:
        able = catalyst.conjunction(able, conjunct)

    def stored(value: Expression) -> str:
        # As on Spark, what a condition computes of rows that have no match is not evaluated: it may fail.
        guarded = value if able is None or value.kind == "AttributeReference" else catalyst.conditional(able, value)
        return raw(guarded)

    header = {
        "__right": str(right).lower(),
        "__time": _micros(reading.time, raw),
        "__late": _micros(reading.late, raw) if side.late == "late" else "cast(null as bigint)",
        "__able": "true" if able is None else f"coalesce({raw(able)}, false)",
    }
    columns = [f"{header[field.name]} as {field.name}" for field in spec.header]
    keys = [raw(key) for key in reading.keys]
    columns += [_named(name, field) for name, field in zip(keys, spec.keys, strict=True)]
    for other, fields in ((right, spec.left.values), (not right, spec.right.values)):
        if other:
            columns += [_named(f"cast(null as {field.type})", field) for field in fields]
        else:
            columns += [_named(stored(value), field) for value, field in zip(reading.values, fields, strict=True)]
    return aliases, [*columns, f"xxhash64({', '.join(keys)}) as __hash"]


def _named(sql: str, field: Field) -> str:
    return f"{sql} as {quoted(field.name)}"


def _micros(time: Expression | None, raw: object) -> str:
    """Return SQL for an event time in microseconds; for a window, of its end."""
    if time is None:
        return "cast(null as bigint)"
    assert callable(raw)
    name = raw(time)
    dtype = parse_type(time.type)
    return f"unix_micros({name})" if dtype.name == "timestamp" else f"unix_micros({name}.{quoted(dtype.fields[1][0])})"
