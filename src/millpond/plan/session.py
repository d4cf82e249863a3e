"""Reads groupings by session windows: Spark computes each row's own window, the operator merges those that meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millpond.operators.spec import AggregateCall, Field, SessionSpec, window_bounds


class Session(NamedTuple):
    """A grouping by session windows.

    Attributes:
        position: among the groupings.
        window: the column; below the aggregate it holds each row's own window.
        marked: whether its time has a watermark.
    """

    position: int
    window: Field
    marked: bool

    @property
    def bounds(self) -> list[tuple[Field, str]]:
        """The start and the end of a row's own window: columns of the pipe, and SQL for them over the window `{0}`."""
        columns = window_bounds(self.spec([], [], [], ""))
        return list(zip(columns, ("{0}.start", "{0}.end"), strict=True))

    def spec(
        self, keys: Sequence[Field], inputs: Sequence[Field], calls: Sequence[AggregateCall], output_mode: str
    ) -> SessionSpec:
        """The operator's plain description."""
        lag = 0 if self.marked else None
        return SessionSpec(tuple(keys), self.window, tuple(inputs), tuple(calls), output_mode, lag)
