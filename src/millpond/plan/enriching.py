"""`millpond.enrich`: makes the DataFrame of a lookup join, which Spark alone can run and the plan reader recognises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StringType, StructField, StructType

from millpond.ddl import ddl
from millpond.errors import UsageError
from millpond.lookup.function import Lookup
from millpond.lookup.redis import RedisTable, parts_of
from millpond.lookup.table import LookupTable
from millpond.plan.catalyst.nodes import WATERMARK_DELAY
from millpond.plan.workers import map_in_arrow
from millpond.spec.kinds.enrich import ERROR, EnrichSpec
from millpond.spec.operators import Field
from millpond.spec.types import DataType as Type
from millpond.spec.types import holds_floats, parse_type

How = Literal["left", "inner"]
OnError = Literal["fail", "null", "side"]


def enriched(
    df: DataFrame,
    table: LookupTable,
    on: str | Sequence[str] | Mapping[str, str],
    columns: str,
    how: How,
    cache: int,
    ttl: float | None,
    timeout: float,
    retries: int,
    concurrency: int,
    batch: int,
    on_error: OnError,
) -> DataFrame:
    """The DataFrame of a lookup join; arguments as for `millpond.enrich`.

    Raises:
        UsageError: an argument does not fit.
    """
    if not isinstance(table, LookupTable):
        raise UsageError(
            f"{type(table).__name__} is no table to look keys up in: it has no `name`, or no `connect`.",
            action="Give a RedisTable, a PostgresTable, or a class of your own as docs/guides/enrichment.md has it.",
        )
    _one_of("how", how, get_args(How))
    _one_of("on_error", on_error, get_args(OnError))
    for name, number, least in (
        *(("cache", cache, 0), ("timeout", timeout, 0.001), ("retries", retries, 0)),
        *(("concurrency", concurrency, 1), ("batch", batch, 1), ("ttl", 0 if ttl is None else ttl, 0)),
    ):
        if not least <= number < math.inf:
            raise UsageError(f"{name} is {number}, and is {least} at least.", action="Give another.")
    names = {on: on} if isinstance(on, str) else dict(on) if isinstance(on, Mapping) else {name: name for name in on}
    schema = df.schema
    keys = _keys(schema, names)
    found = _found(schema, columns, on_error)
    if isinstance(table, RedisTable):
        _check_pattern(table, list(names.values()))
    spec = EnrichSpec(
        columns=tuple(Field(field.name, ddl(field.dataType)) for field in schema.fields),
        keys=keys,
        named=tuple(names.values()),
        found=tuple(Field(field.name, ddl(field.dataType)) for field in found),
        how=how,
        on_error=on_error,
        most=cache,
        ttl_ms=-1 if ttl is None else round(ttl * 1000),
        timeout_ms=max(1, round(timeout * 1000)),
        retries=retries,
        concurrency=concurrency,
        request=batch,
        table=cloudpickle.dumps(table),
        name=table.name,
    )
    fields = [StructField(field.name, field.dataType) for field in schema.fields]
    fields += [StructField(field.name, field.dataType) for field in found]
    if on_error == "side":
        fields.append(StructField(ERROR.name, _ERROR))
    result = map_in_arrow(df, Lookup(spec), StructType(fields))
    for field in schema.fields:
        if WATERMARK_DELAY in field.metadata:  # the rows' times are what they were
            result = result.withMetadata(field.name, field.metadata)
    return result


_ERROR = StructType([StructField("kind", StringType()), StructField("message", StringType())])


def _one_of(name: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise UsageError(f"{name} is {given!r}.", action=f"Give one of {', '.join(known)}.")


def _keys(schema: StructType, names: Mapping[str, str]) -> tuple[int, ...]:
    if not names:
        raise UsageError("There is no column to look rows up by.", action="Name one in `on`.")
    called = list(names.values())
    shared = sorted({name for name in called if called.count(name) > 1})
    if shared:
        raise UsageError(f"Two columns are looked up as {shared[0]}.", action="Look up by one of them.")
    twins = {name for name in schema.names if schema.names.count(name) > 1}
    if twins:
        raise UsageError(f"Two columns are called {sorted(twins)[0]}.", action="Rename one.")
    for name in names:
        if name not in schema.names:
            raise UsageError(f"There is no column {name!r} to look rows up by.", action=f"There are {schema.names}.")
        dtype = _type(schema[name].dataType)
        if dtype is None or dtype.nested or holds_floats(dtype) or not dtype.atomic:
            raise UsageError(
                f"The column {name} is of type {schema[name].dataType.simpleString()}, which is no key.",
                action="Use integers, strings, decimals, booleans, dates or times.",
            )
    return tuple(schema.names.index(name) for name in names)


def _found(schema: StructType, columns: str, on_error: str) -> list[StructField]:
    try:
        found: list[StructField] = StructType.fromDDL(columns).fields
    except Exception as error:
        raise UsageError(
            f"The columns {columns!r} cannot be read: {str(error).splitlines()[0]}.",
            action="Write them like 'name string, price decimal(10,2)'.",
        ) from error
    taken = {name.lower() for name in [*schema.names, *([ERROR.name] if on_error == "side" else [])]}
    for field in found:
        if field.name.lower() in taken:
            raise UsageError(f"There is a column {field.name} already.", action="Rename that, or look up another.")
        taken.add(field.name.lower())
        if _type(field.dataType) is None:
            raise UsageError(
                f"The column {field.name} is of type {field.dataType.simpleString()}, which cannot be looked up.",
                action="Give another type.",
            )
    return found


def _type(dtype: DataType) -> Type | None:
    """A type as it travels; None if it does not."""
    try:
        found = parse_type(ddl(dtype))
        found.arrow  # noqa: B018 — a type without an Arrow form raises
    except UsageError:
        return None
    return found


def _check_pattern(table: RedisTable, names: Sequence[str]) -> None:
    said = {name for _, name in parts_of(table.key) if name is not None}
    if said != set(names):
        raise UsageError(
            f"The pattern {table.key!r} names {', '.join(sorted(said)) or 'no column'}, and rows are looked up by "
            f"{', '.join(names)}.",
            action="Name the same columns in both, as the table has them.",
        )
