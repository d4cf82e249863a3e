"""The observer: chooses a store for distinct inputs by what batches do to the state (APSys '18 §4.3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.kernels.aggregate import distinct_entries
from millpond.layout import HASH, Rows
from millpond.operators.aggregate.tables import SAMPLE, distinct_inputs, sample_table
from millpond.operators.protocol import MakeRmwTable
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.aggregate import AggregateSpec

SAMPLING_BITS = 6
"""Sampling rate in bits: of the distinct inputs of appended rows, one in 2⁶ is observed."""
_MIN_ACCESSES = 64  # minimum observed accesses for the counts to be meaningful
_GROWN_DIVISOR = 4  # groups are grown if they take more than 1/4 of their memory
_SMALL_DIVISOR = 8  # groups are small if they would take 1/8 of their memory or less
_NEW_DIVISOR = 4  # if more than one input in 4 is new, inputs hardly repeat
_REPEATING_DIVISOR = 16  # if fewer than one input in 16 is new, nearly all repeat
_HEAVY_DIVISOR = 32  # a group is heavy if it takes more than 1/32 of the memory


class Observation(NamedTuple):
    """A batch's accesses to entries of distinct inputs, and the size of all entries.

    Attributes:
        accesses: the number of accesses.
        created: the number of accesses that created an entry.
        bytes: the size of all entries.
        groups: the number of groups that have entries.
    """

    accesses: int = 0
    created: int = 0
    bytes: int = 0
    groups: int = 0

    @staticmethod
    def total(observations: Iterable[Observation]) -> Observation:
        """Add up observations."""
        return Observation(*map(sum, zip(Observation(), *observations, strict=True)))


class Observer:
    """The decision when to change from one store to the other.

    State leaves groups when they outgrow their memory and most inputs are new. Every row then costs an entry, and often
    a read of files. State returns to groups when nearly all inputs repeat and all of them fit in memory. The two
    thresholds are far enough apart that one change does not cause the other.

    Args:
        memory: approximate bytes that the state may take in memory.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def should_append(self, observation: Observation) -> bool:
        """Return whether state in groups should be appended from now on."""
        grown = observation.bytes * _GROWN_DIVISOR > self._memory
        # The average over groups: all rows of a group are needed in memory at once.
        heavy = observation.bytes * _HEAVY_DIVISOR > self._memory * observation.groups
        return grown and not heavy and observation.created * _NEW_DIVISOR > observation.accesses

    def should_group(self, observation: Observation, largest_hash_bytes: int) -> bool:
        """Return whether appended state should be kept in groups from now on.

        Args:
            observation: the observation of all slices.
            largest_hash_bytes: upper bound of the bytes of one group's rows.
        """
        repeating = (
            observation.accesses >= _MIN_ACCESSES and observation.created * _REPEATING_DIVISOR < observation.accesses
        )
        small = observation.bytes * _SMALL_DIVISOR <= self._memory
        # A single group may take 1/8 of the memory, four times what `should_append` allows on average.
        return (repeating and small) or largest_hash_bytes * _HEAVY_DIVISOR // 4 > self._memory


class Sample:
    """A sample of the distinct inputs of one slice's appended rows, chosen by hash, over the life of the state.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the table.
        suffix: the suffix of its name.
    """

    def __init__(self, spec: AggregateSpec, make_table: MakeRmwTable, suffix: str) -> None:
        self._keys = len(spec.key_fields)
        self._inputs = [
            (inputs, keyed([spec.inputs[position] for position in inputs], [])) for inputs in distinct_inputs(spec)
        ]
        table = sample_table()
        self._layout = table.layout
        self.name = SAMPLE + suffix
        self.table = make_table(self.name, table.layout.schema, table.initial)
        self.accesses = self.created = 0
        self._version = 0

    @property
    def entries(self) -> int:
        """Estimated number of distinct inputs."""
        return self.table.stats()["keys"] << SAMPLING_BITS

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self.accesses = self.created = 0
        self.table.begin(version)

    def add(self, batch: pa.RecordBatch) -> None:
        """Sample rows: the column `__hash`, then keys and inputs."""
        for inputs, table in self._inputs:
            chosen = self._sampled_hashes(batch, inputs, table)
            words = np.zeros((len(chosen), self._layout.width), np.uint64)
            words[:, HASH] = chosen << np.uint64(SAMPLING_BITS)
            words[:, self._layout.key_start] = chosen
            # Only new entries change the sample, so repeated inputs cost no delta.
            located = self.table.upsert(Rows(words, np.empty(0, np.uint8)), self._version, touch="created")
            self.accesses += len(chosen)
            self.created += int(np.count_nonzero(located.created))

    def _sampled_hashes(self, batch: pa.RecordBatch, inputs: tuple[int, ...], table: Keyed) -> np.ndarray:
        layout = table.layout
        words, heap = table.encode(batch, (self._keys + position for position in inputs))
        references = np.zeros(layout.width, np.uint8)
        references[[offset + 1 for offset in layout.bytes_columns]] = 1
        distinct_entries.hash_entries(words, heap, layout.key_start, layout.key_stop, references)
        hashes = words[:, HASH]
        return hashes[hashes < np.uint64(1 << (64 - SAMPLING_BITS))] if SAMPLING_BITS else hashes.copy()
