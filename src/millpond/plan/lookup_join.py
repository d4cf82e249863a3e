"""`millpond.enrich`: builds the DataFrame of a lookup join; Spark alone can run it, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Literal, get_args

from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType

from millpond.errors import UsageError
from millpond.lookup.function import Lookup
from millpond.lookup.redis import RedisTable, parse_key_pattern
from millpond.lookup.table import LookupTable
from millpond.plan.catalyst.nodes import WATERMARK_DELAY
from millpond.plan.catalyst.session import is_on
from millpond.plan.exchange.workers import map_in_arrow
from millpond.spec.kinds.enrich import ERROR, EnrichSpec
from millpond.spec.operators import Field
from millpond.spec.types import DataType as Type
from millpond.spec.types import holds_floats, parse_type
from millpond.tasks.ddl import PLAIN_NAME, ddl, quoted

How = Literal["left", "inner"]
OnError = Literal["fail", "null", "side"]

_MAX_NUMBER = 1e12
"""Upper bound of any number, so that arithmetic on it is safe."""

_MAX_TIMEOUT_SECONDS = 1e6
"""Maximum time-out of a request in seconds that clients and servers accept."""


def lookup_join(
    df: DataFrame,
    table: LookupTable,
    on: str | Sequence[str] | Mapping[str, str],
    columns: str | StructType,
    how: How,
    cache: int,
    ttl: float | None,
    timeout: float,
    retries: int,
    concurrency: int,
    batch: int,
    on_error: OnError,
) -> DataFrame:
    """Build the DataFrame of a lookup join; arguments as for `millpond.enrich`.

    Raises:
        UsageError: an argument is invalid.
    """
    _check_table(table)
    _check_choice("how", how, get_args(How))
    _check_choice("on_error", on_error, get_args(OnError))
    cache, retries = _whole_number("cache", cache, 0), _whole_number("retries", retries, 0)
    concurrency, batch = _whole_number("concurrency", concurrency, 1), _whole_number("batch", batch, 1)
    timeout = _number("timeout", timeout, 0.001, _MAX_TIMEOUT_SECONDS)
    ttl = None if ttl is None else _number("ttl", ttl, 0)
    names = _key_names(on)
    schema = df.schema
    sensitive = is_on(df.sparkSession, "spark.sql.caseSensitive", False)
    fold: Callable[[str], str] = str if sensitive else str.lower
    keys = _key_positions(schema, names, fold)
    looked_up = _lookup_fields(schema, columns, on_error, fold)
    if on_error == "side" and ERROR.name in map(fold, schema.names):
        raise UsageError(f"There is a column {ERROR.name} already.", action="Rename that, or give another on_error.")
    if isinstance(table, RedisTable):
        _check_pattern(table, list(names.values()))
    spec = EnrichSpec(
        columns=tuple(Field(field.name, ddl(field.dataType)) for field in schema.fields),
        keys=keys,
        named=tuple(names.values()),
        found=tuple(Field(field.name, ddl(field.dataType)) for field in looked_up),
        how=how,
        on_error=on_error,
        most=cache,
        ttl_ms=-1 if ttl is None else round(ttl * 1000),
        timeout_ms=max(1, round(timeout * 1000)),
        retries=retries,
        concurrency=concurrency,
        request=batch,
        table=_pickled(table),
        name=table.name,
    )
    fields = [StructField(field.name, field.dataType) for field in schema.fields]
    fields += [StructField(field.name, field.dataType) for field in looked_up]
    if on_error == "side":
        fields.append(StructField(ERROR.name, _ERROR_TYPE))
    if any(not PLAIN_NAME.fullmatch(name) for name in df.columns):  # `mapInArrow` reads column names as paths
        df = df.toDF(*(f"c{number}" for number in range(len(df.columns))))
    return _with_watermark(map_in_arrow(df, Lookup(spec), StructType(fields)), schema)


def _check_table(table: object) -> None:
    if isinstance(table, type):
        raise UsageError(
            f"{table.__name__} is a class, and no table to look keys up in.", action=f"Make one: {table.__name__}(…)."
        )
    if not isinstance(table, LookupTable):
        raise UsageError(
            f"{type(table).__name__} is no table to look keys up in: it has no `name`, or no `connect`.",
            action="Give a RedisTable, a PostgresTable, or a class of your own (`millpond docs enrichment`).",
        )


def _with_watermark(result: DataFrame, schema: StructType) -> DataFrame:
    """Return the rows with the watermark of their input: a lookup does not change event times."""
    marked = {field.name: field.metadata for field in schema.fields if WATERMARK_DELAY in field.metadata}
    if not marked:
        return result
    outputs = {name: F.col(quoted(name)) for name in result.columns}
    outputs |= {name: outputs[name].alias(name, metadata=metadata) for name, metadata in marked.items()}
    return result.select(*outputs.values())


_ERROR_TYPE = StructType([StructField("kind", StringType()), StructField("message", StringType())])


def _pickled(table: LookupTable) -> bytes:
    try:
        return bytes(cloudpickle.dumps(table))
    except Exception as error:  # any exception of the table's own attributes
        raise UsageError(
            f"The table '{table.name}' cannot be pickled, so that it gets to where keys are looked up: {error}.",
            action="Have it hold what says how to connect, and make clients and locks in its `connect`.",
        ) from error


def _key_names(on: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return each column → the table's name for it."""
    if isinstance(on, str):
        return {on: on}
    names = dict(on) if isinstance(on, Mapping) else {name: name for name in on} if isinstance(on, list | tuple) else on
    if not isinstance(names, dict) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise UsageError(
            f"`on` is {on!r}, and wants names of columns.",
            action="Give a name, a list of names, or names with what the table calls them: {'ad': 'ad_id'}.",
        )
    return names


