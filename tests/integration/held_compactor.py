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
from millpond.compactor.worker import Worker
from millpond.files.backends.filesystem import FileSystem
from millpond.files.refs import RunRef
from millpond.stores.runs.pace import Pace

STEPS = BEFORE, AFTER = "before", "after"
_log = logging.getLogger("millpond.compactor")
_do = Worker._run_job


def _stand(folder: Path, request: Request, step: str, pace: Pace) -> None:
    _log.info("request %s stands %s its work", request.id, step)
    for _ in pace.throttle(_until_let_go(folder, request, step)):
        time.sleep(0.01)


def _until_let_go(folder: Path, request: Request, step: str) -> Iterator[None]:
    while not any((folder / name).exists() for name in ("open", request.id, step)):
        yield


def _hold(folder: Path) -> None:
    """Have workers of this process stand."""

    def held(self: Worker, files: FileSystem, request: Request, pace: Pace) -> list[RunRef]:
        _stand(folder, request, BEFORE, pace)
        made = _do(self, files, request, pace)
        _stand(folder, request, AFTER, pace)
        return made

    Worker._run_job = held  # type: ignore[method-assign]


if __name__ == "__main__":
    _hold(Path(sys.argv.pop(1)))
    sys.argv.insert(1, "compactor")
    main()
