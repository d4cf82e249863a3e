"""Evolution of the state schema: whether the state of a query can be used after the query has changed.

The state can be used if each of its rows can be read as a row of the new query. The keys stay. Functions that stay keep
their columns, removed functions lose theirs, and new functions start as if no row had come so far. Functions are
matched by their calls, not by their position or their name in the result. Other changes are refused, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from millpond.checkpoint.state_schema import QUERY_FILE, OperatorSchema, StateSchema, plain
from millpond.conf import OnChangedState
from millpond.layout import Column, TableSchema
from millpond.operators.kinds.registry import state_tables
from millpond.query.schema.comparison import compare, schema_mismatch_error, with_old_keys
from millpond.query.schema.differences import OTHER_VERSION
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
"""Functions whose state holds input values as numbers, which a wider type can read without conversion."""

_VARIABLES = "variables"
"""Key of a processor's state variables in its spec."""


class EvolvedSchema(NamedTuple):
    """A changed query that the state can follow.

    Attributes:
        query: the new state schema, with the state's names for the columns of its functions.
        messages: messages about changes of the state.
    """

    query: StateSchema
    messages: tuple[str, ...]


_VERSION_OPTIONS = ("weighted", "merges_empty")
"""Options of functions that depend on the version of Spark and do not change the state."""


class _RefusedError(Exception):
    """The state cannot be used by the changed query; the text gives the reason."""


def persistent_spec(spec: OperatorSpec) -> dict[str, Any]:
    """Return the parts of a spec that must not change between starts.

    These may change: the reaction to overflow, the gap of sessions, and whatever depends on the version of Spark, which
    may be upgraded: some options of functions, the order of a join's sides, the lag above a left semi join. No other
    lag needs a comparison: it follows from the specs of operators below. A change from or to `try_sum` is not allowed,
    because its state holds more.
    """
    plain_spec: dict[str, Any] = plain(spec.compatibility_spec.with_lag(0))
    plain_spec.pop("gap", None)
    for call in plain_spec.get("calls", ()):
        if call["options"].get("eval_mode") != "try":
            call["options"].pop("eval_mode", None)
        for option in _VERSION_OPTIONS:
            call["options"].pop(option, None)
    return plain_spec


def with_state_names(spec: OperatorSpec, before: OperatorSchema) -> OperatorSpec:
    """Return a spec with the state schema's names of functions, if their number is the same, and its kept variables.

    Raises:
        StateIncompatibleError: the state schema was written by another version of Millpond.
    """
    try:
        earlier = msgspec.convert(before.spec, OperatorSpec)
    except msgspec.ValidationError:
        raise schema_mismatch_error([f"{before.name}: {OTHER_VERSION}"], QUERY_FILE, follows=False) from None
    spec = spec.with_idle_state(earlier)
    calls = before.spec.get("calls") or []
    return _with_fields(spec, [call.get("field") for call in calls]) if len(calls) == len(spec.calls) else spec


def new_operator_schema(operator: OperatorSchema, spec: OperatorSpec, fields: int) -> OperatorSchema:
    """Return the state schema of an operator with named functions; `fields` is the number of names used so far."""
    tables = {name: plain(table.schema) for name, table in state_tables(spec).items()}
    return msgspec.structs.replace(operator, spec=persistent_spec(spec), tables=tables, fields=fields)


