"""The static choice of a store: how an operator will access its state, told by the operator (DESIGN §6)."""

from __future__ import annotations

from typing import NamedTuple

from millpond.operators.catalogue import whole_windows
from millpond.operators.spec import (
    AggregateSpec,
    JoinSpec,
    OperatorSpec,
    OverSpec,
    RankSpec,
    SessionSpec,
    WithinSpec,
    lag_of,
)

_GROWING = frozenset({"collect_list", "collect_set"})


class AccessPattern(NamedTuple):
    """How state is accessed, and why that was concluded."""

    store: str
    why: str


def access_pattern(spec: OperatorSpec) -> AccessPattern:
    """The access pattern of an operator."""
    if isinstance(spec, RankSpec):
        held = "all rows of a key, since rows go again" if spec.retracts else f"the first {spec.limit} of a key's rows"
        return AccessPattern("read-modify-write", f"{held}, in order, replaced whole")
    if isinstance(spec, OverSpec):
        return AccessPattern("read-modify-write", f"the last {max(spec.preceding)} rows of a key, replaced whole")
    if isinstance(spec, JoinSpec):
        why = "rows of both sides are kept by key and event time, and read by intervals of time"
        return AccessPattern("ordered", why + ("; they expire with the watermark" if spec.expires else ""))
    if isinstance(spec, SessionSpec):
        why = "one row per open session, updated in place; those that meet are merged, closed ones found by their end"
        return AccessPattern("read-modify-write", why)
    if isinstance(spec, WithinSpec):
        why = "each key is looked up once per row and kept until the watermark has passed it"
        return AccessPattern("read-modify-write", why)
    if not isinstance(spec, AggregateSpec):
        return AccessPattern("read-modify-write", "each key is looked up once per row and kept once seen")
    if whole_windows(spec):
        why = "a function needs all rows of a group: they are appended to their window, and read when it closes"
        return AccessPattern("aligned append", why)
    if any(call.distinct for call in spec.calls):
        why = "one row per key, updated in place; DISTINCT inputs are kept beside it, one row per key and value"
    elif any(call.function in _GROWING for call in spec.calls):
        why = "one row per key, updated in place; collected values grow with it"
    else:
        why = "every function is associative and commutative: one row per key, updated in place"
    if lag_of(spec) is not None:
        why += "; kept by slices of event time, each dropped whole when the watermark passes it"
    return AccessPattern("read-modify-write", why)
