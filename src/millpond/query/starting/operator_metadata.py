"""Spark's metadata of its operator that watches the watermark (see `Catalyst.watermark_batch_source`).

Spark restarts a query only with the stateful operators in its metadata. Whether a query has this operator depends on
its other operators, which a restart may change. The operator has no state.
"""

from __future__ import annotations

from collections.abc import Iterable

from millpond.files.backends.filesystem import FileSystem
from millpond.plan.decision.decision import Operator

_FOLDER = "state/0/_metadata/"
_METADATA = f"{_FOLDER}metadata"
_CHECKSUM = f"{_FOLDER}.metadata.crc"
_DEDUPLICATION_NAME = b'"operatorName":"dedupe"'
_DEDUPLICATION_METADATA = (
    b'v1\n{"operatorInfo":{"operatorId":0,"operatorName":"dedupe"},'
    b'"stateStoreInfo":[{"storeName":"default","numColsPrefixKey":0,"numPartitions":1}]}'
)


def update_operator_metadata(files: FileSystem, operators: Iterable[Operator]) -> None:
    """Update Spark's operator metadata to the current query, if all stateful operators run on Millpond.

    Args:
        files: the checkpoint location of a query that has planned a batch.
        operators: the operators of the query.
    """
    all_operators = tuple(operators)
    if any(operator.spec is None or operator.due_by_processing_time for operator in all_operators):
        return  # Spark checks its own operators; a query by processing time has another one, which it always has
    names = {info.name for info in files.list(_FOLDER)}
    recorded = _METADATA in names and _DEDUPLICATION_NAME in files.get(_METADATA)
    needed = any(operator.needs_no_data_batches for operator in all_operators)
    if recorded == needed:
        return
    for name in (
        _CHECKSUM,
        _METADATA,
    ):  # first the checksum: Hadoop's local file system refuses a file that does not match it
        if name in names:
            files.delete(name)
    if needed:
        files.put(_METADATA, [_DEDUPLICATION_METADATA])
