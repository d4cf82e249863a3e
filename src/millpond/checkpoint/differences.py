"""What differs between the query that wrote a checkpoint and the one that is started, in the words of a PySpark user.

Both are plain data, as `query.json` has them. What is not known here is told by its path, so that nothing goes unsaid.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from millpond.words import counted, length

_QUOTED = re.compile(r"('(?:[^'\\]|\\.)*')")
_QUALIFIER = re.compile(r"(?:`[^`]+`|\b[A-Za-z_]\w*)\.(?=[`A-Za-z_])")

Plain = dict[str, Any]
_Both = tuple[Plain, Plain]


def differences(before: Plain, now: Plain) -> list[str]:
    """One line for each difference that matters between two pinned queries."""
    lines = []
    if before.get("key_groups") != now.get("key_groups"):
        lines.append(
            f"the state had {before.get('key_groups')} key groups, and the query asks for {now.get('key_groups')}"
        )
    lines += _operators(before.get("operators", []), now.get("operators", []))
    lines += _between(before.get("between", []), now.get("between", []))
    return lines + list(_others(before, now, {"key_groups", "operators", "between", "format"}))


def _operators(before: list[Plain], now: list[Plain]) -> Iterator[str]:
    titles, new_titles = ([one["name"] for one in some] for some in (before, now))
    if titles != new_titles and Counter(titles) == Counter(new_titles):
        yield f"the stateful operators stand in another order: {_quoted(titles)} became {_quoted(new_titles)}"
        return
    if len(before) == len(now):
        pairs = list(zip(before, now, strict=True))
    else:
        yield (
            f"{counted(len(before), 'stateful operator')} ran on Millpond, and "
            f"{'it is' if len(now) == 1 else 'there are'} {len(now)} now"
        )
        pairs = []
        for tag, i, j, k, m in SequenceMatcher(None, titles, new_titles, autojunk=False).get_opcodes():
            if tag == "equal":
                pairs += zip(before[i:j], now[k:m], strict=True)
                continue
            yield from (f"the operator '{title}' is gone" for title in titles[i:j])
            yield from (f"the operator '{title}' is new" for title in new_titles[k:m])
    for old, new in pairs:
        yield from _operator(old, new)


def _operator(before: Plain, now: Plain) -> Iterator[str]:
    """What differs between two operators; what their state looks like follows from the rest."""
    specs = before["spec"], now["spec"]
    if specs[0].get("type") != specs[1].get("type"):
        yield f"the operator '{before['name']}' became '{now['name']}'"
        return
    lines: list[str] = []
    told: set[str] = {"type"}
    for fields, tell in _TOLD:
        if any(field in spec for field in fields for spec in specs):
            try:
                lines += list(tell((before, now)))
            except (AttributeError, IndexError, KeyError, TypeError):  # of another version of Millpond
                continue
            told.update(fields)
    lines += _others(*specs, told)
    if not lines and before["name"] != now["name"]:
        lines = [f"it became '{now['name']}'"]
    if not lines and before.get("tables") != now.get("tables"):
        lines = ["its state is laid out in another way, as another version of Millpond does"]
    yield from (f"{before['name']}: {line}" for line in lines)


def _between(before: list[Plain], now: list[Plain]) -> Iterator[str]:
    """What differs in what Spark evaluates between operators where rows change."""
    if len(before) != len(now):
        yield "between operators where rows change stands something at other places than before"
        return
    for old, new in zip(before, now, strict=True):
        if old == new:
            continue
        lines = list(_computed(old["computes"], new["computes"]))
        if old["functions"] != new["functions"]:
            lines += _codes(old["functions"], new["functions"])
        if old["time_zones"] != new["time_zones"]:
            zones, new_zones = (", ".join(one["time_zones"]) or "of no account" for one in (old, new))
            lines.append(f"the time zone was {zones}, and is {new_zones} now")
        lines += _paths(old["settings"], new["settings"], "")
        if not lines and old["digest"] != new["digest"]:
            lines.append(f"{', '.join(new['computes']) or 'what stands there'} computes something else than before")
        yield from (f"between '{old['below']}' and '{old['above']}': {line}" for line in lines)


def _codes(before: list[list[str]], now: list[list[str]]) -> Iterator[str]:
    """Functions of the user whose code is another."""
    for name in sorted({name for name, _ in before} & {name for name, _ in now}):
        codes, new_codes = ([code for each, code in some if each == name] for some in (before, now))
        if codes != new_codes and all(codes + new_codes):  # the code of some cannot be told
            yield f"the code of the function {name} is another (or what it refers to, or Python's release)"


def _computed(before: list[str], now: list[str]) -> Iterator[str]:
    matcher = SequenceMatcher(None, before, now, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "replace":
            yield f"{', '.join(before[i:j])} became {', '.join(now[k:m])}"
        elif tag != "equal":
            yield f"{', '.join(before[i:j])} is gone" if tag == "delete" else f"{', '.join(now[k:m])} is new"


def _specs(both: _Both) -> tuple[Plain, Plain]:
    return both[0]["spec"], both[1]["spec"]


def _columns(what: str, before: Sequence[Plain], now: Sequence[Plain]) -> Iterator[str]:
    """What differs between two lists of columns, each with a name and a type."""
    types, new_types = ({one["name"]: one["type"] for one in some} for some in (before, now))
    names, new_names = list(types), list(new_types)
    common = [name for name in names if name in new_types]
    for name in common:
        if types[name] != new_types[name]:
            yield f"{what} {name} was {types[name]}, and is {new_types[name]} now"
    gone, new = ([name for name in some if name not in common] for some in (names, new_names))
    renamed = len(gone) == len(new) and [names.index(n) for n in gone] == [new_names.index(n) for n in new]
    if renamed:
        for old, name in zip(gone, new, strict=True):
            types_ = ("", "") if types[old] == new_types[name] else (f" ({types[old]})", f" ({new_types[name]})")
            yield f"{what} {old}{types_[0]} became {name}{types_[1]}"
    else:
        yield from (f"{what} {name} is gone" for name in gone)
        yield from (f"{what} {name} ({new_types[name]}) is new" for name in new)
    if [n for n in new_names if n in common] != common:
        yield f"{what}s are in another order: {', '.join(names)} became {', '.join(new_names)}"


def _keys(both: _Both) -> Iterator[str]:
    chosen = []
    for spec in _specs(both):
        keys = spec.get("keys", [])
        chosen.append([spec["columns"][key] if isinstance(key, int) else key for key in keys])
    yield from _columns("the key", *chosen)


def _kept(both: _Both) -> Iterator[str]:
    """Columns, unless all of them are keys, which are told as such."""
    if any(len(spec.get("columns", [])) > len(spec.get("keys", [])) for spec in _specs(both)):
        yield from _columns("the column", *(spec.get("columns", []) for spec in _specs(both)))


def _calls(both: _Both) -> Iterator[str]:
    """Functions: the text of each as the query has it, or else as it can be told from the spec."""
    before, now = ([_Call(one, number) for number in range(len(one["spec"].get("calls", [])))] for one in both)
    olds, news = ([call.plain for call in some] for some in (before, now))
    texts, new_texts = ([call.text for call in some] for some in (before, now))
    moved = len(texts) == len(new_texts) and any(
        old != new and new in texts for old, new in zip(texts, new_texts, strict=True)
    )
    if Counter(map(repr, olds)) == Counter(map(repr, news)) and (olds != news or moved):
        yield f"the functions are in another order: {_listed(before)} became {_listed(now)}"
        return
    # Where inputs stand changes with the functions before: what the query calls them tells functions apart, if it can.
    names, new_names = ([_unqualified(text) for text in some] for some in (texts, new_texts))
    by_name = names != new_names and all(
        all(call.named for call in some) and len(set(each)) == len(each)
        for some, each in ((before, names), (now, new_names))
    )
    if by_name and [name for name in names if name in new_names] != [name for name in new_names if name in names]:
        yield f"the functions are in another order: {_listed(before)} became {_listed(now)}"
        for name, call in zip(names, before, strict=True):
            yield from call.changed(now[new_names.index(name)]) if name in new_names else [f"{call.text} is gone"]
        yield from (f"{call.text} is new" for name, call in zip(new_names, now, strict=True) if name not in names)
        return
    keys = (names, new_names) if by_name else (list(map(repr, olds)), list(map(repr, news)))
    matcher = SequenceMatcher(None, *keys, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            for old, new in zip(before[i:j], now[k:m], strict=True):
                if old.differs(new):
                    yield f"{old.text} became {new.text}"
                elif by_name:
                    yield from old.changed(new)
            continue
        changed = min(j - i, m - k)
        for old, new in zip(before[i : i + changed], now[k : k + changed], strict=True):
            yield from old.became(new)
        yield from (f"{call.text} is gone" for call in before[i + changed : j])
        yield from (f"{call.text} is new" for call in now[k + changed : m])


def _unqualified(text: str) -> str:
    """SQL with the last parts of names only: what comes before them are views and aliases, or structs."""
    return "".join(part if part[:1] == "'" else _QUALIFIER.sub("", part) for part in _QUOTED.split(text))


class _Call:
    """One function of an operator, its inputs by their types instead of their positions."""

    def __init__(self, operator: Plain, number: int) -> None:
        spec = operator["spec"]
        call = spec["calls"][number]
        columns = spec.get("inputs") or spec.get("columns") or []
        self.types = [columns[position]["type"] for position in call.get("inputs", [])]
        self.call = call = {key: value for key, value in call.items() if key != "field"}
        texts = operator.get("functions") or []
        self.named = len(texts) == len(spec["calls"])
        self.text = texts[number] if number < len(texts) else self._made()
        # Positions of inputs are those of the first function that reads them, so they tell equal arguments apart.
        self.plain = {**call, "types": self.types, **call.get("options", {})}
        if spec.get("preceding"):
            self.plain["preceding rows"] = spec["preceding"][number]

    def _made(self) -> str:
        arguments = ", ".join(self.types) or "*"
        condition = " filter" if self.call.get("filter") is not None else ""
        return f"{self.call['function']}({'distinct ' if self.call.get('distinct') else ''}{arguments}){condition}"

    def differs(self, new: _Call) -> bool:
        """Whether both are in the words of the query, and these are others, but for the names of views and aliases."""
        return self.named and new.named and _unqualified(self.text) != _unqualified(new.text)

    def became(self, new: _Call) -> Iterator[str]:
        """What differs between this and the function that stands in its place."""
        if self.text != new.text:
            yield f"{self.text} became {new.text}"
            return
        lines = list(self.changed(new))
        yield from lines or [f"{self.text} reads other columns, or the functions share them in another way"]

    def changed(self, new: _Call) -> Iterator[str]:
        """What differs between this and the same function, but for where its inputs stand."""
        if self.types != new.types:
            yield f"{self.text} was of {', '.join(self.types)}, and is of {', '.join(new.types)} now"
        if self.call.get("type") != new.call.get("type"):
            yield f"{self.text} gave {self.call.get('type')}, and gives {new.call.get('type')} now"
        for line in _others(self.plain, new.plain, {"inputs", "types", "type", "filter", "options"}):
            yield f"{self.text}: {line}"


def _inputs(both: _Both) -> Iterator[str]:
    """What functions read: told with the functions, where these differ."""
    before, now = (spec.get("inputs", []) for spec in _specs(both))
    if before != now and not list(_calls(both)):
        yield f"its functions read columns of types {_types(before)}, and read {_types(now)} now"


def _output_mode(both: _Both) -> Iterator[str]:
    yield from _was(both, "output_mode", "the output mode")


def _time(both: _Both) -> Iterator[str]:
    before, now = (spec.get("time") for spec in _specs(both))
    if before == now:
        return
    if before is None or now is None:
        said = "had no watermark, and has one now" if before is None else "had a watermark, and has none now"
        yield f"event time {said}"
        return
    windows, new_windows = before.get("windows"), now.get("windows")
    if windows is not None and new_windows is not None:
        for field, what in (("size", "windows"), ("slide", "slides"), ("offset", "offsets of windows")):
            old, new = windows.get(field), new_windows.get(field)
            if old != new and not (field == "slide" and _tumbling(windows) and _tumbling(new_windows)):
                yield f"{what} of {length(old)} became {what} of {length(new)}"
        if windows.get("shared") != new_windows.get("shared"):
            yield "sliding windows share their state in another way"
    elif windows != new_windows:
        kinds = ("times", "windows") if windows is None else ("windows", "times")
        yield "it grouped by {}, and groups by {} now".format(*kinds)
    if before.get("column") != now.get("column"):
        yield "the event time stands at another place among its columns"
    yield from _lag(before.get("lag_ms"), now.get("lag_ms"))
    yield from _others(before, now, {"windows", "column", "lag_ms"}, "time")


def _tumbling(windows: Plain) -> bool:
    return bool(windows.get("size") == windows.get("slide"))


def _lag(before: int | None, now: int | None) -> Iterator[str]:
    if before != now:
        old, new = (_after(lag) for lag in (before, now))
        yield f"its watermark came {old}, and comes {new} now (a watermark, or a range of time below it, has changed)"


def _after(lag_ms: int | None) -> str:
    return "no watermark" if lag_ms is None else f"{length(lag_ms * 1000)} after the query's"


def _spec_lag(both: _Both) -> Iterator[str]:
    yield from _lag(*(spec.get("lag_ms") for spec in _specs(both)))


def _window(both: _Both) -> Iterator[str]:
    yield from _columns("the session window", *([spec["window"]] for spec in _specs(both)))


def _pattern(both: _Both) -> Iterator[str]:
    yield from _was(both, "pattern", "how its groups are kept (spark.millpond.store.pattern)")


def _changelog(both: _Both) -> Iterator[str]:
    for field, some, none in (
        ("retracts", "the rows that it reads change", "the rows that it reads only come"),
        (
            "changes",
            "it tells also which rows are gone (spark.millpond.changes, or what is above)",
            "it tells new rows",
        ),
    ):
        before, now = (bool(spec.get(field)) for spec in _specs(both))
        if before != now:
            yield f"in the checkpoint {some if before else none}; now {some if now else none}"


def _rank(both: _Both) -> Iterator[str]:
    yield from _was(both, "function", "the rank", lambda name: f"{name}()")
    yield from _was(both, "limit", "the last rank that is kept")


def _order(both: _Both) -> Iterator[str]:
    before, now = (", ".join(_by(spec, each) for each in spec.get("order", [])) for spec in _specs(both))
    if before != now:
        yield f"the order was by {before or 'nothing'}, and is by {now or 'nothing'} now"


def _by(spec: Plain, each: Plain) -> str:
    nulls = f" nulls {'last' if each.get('nulls_last') else 'first'}"
    standard = bool(each.get("descending")) == bool(each.get("nulls_last"))
    name = spec["columns"][each["column"]]["name"]
    return f"{name}{' desc' if each.get('descending') else ''}{'' if standard else nulls}"


def _join(both: _Both) -> Iterator[str]:
    yield from _was(both, "kind", "the join", lambda kind: kind.replace("_", " "))
    for field, what in (("earliest", "the least"), ("latest", "the greatest")):
        yield from _was(both, field, f"{what} time between the left row and the right one", _bound)
    before, now = (_condition(spec.get("condition"), spec) for spec in _specs(both))
    if before != now:
        yield f"the condition was {before}, and is {now} now"


def _bound(microseconds: int | None) -> str:
    return "unbounded" if microseconds is None else length(microseconds)


def _condition(condition: Any, spec: Plain) -> str:
    if condition is None:
        return "none"
    if not isinstance(condition, list) or not condition:
        return repr(condition)
    head, *rest = condition
    if head in ("left", "right") and len(rest) == 1:
        columns = [column["name"] for column in spec[head]["columns"]]
        names = [name for name, place in zip(columns, spec[head]["places"], strict=True) if place == rest[0]]
        return f"{head}.{names[0] if names else rest[0]}"
    parts = [_condition(part, spec) for part in rest]
    if len(parts) == 1:
        return f"{parts[0]} is null" if head == "isnull" else f"{head} ({parts[0]})"
    return "(" + f" {head} ".join(parts) + ")"


def _sides(both: _Both) -> Iterator[str]:
    for name in ("left", "right"):
        before, now = (spec[name] for spec in _specs(both))
        lines = list(_columns(f"the {name} column", before["columns"], now["columns"]))
        for field, what in (("expiry_ms", "rows are kept"), ("expiry_cap_ms", "rows are kept at most")):
            kept, kept_now = (_expiry(side.get(field)) for side in (before, now))
            if kept != kept_now:
                lines.append(f"{name} {what} {kept} in the checkpoint, and {kept_now} now")
        if before.get("late") != now.get("late"):
            lines.append(f"which {name} rows are late is told by another column")
        if not lines:
            old, new = ({**side, "values": [value["type"] for value in side["values"]]} for side in (before, now))
            lines += _others(old, new, {"columns", "expiry_ms", "expiry_cap_ms", "late"}, name)
        yield from lines


def _expiry(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "for ever"
    return f"until the watermark is {length(-milliseconds * 1000)} past them"


def _was(both: _Both, field: str, what: str, shown: Callable[[Any], str] = str) -> Iterator[str]:
    before, now = (spec.get(field) for spec in _specs(both))
    if before != now:
        yield f"{what} was {shown(before)}, and is {shown(now)} now"


_TOLD: tuple[tuple[tuple[str, ...], Callable[[_Both], Iterator[str]]], ...] = (
    (("kind", "earliest", "latest", "condition"), _join),
    (("function", "limit"), _rank),
    (("keys",), _keys),
    (("columns",), _kept),
    (("window",), _window),
    (("time",), _time),
    (("lag_ms",), _spec_lag),
    (("calls", "preceding"), _calls),
    (("inputs",), _inputs),
    (("order",), _order),
    (("left", "right"), _sides),
    (("output_mode",), _output_mode),
    (("pattern",), _pattern),
    (("retracts", "changes"), _changelog),
)
"""Fields of a spec → how a difference between them is told."""


def _paths(before: Any, now: Any, where: str) -> Iterator[str]:
    """Differences of any plain data, by their paths."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from _parts(before, now, key, f"{where}.{key}" if where else str(key), key in before, key in now)
    elif isinstance(before, list) and isinstance(now, list):
        for index in range(max(len(before), len(now))):
            yield from _parts(before, now, index, f"{where}[{index}]", index < len(before), index < len(now))
    elif before != now:
        yield f"{where} was {before!r}, and is {now!r} now"


def _parts(before: Any, now: Any, key: Any, path: str, was: bool, is_: bool) -> Iterator[str]:
    if was and is_:
        yield from _paths(before[key], now[key], path)
    else:
        yield f"{path} was {before[key]!r}, and is gone" if was else f"{path} is new: {now[key]!r}"


def _others(before: Plain, now: Plain, told: set[str], where: str = "") -> Iterator[str]:
    """Differences in other fields than those that are told already."""
    rest, new_rest = ({key: value for key, value in one.items() if key not in told} for one in (before, now))
    yield from _paths(rest, new_rest, where)


def _quoted(titles: Sequence[str]) -> str:
    return ", ".join(f"'{title}'" for title in titles)


def _listed(calls: Sequence[_Call]) -> str:
    return ", ".join(call.text for call in calls)


def _types(columns: Sequence[Plain]) -> str:
    return ", ".join(column["type"] for column in columns) or "none"
