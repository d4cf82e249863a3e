"""The compactor that the tests kill and stall: the real one, but that it can be made to stand at a known step.

`python held_compactor.py FOLDER LOCATION [OPTIONS]` is `millpond compactor LOCATION [OPTIONS]`. It stands before its
work on a request, and after it, before it answers, until `FOLDER/open` is there, or a file of that request's or that
step's name. Meanwhile it gives signs of life, and hears that it is to stop, as in the middle of its work.
"""

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from millpond.checkpoint.compaction.requests import Request
from millpond.cli import main
from millpond.files.backends.filesystem import FileSystem
from millpond.files.refs import RunRef
from millpond.slot.compaction.worker import Worker
from millpond.stores.runs.pace import Pace

STEPS = BEFORE, AFTER = "before", "after"
_FOLDER = Path(sys.argv.pop(1))
_log = logging.getLogger("millpond.compactor")
_do = Worker._do


def _stand(request: Request, step: str, pace: Pace) -> None:
    _log.info("request %s stands %s its work", request.id, step)
    for _ in pace.over(_until_let_go(request, step)):
        time.sleep(0.01)


def _until_let_go(request: Request, step: str) -> Iterator[None]:
    while not any((_FOLDER / name).exists() for name in ("open", request.id, step)):
        yield


def _held(self: Worker, files: FileSystem, request: Request, pace: Pace) -> list[RunRef]:
    _stand(request, BEFORE, pace)
    made = _do(self, files, request, pace)
    _stand(request, AFTER, pace)
    return made


if __name__ == "__main__":
    Worker._do = _held  # type: ignore[method-assign]
    sys.argv.insert(1, "compactor")
    main()
