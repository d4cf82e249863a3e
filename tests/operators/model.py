"""Aggregates the slow way: one group's rows, in order, by plain Python."""

import datetime as dt
import math
import operator
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from fractions import Fraction
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import Any

from millpond.spec.functions import is_distinct
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType, parse_type
from tests.operators.rig import Row, normal

EXACT = Context(prec=200)
BATCH = "__batch"
"""The number of the batch that a row came in, if not all come in one."""
GREATEST = {"max", "max_by", "bool_or"}


def aggregate(shape: AggregateSpec, rows: Sequence[Row]) -> list[Any]:
    """The result of every call over the rows of one group."""
    return [call_result(shape, call, rows) for call in shape.calls]


def call_result(shape: AggregateSpec, call: AggregateCall, rows: Sequence[Row]) -> Any:
    names = [shape.inputs[position].name for position in call.inputs]
    types = [parse_type(shape.inputs[position].type) for position in call.inputs]
    if call.filter is not None:
        rows = [row for row in rows if row[shape.inputs[call.filter].name]]
    inputs = [tuple(row[name] for name in names) for row in rows]
    if is_distinct(call):
        seen: dict[Any, Any] = {}
        for one, row in zip(inputs, rows, strict=True):
            if None not in one:
                seen.setdefault(tuple(normal(value) for value in one), (tuple(shown(value) for value in one), row))
        inputs, rows = [one for one, _ in seen.values()], [row for _, row in seen.values()]
    if call.function in ("sum", "avg") and types[0].machine in ("int", "wide"):
        inputs = [(*one, row.get(BATCH, 0)) for one, row in zip(inputs, rows, strict=True)]
    return FUNCTIONS[call.function](call, types, inputs)


def shown(value: Any) -> Any:
    """A value as grouping shows it."""
    return value + 0.0 if isinstance(value, float) else value


def order(value: Any) -> Any:
    """The sort key of a value in Spark's order."""
    if isinstance(value, float):
        return (value != value, 0.0 if value != value else value)
    return value.encode() if isinstance(value, str) else value


