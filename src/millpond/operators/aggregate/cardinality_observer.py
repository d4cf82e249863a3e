"""The observer: tells from what a batch has done to the state in which store it is best kept (APSys '18 §4.3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.kernels.aggregate import distinct_entries
from millpond.layout import HASH, Rows
from millpond.operators.aggregate.tables import SAMPLE, distinct_inputs, sample_table
from millpond.operators.columns.encode import flatten, hashes_of, key_rows
from millpond.operators.protocol import MakeRows
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.types import parse_type

SAMPLED = 6
"""Bits: of the distinct inputs of rows that are appended, one in 2⁶ is looked at."""
_ENOUGH = 64  # of them, from which on their counts say something
_GROWN = 4  # groups are grown when they take one such part of their memory
_SMALL = 8  # and small when they would take one such part
_REPEATED = 4  # when one in so many inputs is new, or more, they hardly repeat
_REPEATING = 16  # when one in so many is new, or fewer, nearly all do
_HEAVY = 32  # a group is heavy when it takes one such part of the memory


class Observation(NamedTuple):
    """What a batch asked of the entries of distinct inputs, and what they take.

    Attributes:
        asked: how often one was asked for. made: how often it was new.
        bytes: of all entries that there are. groups: how many groups these are of.
    """

    asked: int = 0
    made: int = 0
    bytes: int = 0
    groups: int = 0

    @staticmethod
    def total(each: Iterable[Observation]) -> Observation:
        """All of it together."""
        return Observation(*map(sum, zip(Observation(), *each, strict=True)))


class Observer:
    """When to change from one store to the other.

    Groups are left when they outgrow their memory while most inputs are new: then every row costs an entry, and many a
    read of files. They are taken up again when nearly all inputs are there already, and all of them fit in memory. The
    two are far enough apart for one change not to cause the other.

    Args:
        memory: bytes that the state may take in memory, roughly.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def appends(self, seen: Observation) -> bool:
        """Whether what is kept in groups should be appended from now on."""
        grown = seen.bytes * _GROWN > self._memory
        heavy = seen.bytes * _HEAVY > self._memory * seen.groups  # on average: all its rows will be needed at once
        return grown and not heavy and seen.made * _REPEATED > seen.asked

    def groups(self, seen: Observation, heaviest: int) -> bool:
        """Whether what is appended should be kept in groups from now on.

        Args:
            heaviest: bytes of the rows of one group, at most.
        """
        repeating = seen.asked >= _ENOUGH and seen.made * _REPEATING < seen.asked
        small = seen.bytes * _SMALL <= self._memory
        return (repeating and small) or heaviest * _HEAVY // 4 > self._memory


class Sample:
    """Some of the distinct inputs of one slice's appended rows: those whose hash says so, all over the state's life.

    Args:
        spec: keys, inputs and calls. make_table: opens the table. suffix: of its name.
    """

    def __init__(self, spec: AggregateSpec, make_table: MakeRows, suffix: str) -> None:
        self._keys = len(spec.key_fields)
        self._inputs = [
            (inputs, keyed([spec.inputs[position] for position in inputs], [])) for inputs in distinct_inputs(spec)
        ]
        made = sample_table()
        self._layout = made.layout
        self.name = SAMPLE + suffix
        self.table = make_table(self.name, made.layout.schema, made.initial)
        self.asked = self.made = 0
        self._version = 0

    @property
    def entries(self) -> int:
        """How many distinct inputs there are, all in all."""
        return self.table.stats()["keys"] << SAMPLED

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self.asked = self.made = 0
        self.table.begin(version)

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at rows: the column `__hash`, then keys and inputs."""
        for inputs, table in self._inputs:
            chosen = self._chosen(batch, inputs, table)
            words = np.zeros((len(chosen), self._layout.width), np.uint64)
            words[:, HASH] = chosen << np.uint64(SAMPLED)
            words[:, self._layout.key_start] = chosen
            located = self.table.upsert(Rows(words, np.empty(0, np.uint8)), self._version, touch="created")
            self.asked += len(chosen)
            self.made += int(np.count_nonzero(located.created))

    def _chosen(self, batch: pa.RecordBatch, inputs: tuple[int, ...], table: Keyed) -> np.ndarray:
        leaves = []
        for position in inputs:
            dtype = parse_type(table.fields[inputs.index(position)].type)
            leaves += flatten(batch.column(1 + self._keys + position), dtype)
        layout = table.layout
        words, heap = key_rows(hashes_of(batch), leaves, table.keys, layout.key_stop)
        references = np.zeros(layout.width, np.uint8)
        references[[offset + 1 for offset in layout.bytes_columns]] = 1
        distinct_entries.hash_entries(words, heap, layout.key_start, layout.key_stop, references)
        hashes = words[:, HASH]
        return hashes[hashes < np.uint64(1 << (64 - SAMPLED))] if SAMPLED else hashes.copy()
