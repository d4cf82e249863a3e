"""A query that has changed in what its state holds, and whether the state can follow.

State follows where each row of it can be read as a row of the new query: the keys stay, functions that stay keep their
columns, those that are gone lose them, new ones begin as if no row had come so far. Functions are known again by what
the query calls them with, not by their place or their name in the result. What cannot be is refused, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from millpond.checkpoint.differences import OTHER_VERSION
from millpond.checkpoint.pinned import NAME, PinnedOperator, PinnedQuery, compare, differing, plain
from millpond.conf import OnChangedState
from millpond.layout import Column, TableSchema
from millpond.operators.kinds.registry import state_tables
from millpond.spec.functions import is_distinct
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.traits import option_traits
from millpond.spec.types import DataType, evolves, parse_type

_CAST = re.compile(r"CAST\(((?:[^()]|\([^()]*\))*) AS \w+(?:\(\d+(?:, ?\d+)?\))?\)")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_FLOATS = ("float", "double")
_WIDENED = frozenset(
    ("sum", "avg", "min", "max", "first", "last", "any_value", "min_by", "max_by", "bit_and", "bit_or", "bit_xor")
)
"""Functions whose state holds values of their inputs as numbers: a wider type reads them as they are."""


_VARIABLES = "variables"
"""What is pinned of a processor's state."""


class Evolved(NamedTuple):
    """A changed query that the state can follow.

    Attributes:
        query: with the names that the columns of its functions have in the state.
        said: what happens to the state, for people.
    """

    query: PinnedQuery
    said: tuple[str, ...]


_OF_VERSIONS = ("weighted", "merges_empty")
"""Options of functions that follow the version of Spark; the state is the same with them."""


class _RefusedError(Exception):
    """The state cannot follow; the text says why."""


def lasting(spec: OperatorSpec) -> dict[str, Any]:
    """What of a spec must not change between starts.

    What happens on overflow may, and how far sessions reach, and what follows the version of Spark, which may be
    upgraded. Whether sums are those of `try_sum` may not: these keep more.
    """
    found: dict[str, Any] = plain(spec.lasting)
    found.pop("gap", None)
    for call in found.get("calls", ()):
        if call["options"].get("eval_mode") != "try":
            call["options"].pop("eval_mode", None)
        for option in _OF_VERSIONS:
            call["options"].pop(option, None)
    return found


def named(spec: OperatorSpec, before: PinnedOperator) -> OperatorSpec:
    """A spec, its functions named as in what is pinned, if it has as many, and with variables that are only kept.

    Raises:
        StateIncompatibleError: what is pinned is of another version of Millpond.
    """
    try:
        earlier = msgspec.convert(before.spec, OperatorSpec)
    except msgspec.ValidationError:
        raise differing([f"{before.name}: {OTHER_VERSION}"], NAME, follows=False) from None
    spec = spec.keeping(earlier)
    calls = before.spec.get("calls") or []
    return _with_fields(spec, [call.get("field") for call in calls]) if len(calls) == len(spec.calls) else spec


def repinned(operator: PinnedOperator, spec: OperatorSpec, fields: int) -> PinnedOperator:
    """What is pinned of an operator with all that is named; `fields`: how many names there have been."""
    tables = {name: plain(table.schema) for name, table in state_tables(spec).items()}
    return msgspec.structs.replace(operator, spec=lasting(spec), tables=tables, fields=fields)


def evolved(
    before: PinnedQuery, shape: int, now: PinnedQuery, specs: Sequence[OperatorSpec], changed: OnChangedState
) -> Evolved | list[str]:
    """What a changed query is to be pinned as, or why the state cannot follow, a line for each reason.

    Args:
        before: the query that made the state. shape: its number.
        now: the query as it is. specs: of its operators.
        changed: which changes of functions are followed (`spark.millpond.onChangedState`).
    """
    if len(before.operators) != len(now.operators):
        return compare(before, now)
    pinned, as_before = [], []
    lines: list[str] = []
    said: list[str] = []
    for old, new, spec in zip(before.operators, now.operators, specs, strict=True):
        try:
            operator, told = _HOW[changed](old, new, spec)
        except _RefusedError as refused:
            lines.append(f"{new.name}: {refused}")
            continue
        pinned.append(operator)
        as_before.append(_BUT[changed](old, operator if changed == "keep" else new, spec))
        said += [f"{new.name}: {line}" for line in told]
    if lines:
        return lines
    lines = compare(before, msgspec.structs.replace(now, operators=tuple(as_before)))
    return lines or Evolved(msgspec.structs.replace(now, operators=tuple(pinned), parent=shape), tuple(said))


