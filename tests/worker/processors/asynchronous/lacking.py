"""State of which a part is not sent along, at random, and comes in random pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from millpond.worker.processors import handle
from millpond.worker.processors.state.lists import ListVariable
from millpond.worker.processors.state.maps import MapVariable
from millpond.worker.processors.state.variables import StateVariable, ValueVariable


@dataclass
class Far:
    """The parts of state that are not sent along with a call.

    Attributes:
        rng: chooses. share: of what is asked about, how much is lacking at first.
        whole: whether all that is fetched comes at once; else a random part of it.
        fetches: each fetch: the variable, and what was wanted.
    """

    rng: random.Random
    share: float = 1.0
    whole: bool = True
    fetches: list[tuple[str, list[tuple[int, Any]]]] = field(default_factory=list)


def make_far(monkeypatch: pytest.MonkeyPatch, far: Far) -> Far:
    """Let the state of processors lack things from now on."""

    class Lacking(StateVariable):
        def begin(self, sent: Any, heads: Any = None) -> None:
            super().begin(sent, heads)
            self.known: dict[tuple[int, Any], bool] = {}

        def lacks(self, at: int, key: Any) -> bool:
            return not self.known.setdefault((at, key), far.rng.random() >= far.share)

        def fetch(self, wanted: Sequence[tuple[int, Any]]) -> None:
            wanted = list(wanted)
            assert wanted
            assert all(self.lacks(*one) for one in wanted)
            far.fetches.append((self.variable.name, wanted))
            come = wanted if far.whole else far.rng.sample(wanted, far.rng.randint(1, len(wanted)))
            self.known.update(dict.fromkeys(come, True))

        def there(self, key: Any = None) -> None:
            assert self.known[self._current_key.position, key]

    class Value(Lacking, ValueVariable):
        def get(self) -> Any:
            self.there()
            return super().get()

    class List(Lacking, ListVariable):
        def get(self) -> Any:
            self.there()
            yield from super().get()

    class Map(Lacking, MapVariable):
        def getValue(self, key: Any) -> Any:
            self.there(key)
            return super().getValue(key)

        def containsKey(self, key: Any) -> Any:
            self.there(key)
            return super().containsKey(key)

        def iterator(self) -> Any:
            self.there()
            yield from super().iterator()

        def keys(self) -> Any:
            self.there()
            yield from super().keys()

        def values(self) -> Any:
            self.there()
            yield from super().values()

    monkeypatch.setattr(handle, "_VARIABLE_CLASSES", {"value": Value, "list": List, "map": Map})
    return far
