"""What Spark notes of the operator of its own that watches the watermark (see `Catalyst.watching_watermark`).

Spark goes on only with the stateful operators that it has noted. Whether a query has that one goes by what its own
operators do with the watermark, which a restart may change; there is no state in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from millpond.files.backends.filesystem import FileSystem
from millpond.plan.reading.decision import Operator

_FOLDER = "state/0/_metadata/"
_NOTE = f"{_FOLDER}metadata"
_CHECKSUM = f"{_FOLDER}.metadata.crc"
_NAME = b'"operatorName":"dedupe"'
_NOTED = (
    b'v1\n{"operatorInfo":{"operatorId":0,"operatorName":"dedupe"},'
    b'"stateStoreInfo":[{"storeName":"default","numColsPrefixKey":0,"numPartitions":1}]}'
)


def note_watching(files: FileSystem, operators: Iterable[Operator]) -> None:
    """Let what Spark has noted of its operators be what a query has now, if all that has state runs on Millpond.

    Args:
        files: Spark's checkpoint location, of a query that has planned a batch. operators: those of the query.
    """
    ours = tuple(operators)
    if any(one.spec is None or one.ticks for one in ours):
        return  # what stays on Spark is Spark's to check; what goes by the clock always does
    there = {info.name for info in files.list(_FOLDER)}
    noted = _NOTE in there and _NAME in files.get(_NOTE)
    wanted = any(one.closes for one in ours)
    if noted == wanted:
        return
    for name in (_CHECKSUM, _NOTE):  # Hadoop's local file system refuses a file that has the checksum of another
        if name in there:
            files.delete(name)
    if wanted:
        files.put(_NOTE, [_NOTED])