def _varied(old: PinnedOperator, new: PinnedOperator, spec: OperatorSpec) -> tuple[PinnedOperator, list[str]]:
    """One operator whose functions are those that it had; of a processor, variables come and go, as in Spark."""
    made = repinned(new, named(spec, old), old.fields)
    if _VARIABLES not in new.spec or old.spec.get("type") != new.spec.get("type"):
        return made, []
    before, now = ({one["name"]: one for one in each.spec[_VARIABLES]} for each in (old, made))
    for name in before.keys() & now.keys():
        what = f"the state variable {name}" if name in spec.parts else "its state"
        if before[name]["kind"] != now[name]["kind"]:
            raise _RefusedError(
                f"the query has {what} as a {now[name]['kind']}; its checkpoint as a {before[name]['kind']}"
            )
        if now[name]["evolves"]:
            _check_evolves(what, before[name], now[name])
        elif _nameless(before[name]) != _nameless(now[name]):
            raise _RefusedError(
                f"the query has {what} {_variable(now[name])}; its checkpoint {_variable(before[name])}"
            )
    told = [f"the state variable {name} is new" for name in now if name not in before]
    told += [
        f"fields of the state variable {name} have other names"
        if not now[name]["evolves"]
        else f"the state variable {name} was {_variable(before[name])}, and is {_variable(now[name])} now"
        for name in now
        if name in before and before[name] != now[name]
    ]
    return made, told + [f"the state variable {name} is deleted" for name in before if name not in now]