def evolve_schema(
    before: StateSchema, number: int, now: StateSchema, specs: Sequence[OperatorSpec], changed: OnChangedState
) -> EvolvedSchema | list[str]:
    """Return the state schema of a changed query, or the reasons why it cannot use the state.

    Args:
        before: the state schema of the query that made the state.
        number: its number.
        now: the state schema of the new query.
        specs: the operators of the new query.
        changed: the allowed changes of functions (`spark.millpond.onChangedState`).
    """
    if len(before.operators) != len(now.operators):
        return compare(before, now)
    pinned, as_before = [], []
    lines: list[str] = []
    changes: list[str] = []
    for old, new, spec in zip(before.operators, now.operators, specs, strict=True):
        try:
            operator, messages = _EVOLVE_BY_SETTING[changed](old, new, spec)
        except _RefusedError as refused:
            lines.append(f"{new.name}: {refused}")
            continue
        pinned.append(operator)
        # Keys under another alias are the same keys, also where functions change with them.
        comparable = with_old_keys(operator if changed == "keep" else new, old)
        as_before.append(_COMPARABLE_BY_SETTING[changed](old, comparable, spec))
        changes += [f"{new.name}: {line}" for line in messages]
    if lines:
        return lines
    lines = compare(before, msgspec.structs.replace(now, operators=tuple(as_before)))
    return lines or EvolvedSchema(msgspec.structs.replace(now, operators=tuple(pinned), parent=number), tuple(changes))


def _evolve_variables(old: OperatorSchema, new: OperatorSchema, spec: OperatorSpec) -> tuple[OperatorSchema, list[str]]:
    """Evolve an operator with unchanged functions; a processor may gain and lose variables, as in Spark."""
    operator = new_operator_schema(new, with_state_names(spec, old), old.fields)
    if _VARIABLES not in new.spec or old.spec.get("type") != new.spec.get("type"):
        return operator, []
    before, now = ({variable["name"]: variable for variable in schema.spec[_VARIABLES]} for schema in (old, operator))
    for name in before.keys() & now.keys():
        label = f"the state variable {name}" if name in spec.parts else "its state"
        if before[name]["kind"] != now[name]["kind"]:
            raise _RefusedError(
                f"the query has {label} as a {now[name]['kind']}; its checkpoint as a {before[name]['kind']}"
            )
        if now[name]["evolves"]:
            _check_evolves(label, before[name], now[name])
        elif _without_field_names(before[name]) != _without_field_names(now[name]):
            raise _RefusedError(
                f"the query has {label} {_variable_text(now[name])}; its checkpoint {_variable_text(before[name])}"
            )
    messages = [f"the state variable {name} is new" for name in now if name not in before]
    messages += [
        f"fields of the state variable {name} have other names"
        if not now[name]["evolves"]
        else f"the state variable {name} was {_variable_text(before[name])}, and is {_variable_text(now[name])} now"
        for name in now
        if name in before and before[name] != now[name]
    ]
    return operator, messages + [f"the state variable {name} is deleted" for name in before if name not in now]


