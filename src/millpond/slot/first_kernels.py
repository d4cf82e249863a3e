"""Kernels that the first batch of nearly every query calls, in descending order of compile time.

On a machine without compiled kernels, compiling them one after another takes five seconds on one core. Slots therefore
compile them in parallel at start-up, while Spark still plans the batch.
"""

from __future__ import annotations

from millpond.kernels.aggregate.numeric import count_rows
from millpond.kernels.columns.arrow_words import put_header, put_ints
from millpond.kernels.columns.row_hash import mix_fixed, total
from millpond.kernels.compiled import Kernel
from millpond.kernels.hot_table.extract import gather
from millpond.kernels.hot_table.index import migrate
from millpond.kernels.hot_table.upsert import upsert
from millpond.kernels.pointers import data_of
from millpond.kernels.runs.byte_shuffle import pack

FIRST: tuple[Kernel, ...] = (upsert, pack, total, gather, migrate, mix_fixed, put_ints, count_rows, put_header, data_of)
