"""Differences between the query that wrote a checkpoint and the query that is started, in terms of PySpark.

Each kind of operator describes itself (`Spec.traits`). This module aligns the operators of both queries, and their
functions, which have the texts of the query.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import chain, repeat
from typing import Any

import msgspec

from millpond.humanize import counted
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.spec.traits import Trait, option_traits

Plain = dict[str, Any]

OTHER_VERSION = "another version of Millpond made its state, which this one does not read"


def differences(before: Plain, now: Plain) -> list[str]:
    """Describe each difference that matters between two state schemas (plain data), one line each."""
    lines = []
    if before["key_groups"] != now["key_groups"]:
        lines.append(
            f"this version of Millpond has {now['key_groups']} key groups; the checkpoint has {before['key_groups']}"
        )
    lines += _operators(before["operators"], now["operators"])
    return lines + list(_between(before.get("between", []), now.get("between", [])))


def _operators(before: list[Plain], now: list[Plain]) -> Iterator[str]:
    titles, new_titles = ([operator["name"] for operator in operators] for operators in (before, now))
    if titles != new_titles and Counter(titles) == Counter(new_titles):
        yield f"the query has the stateful operators {_quoted(new_titles)}; its checkpoint {_quoted(titles)}"
        return
    if len(before) == len(now):
        pairs = list(zip(before, now, strict=True))
    else:
        yield (
            f"the query has {counted(len(now), 'stateful operator')} on Millpond; its checkpoint has "
            f"{counted(len(before), 'stateful operator')}"
        )
        pairs = []
        for tag, i, j, k, m in SequenceMatcher(None, titles, new_titles, autojunk=False).get_opcodes():
            if tag == "equal":
                pairs += zip(before[i:j], now[k:m], strict=True)
                continue
            yield from (f"the query has no '{title}'; its checkpoint has one" for title in titles[i:j])
            yield from (f"the query has '{title}'; its checkpoint has none" for title in new_titles[k:m])
    for old, new in pairs:
        yield from _operator(old, new)


def _operator(before: Plain, now: Plain) -> Iterator[str]:
    """Describe the differences between two operators. Their table layouts follow from the specs."""
    if before["spec"].get("type") != now["spec"].get("type"):
        yield f"the query has '{now['name']}' where its checkpoint has '{before['name']}'"
        return
    try:
        old, new = (msgspec.convert(operator["spec"], OperatorSpec) for operator in (before, now))
    except msgspec.ValidationError:
        yield f"{before['name']}: {OTHER_VERSION}"
        return
    unknown = before["spec"].keys() - {"type", *old.__struct_fields__}
    lines = [*_traits(old.traits, new.traits), *_calls(old, new, before, now)]
    lines += _computed(before.get("computed", []), now.get("computed", []))
    if not lines and before["name"] != now["name"]:
        lines = [f"the query has '{now['name']}'"]
    if not lines and (unknown or _lasting(old) != _lasting(new) or before.get("tables") != now.get("tables")):
        lines = [OTHER_VERSION]
    yield from (f"{before['name']}: {line}" for line in lines)


def _traits(before: Mapping[str, Trait], now: Mapping[str, Trait]) -> Iterator[str]:
    """Describe the traits in which two operators of one kind differ."""
    for respect in [*before, *(name for name in now if name not in before)]:
        old, new = (traits.get(respect, Trait("does without")) for traits in (before, now))
        if old.text != new.text:
            yield f"the query {new.text}; its checkpoint {old.text}"
        elif old != new:
            yield f"the query {new.exact}; its checkpoint {old.exact}"


def _lasting(spec: OperatorSpec) -> Any:
    """Return a spec as plain data, without the names that its functions' columns have in the state."""
    calls = [msgspec.structs.replace(call, field=None) for call in spec.calls]
    return msgspec.to_builtins(spec) | {"calls": msgspec.to_builtins(calls)}


def _between(before: list[Plain], now: list[Plain]) -> Iterator[str]:
    """Describe the differences in the expressions that Spark evaluates on a changelog between operators."""
    if len(before) != len(now):
        yield (
            "the query has operators whose rows change, or joins by computed keys or conditions, at other places than "
            "its checkpoint"
        )
        return
    for old, new in zip(before, now, strict=True):
        if old == new:
            continue
        lines = list(_computed(old["computes"], new["computes"]))
        if old["functions"] != new["functions"]:
            lines += _codes(old["functions"], new["functions"])
        if old["time_zones"] != new["time_zones"]:
            zones, new_zones = (", ".join(schema["time_zones"]) or "any" for schema in (old, new))
            lines.append(f"the query computes in the time zone {new_zones}; its checkpoint in {zones}")
        lines += _settings(old["settings"], new["settings"])
        if not lines and old["digest"] != new["digest"]:
            lines.append(f"the query's {', '.join(new['computes']) or 'columns'} are not what its checkpoint's were")
        yield from (f"between '{old['below']}' and '{old['above']}': {line}" for line in lines)


def _codes(before: list[list[str]], now: list[list[str]]) -> Iterator[str]:
    """Describe the user-defined functions whose code differs; `before` and `now` are pairs of name and code digest."""
    for name in sorted({name for name, _ in before} & {name for name, _ in now}):
        codes, new_codes = ([code for other, code in pairs if other == name] for pairs in (before, now))
        if codes != new_codes and all(codes + new_codes):  # an empty digest means that the code is unknown
            yield (
                f"the query's function {name} has other code than its checkpoint's (or refers to other code, or runs "
                "on another release of Python)"
            )