def _check_evolves(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a new type that cannot read values of an earlier type; map keys and times to live must not change.

    The state may hold values of all earlier types, so that a field that was removed and added again may be present.
    """
    same = _without_field_names(
        {**before, **{part: now[part] for part in ("value", "earlier")}}
    ) == _without_field_names(now)
    for value in (before["value"], *reversed(before["earlier"])):
        if not same or not evolves(parse_type(value), parse_type(now["value"])):
            raise _RefusedError(
                f"[STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION] the query has {what} {_variable_text(now)}; its "
                f"checkpoint {_variable_text({**before, 'value': value})}, which cannot become that"
            )


def _without_field_names(variable: Mapping[str, Any]) -> dict[str, Any]:
    """Return a variable without the field names in its types: stored values do not have them."""
    return {
        **variable,
        **{part: _numbered_fields(parse_type(variable[part])) for part in ("key", "value") if variable[part]},
    }


def _numbered_fields(dtype: DataType) -> DataType:
    fields = tuple((str(position), _numbered_fields(inner)) for position, (_, inner) in enumerate(dtype.fields))
    return msgspec.structs.replace(dtype, fields=fields)


def _variable_text(plain_: Mapping[str, Any]) -> str:
    """Format the type of a variable for messages."""
    key = f"{plain_['key']} → " if plain_["key"] else ""
    return f"of {key}{plain_['value']}" + (", with a time to live" if plain_["ttl_ms"] else "")


def _with_old_variables(old: OperatorSchema, new: OperatorSchema, spec: OperatorSpec) -> OperatorSchema:
    """Return a processor with its old variables and key names, so that everything else can be compared."""
    if _VARIABLES not in new.spec or old.spec.get("type") != new.spec.get("type"):
        return new_operator_schema(new, with_state_names(spec, old), old.fields)
    as_before = {**new.spec, _VARIABLES: old.spec[_VARIABLES]}
    keys, old_keys = ([parse_type(key["type"]) for key in schema.spec["columns"]] for schema in (new, old))
    if list(map(_numbered_fields, keys)) == list(map(_numbered_fields, old_keys)):
        as_before["columns"] = old.spec["columns"]
        new = msgspec.structs.replace(new, name=old.name)
    return msgspec.structs.replace(new, spec=as_before, functions=old.functions, fields=old.fields, tables=old.tables)


def _with_old_calls(old: OperatorSchema, new: OperatorSchema, spec: OperatorSpec) -> OperatorSchema:
    """Return an operator with its old calls of functions, if only these have changed and may change."""
    if _VARIABLES in new.spec:
        return _with_old_variables(old, new, spec)
    same = spec.facts.functions_may_change and new.spec == old.spec
    return msgspec.structs.replace(new, functions=old.functions) if same else new


def _with_old_functions(old: OperatorSchema, new: OperatorSchema, spec: OperatorSpec) -> OperatorSchema:
    """Return an operator with its old functions, if they may change, so that everything else can be compared."""
    if old.spec.get("type") != new.spec.get("type"):
        return new
    if _VARIABLES in new.spec:
        return _with_old_variables(old, new, spec)
    if not spec.facts.functions_may_change:
        return msgspec.structs.replace(new, fields=old.fields)
    kept: dict[str, Any] = {name: old.spec[name] for name in ("calls", "inputs") if name in old.spec}
    as_before = {**new.spec, **kept}
    same = as_before == old.spec
    return msgspec.structs.replace(
        new, spec=as_before, functions=old.functions, fields=old.fields, tables=old.tables if same else new.tables
    )


def _keep_functions(old: OperatorSchema, new: OperatorSchema, spec: OperatorSpec) -> tuple[OperatorSchema, list[str]]:
    """Evolve an operator that keeps its functions by position, with new arguments (`keep`)."""
    if _VARIABLES in new.spec:
        return _evolve_variables(old, new, spec)
    kept = new_operator_schema(new, with_state_names(spec, old), old.fields)
    if (
        old.functions == new.functions
        or not spec.facts.functions_may_change
        or len(old.functions) != len(new.functions)
    ):
        return kept, []
    _check_kind(msgspec.convert(old.spec, OperatorSpec), spec)
    messages = []
    for before, now in zip(old.functions, new.functions, strict=True):
        if before == now:
            continue
        # By position, the function would go on with the values of another function.
        if now in old.functions:
            raise _RefusedError(f"{now} stands at another place than before (with 'evolve', it is followed there)")
        messages.append(f"{now} goes on with what was {before}")
    return kept, messages


def _match_functions(old: OperatorSchema, new: OperatorSchema, spec: OperatorSpec) -> tuple[OperatorSchema, list[str]]:
    """Evolve an operator whose functions are matched by their calls (`evolve`), with messages about the changes."""
    if _VARIABLES in new.spec:
        return _evolve_variables(old, new, spec)
    kept = new_operator_schema(new, with_state_names(spec, old), old.fields)
    texts_moved = old.functions != new.functions
    same = kept.spec.get("calls") == old.spec.get("calls") and kept.spec.get("inputs") == old.spec.get("inputs")
    if not spec.facts.functions_may_change or old.spec.get("type") != new.spec.get("type"):
        return kept, []
    if same and not texts_moved:
        return kept, []
    _check_kind(msgspec.convert(old.spec, OperatorSpec), spec)
    calls: list[dict[str, Any]] = old.spec["calls"]
    if len(old.functions) != len(calls) or len(new.functions) != len(spec.calls):
        raise _RefusedError("functions of the user are called with all rows of a group")
    names = [call.get("field") if call.get("field") is not None else position for position, call in enumerate(calls)]
    matches = _match_by_call(old, new, spec)
    # A removed function's number is not used again: a new function would read its old column.
    following = old.fields or len(calls)
    fields, messages = [], []
    for position, text in enumerate(new.functions):
        if (source := matches.get(position)) is not None:
            fields.append(names[source])
            continue
        fields.append(following)
        following += 1
        messages.append(f"{text} is new: it counts the rows from now on")
    messages += [
        f"{new.functions[position]} goes on with what was {old.functions[source]}"
        for position, source in sorted(matches.items())
        if new.functions[position] != old.functions[source]
    ]
    places = [source for _, source in sorted(matches.items())]
    if places != sorted(places):
        messages.append("its functions are in another order")
    removed = set(range(len(calls))) - set(places)
    messages += [f"{old.functions[position]} is gone, and what it had counted" for position in sorted(removed)]
    evolved_operator = new_operator_schema(new, _with_fields(spec, fields), following)
    _check_tables(old, evolved_operator, spec)
    return evolved_operator, messages


def _check_kind(before: OperatorSpec, now: OperatorSpec) -> None:
    """Refuse operators whose state is not one row for each group, and operators with a changelog."""
    if now.retracts or now.changes:
        raise _RefusedError(
            "its functions have changed, and rows that they read or give out may be taken back: what a function has "
            "not counted it cannot give back"
        )
    if before.keeps_rows or now.keeps_rows:
        raise _RefusedError("its functions have changed, and all rows of a group are kept, with what these read")
    if before.adaptive or now.adaptive:
        raise _RefusedError("its functions have changed, and rows of groups may be kept, with what these read")


def _match_by_call(old: OperatorSchema, new: OperatorSchema, spec: OperatorSpec) -> dict[int, int]:
    """Match the functions that stay: return the old position of each by its new position."""
    for texts in (old.functions, new.functions):
        for text, count in Counter(texts).items():
            if count > 1:
                raise _RefusedError(f"it has several functions called {text}, which cannot be distinguished")
    before = {text: position for position, text in enumerate(old.functions)}
    matches = {position: before[text] for position, text in enumerate(new.functions) if text in before}
    for position, source in matches.items():
        reason = _differs(old.spec, source, new.spec, spec.calls[position], position)
        if reason is not None:
            raise _RefusedError(f"{new.functions[position]} {reason}")
    # Types that became wider bring casts with them, which do not change what is computed.
    bare = Counter(_bare(text) for text in old.functions), Counter(_bare(text) for text in new.functions)
    for position, text in enumerate(new.functions):
        candidate = next((b for t, b in before.items() if b not in matches.values() and _bare(t) == _bare(text)), None)
        if position in matches or candidate is None or any(counts[_bare(text)] > 1 for counts in bare):
            continue
        if _differs(old.spec, candidate, new.spec, spec.calls[position], position) is None:
            matches[position] = candidate
    return matches


def _bare(text: str) -> str:
    """Return the text of a function without casts."""
    while (shorter := _CAST.sub(r"\1", text)) != text:
        text = shorter
    return text


def _differs(
    before: Mapping[str, Any], source: int, now: Mapping[str, Any], new: AggregateCall, position: int
) -> str | None:
    """Return why a function cannot use the state of an old one with the same call; None if it can."""
    old, options = before["calls"][source], now["calls"][position]["options"]
    was, is_ = old["function"], new.function
    if was != is_ or bool(old["distinct"]) != new.distinct or (old["filter"] is None) != (new.filter is None):
        return "is another function, or has another DISTINCT or FILTER, than in its checkpoint"
    if old["options"] != options:
        before_, now_ = option_traits(msgspec.convert(old, AggregateCall)), option_traits(new)
        changed = [name for name in {**before_, **now_} if before_.get(name) != now_.get(name)]
        was_, is__ = (
            ", ".join(traits.get(name, "has no such option") for name in changed) or "has other options"
            for traits in (before_, now_)
        )
        return f"{is__}; its checkpoint's {was_}"
    types = [parse_type(before["inputs"][position]["type"]) for position in old["inputs"]]
    new_types = [parse_type(now["inputs"][position]["type"]) for position in new.inputs]
    if is_ == "count" and not is_distinct(new):
        return None
    if len(types) != len(new_types):
        return "has other arguments"
    for stored, type_ in zip(types, new_types, strict=True):
        if stored != type_ and not (is_ in _WIDENED and not is_distinct(new) and _wider(stored, type_)):
            return (
                f"is of {_shown(type_)}; its checkpoint's of {_shown(stored)}, which is no narrower number of that kind"
            )
    return None


def _wider(before: DataType, now: DataType) -> bool:
    for chain in (_INTEGERS, _FLOATS):
        if before.name in chain and now.name in chain:
            return chain.index(before.name) < chain.index(now.name)
    return before.name == now.name == "decimal" and before.scale == now.scale and before.precision < now.precision


def _shown(dtype: DataType) -> str:
    return f"decimal({dtype.precision},{dtype.scale})" if dtype.name == "decimal" else dtype.name


def _check_tables(old: OperatorSchema, evolved: OperatorSchema, spec: OperatorSpec) -> None:
    """Refuse functions whose state columns differ, and changes of the tables of distinct inputs."""
    calls = [msgspec.convert(call, AggregateCall) for call in old.spec["calls"]]
    distinct, new_distinct = (
        [text for text, call in zip(texts, calls_of, strict=True) if is_distinct(call)]
        for texts, calls_of in ((old.functions, calls), (evolved.functions, spec.calls))
    )
    sides, new_sides = (
        {name: table for name, table in schema.tables.items() if name != "main"} for schema in (old, evolved)
    )
    if distinct != new_distinct or sides != new_sides:
        raise _RefusedError(
            "functions of distinct inputs have come, gone, changed or moved: what inputs there were is known for all "
            "of them together"
        )
    before, now = (msgspec.convert(schema.tables["main"], TableSchema) for schema in (old, evolved))
    columns, new_columns = _by_field(before), _by_field(now)
    for call, text in zip(evolved.spec["calls"], evolved.functions, strict=True):
        field = str(call["field"])
        if field not in columns:
            continue
        pair = columns[field], new_columns[field]
        fits = len(pair[0]) == len(pair[1]) and all(
            column.null == new_column.null and (column.kind, new_column.kind) in _COMPATIBLE_KINDS
            for column, new_column in zip(*pair, strict=True)
        )
        if not fits:
            raise _RefusedError(f"{text} is of a wider type now, which keeps its state in another way")


_COMPATIBLE_KINDS = frozenset({("word", "word"), ("wide", "wide"), ("bytes", "bytes"), ("word", "wide")})


def _by_field(schema: TableSchema) -> dict[str, list[Column]]:
    columns: dict[str, list[Column]] = {}
    for column in schema.values:
        field, dot, _ = column.name.partition(".")
        if dot:
            columns.setdefault(field, []).append(column)
    return columns


def _with_fields(spec: OperatorSpec, fields: Sequence[int | None]) -> OperatorSpec:
    if not spec.calls:
        return spec
    calls = tuple(msgspec.structs.replace(call, field=field) for call, field in zip(spec.calls, fields, strict=True))
    return msgspec.structs.replace(spec, calls=calls)


_EVOLVE_BY_SETTING: Mapping[OnChangedState, Callable[..., tuple[OperatorSchema, list[str]]]] = {
    "error": _evolve_variables,
    "keep": _keep_functions,
    "evolve": _match_functions,
}
_COMPARABLE_BY_SETTING: Mapping[OnChangedState, Callable[..., OperatorSchema]] = {
    "error": _with_old_variables,
    "keep": _with_old_calls,
    "evolve": _with_old_functions,
}