def _number(name: str, given: float, least: float, most: float = _MAX_NUMBER) -> float:
    if isinstance(given, bool) or not isinstance(given, Real):  # NumPy's numbers are Real, too
        raise UsageError(f"{name} is {given!r}, which is no number.", action="Give a number.")
    if not least <= given <= most:
        raise UsageError(f"{name} is {given}, and is {least:g} at least, and {most:g} at most.", action="Give another.")
    return float(given)


def _whole_number(name: str, given: float, least: int) -> int:
    if _number(name, given, least) % 1:
        raise UsageError(f"{name} is {given}, which is no whole number.", action="Give a whole number.")
    return int(given)


def _check_choice(name: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise UsageError(f"{name} is {given!r}.", action=f"Give one of {', '.join(known)}.")


def _key_positions(schema: StructType, names: Mapping[str, str], fold: Callable[[str], str]) -> tuple[int, ...]:
    if not names:
        raise UsageError("There is no column to look rows up by.", action="Name one in `on`.")
    called = list(names.values())
    shared = sorted({name for name in called if called.count(name) > 1})
    if shared:
        raise UsageError(f"Two columns are looked up as {shared[0]}.", action="Look up by one of them.")
    duplicates = {name for name in schema.names if schema.names.count(name) > 1}
    if duplicates:
        raise UsageError(f"Two columns are called {sorted(duplicates)[0]}.", action="Rename one.")
    positions = []
    for name in names:
        same = [position for position, column in enumerate(schema.names) if fold(column) == fold(name)]
        if not same:
            raise UsageError(f"There is no column {name!r} to look rows up by.", action=f"There are {schema.names}.")
        if len(same) > 1:
            raise UsageError(f"Two columns are called {name}.", action="Rename one.")
        if same[0] in positions:
            raise UsageError(f"Rows are looked up by the column {name} twice.", action="Name it once.")
        dtype = _supported_type(schema[same[0]].dataType)
        if dtype is None or dtype.nested or holds_floats(dtype) or not dtype.atomic:
            raise UsageError(
                f"The column {name} is of type {schema[same[0]].dataType.simpleString()}, which is no key.",
                action="Use integers, strings without a collation, bytes, decimals, booleans, dates or timestamps.",
            )
        positions += same
    return tuple(positions)


def _lookup_fields(
    schema: StructType, columns: str | StructType, on_error: str, fold: Callable[[str], str]
) -> list[StructField]:
    looked_up = columns.fields if isinstance(columns, StructType) else _parse_columns(columns)
    if not looked_up:
        raise UsageError("There is no column to look up.", action=_COLUMNS_EXAMPLE)
    taken = {fold(name) for name in [*schema.names, *([ERROR.name] if on_error == "side" else [])]}
    for field in looked_up:
        if fold(field.name) in taken:
            raise UsageError(f"There is a column {field.name} already.", action="Rename that, or look up another.")
        taken.add(fold(field.name))
        if _supported_type(field.dataType) is None:
            raise UsageError(
                f"The column {field.name} is of type {field.dataType.simpleString()}, which cannot be looked up.",
                action="Give another type.",
            )
    return looked_up


_COLUMNS_EXAMPLE = "Write them like 'name string, price decimal(10,2)', or give a StructType."


def _parse_columns(columns: str) -> list[StructField]:
    if not isinstance(columns, str):
        raise UsageError(f"The columns are {columns!r}, and no text.", action=_COLUMNS_EXAMPLE)
    if not columns.strip():
        return []
    try:
        fields: list[StructField] = StructType.fromDDL(columns).fields
    except Exception as error:
        text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"The columns {columns!r} cannot be read: {text.rstrip('.')}.", action=_COLUMNS_EXAMPLE
        ) from error
    return fields


def _supported_type(dtype: DataType) -> Type | None:
    """Parse a column type; None if it cannot be sent to Python and back."""
    try:
        parsed = parse_type(ddl(dtype))
        parsed.arrow  # noqa: B018 — a type without an Arrow form raises
    except UsageError:
        return None
    return parsed


def _check_pattern(table: RedisTable, names: Sequence[str]) -> None:
    columns = {name for _, name in parse_key_pattern(table.key) if name is not None}
    if columns != set(names):
        raise UsageError(
            f"The pattern {table.key!r} names {', '.join(sorted(columns)) or 'no column'}, and rows are looked up by "
            f"{', '.join(names)}.",
            action="Name the same columns in both, as the table has them.",
        )
