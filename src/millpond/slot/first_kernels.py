"""The kernels that the first batch of nearly every query calls, the longest to compile first.

On a machine where nothing is compiled they take five seconds on one core, and a query would compile them one after
another. So they are compiled side by side as soon as slots start, while Spark still plans the batch.
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
