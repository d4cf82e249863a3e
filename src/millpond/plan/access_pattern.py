"""The static choice of a store: how an operator will access its state, told by the operator.

(FlowKV §3.1; APSys '18 §4.2.)
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from millpond.spec.functions import FUNCTIONS, observed, supported_spec, whole_sessions, whole_windows
from millpond.spec.operators import (
    AggregateSpec,
    JoinSpec,
    OperatorSpec,
    OverSpec,
    Pattern,
    RankSpec,
    SessionSpec,
    WithinSpec,
    lag_of,
)
from millpond.words import counted


class AccessPattern(NamedTuple):
    """How state is accessed, and why that was concluded."""

    store: str
    why: str


def access_pattern(spec: OperatorSpec) -> AccessPattern:
    """The access pattern of an operator."""
    pattern = _inferred(spec)
    if isinstance(spec, AggregateSpec | SessionSpec) and spec.pattern != "auto":
        return pattern._replace(why=f"{pattern.why} (asked for by spark.millpond.store.pattern={spec.pattern})")
    return pattern


def with_pattern(spec: OperatorSpec, pattern: Pattern) -> OperatorSpec:
    """The operator with the pattern that is asked for, where its functions leave a choice."""
    if pattern == "auto" or not isinstance(spec, AggregateSpec | SessionSpec):
        return spec
    asked = msgspec.structs.replace(spec, pattern=pattern)
    chosen = any(where(asked) != where(spec) for where in (observed, whole_windows, whole_sessions))
    return asked if chosen and supported_spec(asked) is None else spec


def _inferred(spec: OperatorSpec) -> AccessPattern:
    if isinstance(spec, RankSpec):
        held = "all rows of a key, since rows go again" if spec.retracts else f"the first {spec.limit} of a key's rows"
        return AccessPattern("read-modify-write", f"{held}, in order, replaced whole")
    if isinstance(spec, OverSpec):
        if spec.retracts:
            return AccessPattern(
                "read-modify-write", "all rows of a key, since rows go again, in order, replaced whole"
            )
        last = counted(max(spec.preceding), "row")
        return AccessPattern("read-modify-write", f"the last {last} of a key, replaced whole")
    if isinstance(spec, JoinSpec):
        why = "rows of both sides are kept by key and event time, and read by intervals of time"
        return AccessPattern("ordered", why + ("; they expire with the watermark" if spec.expires else ""))
    if whole_sessions(spec):
        why = "all rows of a session are needed at once: they are appended to it, and read when it closes"
        return AccessPattern("unaligned append", why)
    if isinstance(spec, SessionSpec):
        why = "one row per open session, updated in place; those that meet are merged, closed ones found by their end"
        return AccessPattern("read-modify-write", why)
    if isinstance(spec, WithinSpec):
        why = "each key is looked up once per row and kept until the watermark has passed it"
        return AccessPattern("read-modify-write", why)
    if not isinstance(spec, AggregateSpec):
        return AccessPattern("read-modify-write", "each key is looked up once per row and kept once seen")
    if whole_windows(spec):
        why = "all rows of a group are needed at once: they are appended to their window, and read when it closes"
        return AccessPattern("aligned append", why)
    if observed(spec):
        why = "it depends on how often DISTINCT inputs repeat: groups in memory first, with one row per key and value; "
        why += (
            "if that outgrows it and values are mostly new, rows are appended to their window, and read when it closes"
        )
        return AccessPattern("observed", why)
    if any(call.distinct for call in spec.calls):
        why = "one row per key, updated in place; DISTINCT inputs are kept beside it, one row per key and value"
    elif any(FUNCTIONS[call.function].collects for call in spec.calls):
        why = "one row per key, updated in place; collected values grow with it"
    else:
        why = "every function is associative and commutative: one row per key, updated in place"
    if lag_of(spec) is not None:
        why += "; kept by slices of event time, each dropped whole when the watermark passes it"
    return AccessPattern("read-modify-write", why)