def _check_evolves(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a type that values of an earlier one cannot be read as; keys of maps and times to live stay as before.

    Values of every type that there was may still be there, as a field that is gone and comes back shows.
    """
    same = _nameless({**before, **{part: now[part] for part in ("value", "earlier")}}) == _nameless(now)
    for value in (before["value"], *reversed(before["earlier"])):
        if not same or not evolves(parse_type(value), parse_type(now["value"])):
            raise _RefusedError(
                f"[STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION] the query has {what} {_variable(now)}; its checkpoint "
                f"{_variable({**before, 'value': value})}, which cannot become that"
            )


def _nameless(variable: Mapping[str, Any]) -> dict[str, Any]:
    """A variable without the names of its types' fields: what is stored does not have them."""
    return {**variable, **{part: _types(parse_type(variable[part])) for part in ("key", "value") if variable[part]}}


def _types(dtype: DataType) -> DataType:
    fields = tuple((str(at), _types(inner)) for at, (_, inner) in enumerate(dtype.fields))
    return msgspec.structs.replace(dtype, fields=fields)


def _variable(plain_: Mapping[str, Any]) -> str:
    """A variable's type, for people."""
    key = f"{plain_['key']} → " if plain_["key"] else ""
    return f"of {key}{plain_['value']}" + (", with a time to live" if plain_["ttl_ms"] else "")


def _but_variables(old: PinnedOperator, new: PinnedOperator, spec: OperatorSpec) -> PinnedOperator:
    """A processor with the variables that it had, and the names of its key, so that all else can be compared."""
    if _VARIABLES not in new.spec or old.spec.get("type") != new.spec.get("type"):
        return repinned(new, named(spec, old), old.fields)
    as_before = {**new.spec, _VARIABLES: old.spec[_VARIABLES]}
    keys, old_keys = ([parse_type(key["type"]) for key in each.spec["columns"]] for each in (new, old))
    if list(map(_types, keys)) == list(map(_types, old_keys)):
        as_before["columns"] = old.spec["columns"]
        new = msgspec.structs.replace(new, name=old.name)
    return msgspec.structs.replace(new, spec=as_before, functions=old.functions, fields=old.fields, tables=old.tables)


def _but_texts(old: PinnedOperator, new: PinnedOperator, spec: OperatorSpec) -> PinnedOperator:
    """An operator whose functions are called as they were, where that may change and nothing else has."""
    if _VARIABLES in new.spec:
        return _but_variables(old, new, spec)
    same = spec.follows and new.spec == old.spec
    return msgspec.structs.replace(new, functions=old.functions) if same else new


def _but_functions(old: PinnedOperator, new: PinnedOperator, spec: OperatorSpec) -> PinnedOperator:
    """An operator with the functions that it had, if they may change, so that all else can be compared."""
    if old.spec.get("type") != new.spec.get("type"):
        return new
    if _VARIABLES in new.spec:
        return _but_variables(old, new, spec)
    if not spec.follows:
        return msgspec.structs.replace(new, fields=old.fields)
    kept: dict[str, Any] = {name: old.spec[name] for name in ("calls", "inputs") if name in old.spec}
    as_before = {**new.spec, **kept}
    same = as_before == old.spec
    return msgspec.structs.replace(
        new, spec=as_before, functions=old.functions, fields=old.fields, tables=old.tables if same else new.tables
    )


def _keep(old: PinnedOperator, new: PinnedOperator, spec: OperatorSpec) -> tuple[PinnedOperator, list[str]]:
    """One operator whose functions are those that it had, whatever they are called with."""
    if _VARIABLES in new.spec:
        return _varied(old, new, spec)
    kept = repinned(new, named(spec, old), old.fields)
    if old.functions == new.functions or not spec.follows or len(old.functions) != len(new.functions):
        return kept, []
    _check_kind(msgspec.convert(old.spec, OperatorSpec), spec)
    told = []
    for before, now in zip(old.functions, new.functions, strict=True):
        if before == now:
            continue
        if now in old.functions:
            raise _RefusedError(f"{now} stands at another place than before (with 'evolve', it is followed there)")
        told.append(f"{now} goes on with what was {before}")
    return kept, told


def _follow(old: PinnedOperator, new: PinnedOperator, spec: OperatorSpec) -> tuple[PinnedOperator, list[str]]:
    """One operator with its functions named, and what happens to them."""
    if _VARIABLES in new.spec:
        return _varied(old, new, spec)
    kept = repinned(new, named(spec, old), old.fields)
    texts_moved = old.functions != new.functions
    same = kept.spec.get("calls") == old.spec.get("calls") and kept.spec.get("inputs") == old.spec.get("inputs")
    if not spec.follows or old.spec.get("type") != new.spec.get("type"):
        return kept, []
    if same and not texts_moved:
        return kept, []
    _check_kind(msgspec.convert(old.spec, OperatorSpec), spec)
    calls: list[dict[str, Any]] = old.spec["calls"]
    if len(old.functions) != len(calls) or len(new.functions) != len(spec.calls):
        raise _RefusedError("functions of the user are called with all rows of a group")
    names = [call.get("field") if call.get("field") is not None else at for at, call in enumerate(calls)]
    found = _matched(old, new, spec)
    following = old.fields or len(calls)
    fields, told = [], []
    for at, text in enumerate(new.functions):
        if (source := found.get(at)) is not None:
            fields.append(names[source])
            continue
        fields.append(following)
        following += 1
        told.append(f"{text} is new: it counts the rows from now on")
    told += [
        f"{new.functions[at]} goes on with what was {old.functions[source]}"
        for at, source in sorted(found.items())
        if new.functions[at] != old.functions[source]
    ]
    places = [source for _, source in sorted(found.items())]
    if places != sorted(places):
        told.append("its functions are in another order")
    gone = set(range(len(calls))) - set(places)
    told += [f"{old.functions[at]} is gone, and what it had counted" for at in sorted(gone)]
    made = repinned(new, _with_fields(spec, fields), following)
    _check_tables(old, made, spec)
    return made, told


def _check_kind(before: OperatorSpec, now: OperatorSpec) -> None:
    """Refuse what has state of another kind than a row for each group, or gives out what it may have to take back."""
    if now.retracts or now.changes:
        raise _RefusedError(
            "its functions have changed, and rows that they read or give out may be taken back: what a function has "
            "not counted it cannot give back"
        )
    if before.keeps_rows or now.keeps_rows:
        raise _RefusedError("its functions have changed, and all rows of a group are kept, with what these read")
    if before.observed or now.observed:
        raise _RefusedError("its functions have changed, and rows of groups may be kept, with what these read")


def _matched(old: PinnedOperator, new: PinnedOperator, spec: OperatorSpec) -> dict[int, int]:
    """The functions that stay: the position of each, and the one that it had."""
    for texts in (old.functions, new.functions):
        for text, count in Counter(texts).items():
            if count > 1:
                raise _RefusedError(f"it has several functions called {text}, which cannot be told apart")
    before = {text: at for at, text in enumerate(old.functions)}
    found = {at: before[text] for at, text in enumerate(new.functions) if text in before}
    for at, source in found.items():
        reason = _differs(old.spec, source, new.spec, spec.calls[at], at)
        if reason is not None:
            raise _RefusedError(f"{new.functions[at]} {reason}")
    # Types that became wider bring casts with them, which do not change what is computed.
    bare = Counter(_bare(text) for text in old.functions), Counter(_bare(text) for text in new.functions)
    for at, text in enumerate(new.functions):
        alike = next((b for t, b in before.items() if b not in found.values() and _bare(t) == _bare(text)), None)
        if at in found or alike is None or any(counts[_bare(text)] > 1 for counts in bare):
            continue
        if _differs(old.spec, alike, new.spec, spec.calls[at], at) is None:
            found[at] = alike
    return found


def _bare(text: str) -> str:
    """The text of a function without casts."""
    while (shorter := _CAST.sub(r"\1", text)) != text:
        text = shorter
    return text


def _differs(before: Mapping[str, Any], source: int, now: Mapping[str, Any], new: AggregateCall, at: int) -> str | None:
    """Why the state of one function is not that of another, which is called alike; None if it is."""
    old, options = before["calls"][source], now["calls"][at]["options"]
    was, is_ = old["function"], new.function
    if was != is_ or bool(old["distinct"]) != new.distinct or (old["filter"] is None) != (new.filter is None):
        return "is another function, or has another DISTINCT or FILTER, than in its checkpoint"
    if old["options"] != options:
        before_, now_ = option_traits(msgspec.convert(old, AggregateCall)), option_traits(new)
        changed = [name for name in {**before_, **now_} if before_.get(name) != now_.get(name)]
        was_, is__ = (
            ", ".join(some.get(name, "has no such option") for name in changed) or "has other options"
            for some in (before_, now_)
        )
        return f"{is__}; its checkpoint's {was_}"
    types = [parse_type(before["inputs"][position]["type"]) for position in old["inputs"]]
    new_types = [parse_type(now["inputs"][position]["type"]) for position in new.inputs]
    if is_ == "count" and not is_distinct(new):
        return None
    if len(types) != len(new_types):
        return "has other arguments"
    for one, other in zip(types, new_types, strict=True):
        if one != other and not (is_ in _WIDENED and not is_distinct(new) and _wider(one, other)):
            return f"is of {_shown(other)}; its checkpoint's of {_shown(one)}, which is no narrower number of that kind"
    return None


def _wider(before: DataType, now: DataType) -> bool:
    for chain in (_INTEGERS, _FLOATS):
        if before.name in chain and now.name in chain:
            return chain.index(before.name) < chain.index(now.name)
    return before.name == now.name == "decimal" and before.scale == now.scale and before.precision < now.precision


def _shown(dtype: DataType) -> str:
    return f"decimal({dtype.precision},{dtype.scale})" if dtype.name == "decimal" else dtype.name


def _check_tables(old: PinnedOperator, made: PinnedOperator, spec: OperatorSpec) -> None:
    """Refuse functions whose columns would not be the same ones, and tables of distinct inputs that would change."""
    calls = [msgspec.convert(call, AggregateCall) for call in old.spec["calls"]]
    distinct, new_distinct = (
        [text for text, call in zip(texts, some, strict=True) if is_distinct(call)]
        for texts, some in ((old.functions, calls), (made.functions, spec.calls))
    )
    sides, new_sides = ({name: table for name, table in one.tables.items() if name != "main"} for one in (old, made))
    if distinct != new_distinct or sides != new_sides:
        raise _RefusedError(
            "functions of distinct inputs have come, gone, changed or moved: what inputs there were is known for all "
            "of them together"
        )
    before, now = (msgspec.convert(one.tables["main"], TableSchema) for one in (old, made))
    columns, new_columns = _by_field(before), _by_field(now)
    for call, text in zip(made.spec["calls"], made.functions, strict=True):
        field = str(call["field"])
        if field not in columns:
            continue
        pair = columns[field], new_columns[field]
        fits = len(pair[0]) == len(pair[1]) and all(
            one.null == other.null and (one.kind, other.kind) in _FITS for one, other in zip(*pair, strict=True)
        )
        if not fits:
            raise _RefusedError(f"{text} is of a wider type now, which keeps its state in another way")


_FITS = frozenset({("word", "word"), ("wide", "wide"), ("bytes", "bytes"), ("word", "wide")})


def _by_field(schema: TableSchema) -> dict[str, list[Column]]:
    found: dict[str, list[Column]] = {}
    for column in schema.values:
        field, dot, _ = column.name.partition(".")
        if dot:
            found.setdefault(field, []).append(column)
    return found


def _with_fields(spec: OperatorSpec, fields: Sequence[int | None]) -> OperatorSpec:
    if not spec.calls:
        return spec
    calls = tuple(msgspec.structs.replace(call, field=one) for call, one in zip(spec.calls, fields, strict=True))
    return msgspec.structs.replace(spec, calls=calls)


_HOW: Mapping[OnChangedState, Callable[..., tuple[PinnedOperator, list[str]]]] = {
    "error": _varied,
    "keep": _keep,
    "evolve": _follow,
}
_BUT: Mapping[OnChangedState, Callable[..., PinnedOperator]] = {
    "error": _but_variables,
    "keep": _but_texts,
    "evolve": _but_functions,
}