def _computed(before: list[str], now: list[str]) -> Iterator[str]:
    matcher = SequenceMatcher(None, before, now, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag != "equal":
            old, new = (", ".join(texts) or "nothing there" for texts in (before[i:j], now[k:m]))
            yield f"the query has {new}; its checkpoint has {old}"


def _settings(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            old, new = (settings.get(name, "unset") for settings in (before, now))
            yield f"the query runs with {name}={new}; its checkpoint with {old}"


def _calls(old: OperatorSpec, new: OperatorSpec, before: Plain, now: Plain) -> Iterator[str]:
    """Describe the differences between the functions of two operators."""
    olds, news = _Call.all(old, before), _Call.all(new, now)
    texts, new_texts = ([call.text for call in calls] for calls in (olds, news))
    same = Counter(repr(call.plain) for call in olds) == Counter(repr(call.plain) for call in news)
    moved = len(texts) == len(new_texts) and any(
        text != new_text and new_text in texts for text, new_text in zip(texts, new_texts, strict=True)
    )
    if same and (moved or [call.plain for call in olds] != [call.plain for call in news]):
        yield _order(olds, news)
        return
    # Positions of inputs depend on the preceding functions, so functions are matched by their text in the query if all
    # texts are known and unique.
    by_text = texts != new_texts and all(
        all(call.named for call in calls) and len(set(side)) == len(side)
        for calls, side in ((olds, texts), (news, new_texts))
    )
    if by_text and [text for text in texts if text in new_texts] != [text for text in new_texts if text in texts]:
        yield _order(olds, news)
        for call in olds:
            yield from call.changed(news[new_texts.index(call.text)]) if call.text in new_texts else [call.gone]
        yield from (call.new for call in news if call.text not in texts)
        return
    keys, new_keys = (texts, new_texts)
    if not by_text:
        keys, new_keys = ([repr(call.plain) for call in calls] for calls in (olds, news))
    for tag, i, j, k, m in SequenceMatcher(None, keys, new_keys, autojunk=False).get_opcodes():
        if tag == "equal":
            for old_call, new_call in zip(olds[i:j], news[k:m], strict=True):
                if old_call.differs(new_call):
                    yield old_call.replaced(new_call)
                elif by_text:
                    yield from old_call.changed(new_call)
            continue
        changed = min(j - i, m - k)
        for old_call, new_call in zip(olds[i : i + changed], news[k : k + changed], strict=True):
            yield from old_call.became(new_call)
        yield from (call.gone for call in olds[i + changed : j])
        yield from (call.new for call in news[k + changed : m])


def _order(before: Sequence[_Call], now: Sequence[_Call]) -> str:
    old, new = (", ".join(call.text for call in calls) for calls in (before, now))
    return f"the query computes its functions in the order {new}; its checkpoint in the order {old}"


class _Call:
    """One function of an operator, with the types of its inputs.

    Attributes:
        text: text for people.
        named: whether the text is from the query; else it is derived from the spec.
        plain: plain data that identifies the function. Equal inputs share the position of their first reader.
    """

    def __init__(self, call: AggregateCall, columns: Sequence[Field], text: str | None) -> None:
        self.types = [columns[position].type for position in call.inputs]
        self.call = call
        self.named = text is not None
        condition = " FILTER (WHERE …)" if call.filter is not None else ""
        arguments = f"{'DISTINCT ' if call.distinct else ''}{', '.join(self.types) or '*'}"
        self.text = text or f"{call.function}({arguments}){condition}"
        self.plain = (msgspec.to_builtins(msgspec.structs.replace(call, field=None)), self.types)

    @classmethod
    def all(cls, spec: OperatorSpec, pinned: Plain) -> list[_Call]:
        """Return the functions of an operator, with their texts from its schema as far as these go."""
        texts = chain(pinned.get("functions") or [], repeat(None))
        return [cls(call, spec.arguments, text) for call, text in zip(spec.calls, texts, strict=False)]

    @property
    def new(self) -> str:
        """Message: only the query has the function."""
        return f"the query computes {self.text}; its checkpoint does not"

    @property
    def gone(self) -> str:
        """Message: only the checkpoint has the function."""
        return f"the query does not compute {self.text}; its checkpoint does"

    def replaced(self, new: _Call) -> str:
        """Return the message that another function replaced this one."""
        return f"the query computes {new.text}; its checkpoint computes {self.text}"

    def differs(self, new: _Call) -> bool:
        """Return whether both texts are from queries and differ."""
        return self.named and new.named and self.text != new.text

    def became(self, new: _Call) -> Iterator[str]:
        """Describe the differences between this function and its replacement."""
        if self.text != new.text:
            yield self.replaced(new)
            return
        lines = list(self.changed(new))
        shared = (
            f"the query's {self.text} reads other columns than its checkpoint's, or shares them with other functions"
        )
        yield from lines or [shared]

    def changed(self, new: _Call) -> Iterator[str]:
        """Describe the differences from the same function in the new query; positions of inputs are ignored."""
        if self.types != new.types:
            old, types = (", ".join(side) or "*" for side in (self.types, new.types))
            yield f"the query computes {self.text} of {types}; its checkpoint of {old}"
        if self.call.type != new.call.type:
            yield f"the query's {self.text} gives {new.call.type}; its checkpoint's gives {self.call.type}"
        before, now = option_traits(self.call), option_traits(new.call)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                old, option = (options.get(name, "has no such option") for options in (before, now))
                yield f"the query's {self.text} {option}; its checkpoint's {old}"


def _quoted(titles: Sequence[str]) -> str:
    return ", ".join(f"'{title}'" for title in titles)