def _count(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> int:
    return sum(1 for one in inputs if None not in one and (call.function == "count" or one[0]))


def _values(inputs: list[tuple[Any, ...]]) -> list[Any]:
    return [one[0] for one in inputs if one[0] is not None]


def _fits(value: Decimal, dtype: DataType) -> Decimal | None:
    return value if value.scaleb(dtype.scale, EXACT).copy_abs() < 10**dtype.precision else None


def _try_sum(inputs: list[tuple[Any, ...]]) -> int | None:
    """A sum that is beyond 64 bits when a batch ends is null for good."""
    total: int | None = 0
    for _, batch in groupby((one for one in inputs if one[0] is not None), key=itemgetter(-1)):
        total = None if total is None else sum((one[0] for one in batch), total)
        if total is not None and not -(2**63) <= total < 2**63:
            total = None
    return total


def _decimal_sum(inputs: list[tuple[Any, ...]], dtype: DataType) -> Decimal | None:
    """A sum that is beyond its precision when a batch ends is null for good."""
    total: Decimal | None = Decimal(0).scaleb(-dtype.scale, EXACT)
    limit = DataType("decimal", min(38, dtype.precision + 10), dtype.scale)
    for _, batch in groupby((one for one in inputs if one[0] is not None), key=itemgetter(-1)):
        with localcontext(EXACT):
            total = None if total is None else _fits(sum((one[0] for one in batch), total), limit)
    return total


def _sum(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = _values(inputs)
    if not values:
        return None
    if types[0].name == "decimal":
        return _decimal_sum(inputs, types[0])
    if types[0].machine == "int" and call.options.get("eval_mode") == "try":
        return _try_sum(inputs)
    if types[0].machine == "int":
        return (sum(values) + 2**63) % 2**64 - 2**63
    return sum(values, 0.0)


def _avg(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = _values(inputs)
    if not values:
        return None
    if types[0].name == "decimal":
        result = parse_type(call.type)
        total = _decimal_sum(inputs, types[0])
        if total is None:
            return None
        with localcontext(EXACT):
            quotient = total / len(values)
            return _fits(quotient.quantize(Decimal(1).scaleb(-result.scale, EXACT), ROUND_HALF_UP), result)
    summed = 0.0
    for value in values:
        summed += float(value)
    return summed / len(values)


def _extreme(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = _values(inputs)
    if not values:
        return None
    return (max if call.function in GREATEST else min)(values, key=order)  # of equal ones the first


def _by(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    pairs = [one for one in inputs if one[1] is not None][::-1]  # of equal ones the last
    if not pairs:
        return None
    return (max if call.function in GREATEST else min)(pairs, key=lambda one: order(one[1]))[0]


def _first(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = _values(inputs) if call.options.get("ignore_nulls") else [one[0] for one in inputs]
    return (values[-1] if call.function == "last" else values[0]) if values else None


def _moments(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = [float(value) for value in _values(inputs)]
    population = call.function.endswith("_pop") or call.function == "regr_sxx"
    if not values or (len(values) == 1 and not population):
        return None
    if not all(math.isfinite(value) for value in values):
        return math.nan
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    squares = sum((value - mean) ** 2 for value in exact)
    if call.function == "regr_sxx":
        return float(squares)
    variance = squares / (len(exact) - (not population))
    return math.sqrt(variance) if call.function.startswith("std") else float(variance)


def _shape(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    """Skewness or kurtosis, one value after the other as Spark does: they are as good as their rounding only."""
    count = mean = squares = cubes = fourths = 0.0
    for value in map(float, _values(inputs)):
        count += 1.0
        delta = value - mean
        step = delta / count
        mean += step
        squares += delta * (delta - step)
        cubes = cubes - 3 * step * squares + delta * (delta * delta - step * step)
        fourths = fourths - 4 * step * cubes - 6 * (step * step) * squares
        fourths += delta * (delta * (delta * delta) - step * (step * step))
    if call.function == "skewness":
        return _quotient(math.sqrt(count) * cubes, math.sqrt(squares * squares * squares))
    kurtosis = _quotient(count * fourths, squares * squares)
    return None if kurtosis is None else kurtosis - 3


def _bits(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = _values(inputs)
    operation = {"bit_and": operator.and_, "bit_or": operator.or_, "bit_xor": operator.xor}[call.function]
    return reduce(operation, values) if values else None


def _product(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = _values(inputs)
    return reduce(operator.mul, map(float, values)) if values else None


def _pair(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    """Statistics of two arguments, one pair after the other as Spark does."""
    count = mean_x = mean_y = products = squares_x = squares_y = 0.0
    regression = call.function in ("regr_slope", "regr_intercept")
    for pair in inputs:
        if None in pair:
            continue
        x, y = map(float, reversed(pair) if regression else pair)
        count += 1.0
        dx, dy = x - mean_x, y - mean_y
        mean_x, mean_y = mean_x + dx / count, mean_y + dy / count
        products += dx * (y - mean_y)
        squares_x += dx * (dx - dx / count if regression else x - mean_x)
        squares_y += dy * (y - mean_y)
    if count == 0:
        return None
    if call.function == "regr_sxy":
        return products
    if call.function.startswith("covar_"):
        return _quotient(products, count - (call.function == "covar_samp"))
    if regression:
        slope = _quotient(products, squares_x)
        return slope if slope is None or call.function == "regr_slope" else mean_y - slope * mean_x
    if call.function == "regr_r2":
        if 0 in (squares_x, squares_y):
            return 1.0 if squares_y != 0 else None
        correlation = _quotient(products, math.sqrt(squares_x * squares_y))
        return None if correlation is None else correlation * correlation
    flat = count == 1 or 0 in (squares_x, squares_y)
    return None if flat else _quotient(products, math.sqrt(squares_x * squares_y))


def _quotient(dividend: float, divisor: float) -> float | None:
    return None if divisor == 0 else dividend / divisor


def _collect(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> list[Any]:
    return _values(inputs)


def _percentile_approx(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    """Exact, as it is while a group has at most half as many values as the accuracy says."""
    numbers = [_number(value) for value in _values(inputs)]
    values = sorted(numbers, key=lambda one: (order(one), math.copysign(1, one)))  # −0.0 before 0.0
    if not values:
        return None
    error = 1 / call.options["accuracy"]
    found = []
    for share in call.options["percentages"]:
        rank = math.ceil(share * len(values))
        at = 1 if share <= error else len(values) if share >= 1 - error else rank
        found.append(_of_number(values[at - 1], types[0]))
    return found if call.options["array"] else found[0]


def _number(value: Any) -> float:
    if isinstance(value, dt.datetime):
        since = value - dt.datetime(1970, 1, 1, tzinfo=value.tzinfo)
        return float(since // dt.timedelta(microseconds=1))
    return float((value - dt.date(1970, 1, 1)).days if isinstance(value, dt.date) else value)


def _of_number(value: float, dtype: DataType) -> Any:
    if dtype.machine == "float":
        return value
    whole = min(int(value), 2**63 - 1)
    if dtype.name == "date":
        return dt.date(1970, 1, 1) + dt.timedelta(days=whole)
    if dtype.name in ("timestamp", "timestamp_ntz"):
        zone = dt.UTC if dtype.name == "timestamp" else None
        return dt.datetime(1970, 1, 1, tzinfo=zone) + dt.timedelta(microseconds=whole)
    return whole


def _count_min(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> bytes:
    multipliers, width = call.options["multipliers"], call.options["width"]
    table = [[0] * width for _ in multipliers]
    values = _values(inputs)
    for value in values:
        for level, multiplier in enumerate(multipliers):
            if isinstance(value, int):
                hashed = _signed(multiplier * value, 64)
                table[level][(_signed(hashed + (hashed >> 32), 64) & (2**31 - 1)) % width] += 1
                continue
            encoded = value.encode() if isinstance(value, str) else value
            first = _murmur(encoded, 0)
            table[level][abs(_signed(first + level * _murmur(encoded, first), 32)) % width] += 1
    header = [(1, 4), (len(values), 8), (len(table), 4), (width, 4), *((one, 8) for one in multipliers)]
    cells = [*header, *((cell, 8) for row in table for cell in row)]
    return b"".join(cell.to_bytes(size, "big") for cell, size in cells)


def _signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def _murmur(value: bytes, seed: int) -> int:
    """Murmur3 of words, and of each byte that is left as if it were a signed word."""
    mask = 2**32 - 1
    aligned = len(value) // 4 * 4
    words = [int.from_bytes(value[at : at + 4], "little") for at in range(0, aligned, 4)]
    hashed = seed & mask
    for word in [*words, *(_signed(byte, 8) & mask for byte in value[aligned:])]:
        mixed = word * 0xCC9E2D51 & mask
        mixed = ((mixed << 15 | mixed >> 17) & mask) * 0x1B873593 & mask
        hashed ^= mixed
        hashed = ((hashed << 13 | hashed >> 19) & mask) * 5 + 0xE6546B64 & mask
    hashed ^= len(value)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & mask
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & mask
    return _signed(hashed ^ hashed >> 16, 32)


def _listagg(call: AggregateCall, types: list[DataType], inputs: list[tuple[Any, ...]]) -> Any:
    values = _values(inputs)
    ranks = call.options.get("order", [])
    for number, (descending, nulls_last) in reversed(list(enumerate(ranks))):  # sorting is stable
        by = [list(value.values())[1 + number] if isinstance(value, dict) else value for value in values]
        known = [(order(one), value) for one, value in zip(by, values, strict=True) if one is not None]
        nulls = [value for one, value in zip(by, values, strict=True) if one is None]
        known.sort(key=itemgetter(0), reverse=descending)
        values = [] if nulls_last else nulls
        values = values + [value for _, value in known] + (nulls if nulls_last else [])
    texts = [value["value"] if isinstance(value, dict) else value for value in values]
    delimiter = bytes.fromhex(call.options.get("delimiter", ""))
    if not texts:
        return None
    return delimiter.join(texts) if isinstance(texts[0], bytes) else delimiter.decode().join(texts)


FUNCTIONS: dict[str, Callable[[AggregateCall, list[DataType], list[tuple[Any, ...]]], Any]] = {
    "count": _count,
    "count_if": _count,
    "sum": _sum,
    "avg": _avg,
    "first": _first,
    "last": _first,
    "any_value": _first,
    "min_by": _by,
    "max_by": _by,
    "collect_list": _collect,
    "collect_set": _collect,
    "listagg": _listagg,
    "percentile_approx": _percentile_approx,
    "count_min_sketch": _count_min,
    **dict.fromkeys(["min", "max", "bool_and", "bool_or"], _extreme),
    **dict.fromkeys(["stddev_samp", "stddev_pop", "var_samp", "var_pop", "regr_sxx"], _moments),
    **dict.fromkeys(["bit_and", "bit_or", "bit_xor"], _bits),
    "product": _product,
    **dict.fromkeys(["skewness", "kurtosis"], _shape),
    **dict.fromkeys(["corr", "covar_pop", "covar_samp"], _pair),
    **dict.fromkeys(["regr_sxy", "regr_slope", "regr_intercept", "regr_r2"], _pair),
}
