"""When batches started and ended, by Spark's progress reports, and which files they read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def batch_start(progress: Mapping[str, Any]) -> float:
    """Return when a batch started by Spark's progress report, in seconds since the epoch."""
    return datetime.fromisoformat(progress["timestamp"]).timestamp()


def batch_end(progress: Mapping[str, Any]) -> float:
    """Return when a batch ended by Spark's progress report, in seconds since the epoch."""
    return float(batch_start(progress) + progress["durationMs"]["triggerExecution"] / 1000)


def source_files(log: Callable[[str], str | None], entry: int) -> list[str]:
    """Return the names of the files in an entry of the file source's log.

    Args:
        log: returns the text of a file of the log by its name, or None if there is no such file.
        entry: number of the entry. Batches without files have none, so that batches may have higher numbers.
    """
    text = log(str(entry)) or log(f"{entry}.compact") or ""
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    # A compacted file of the log repeats the entries before it.
    return [Path(unquote(urlsplit(line["path"]).path)).name for line in lines if line["batchId"] == entry]


def local_log(checkpoint: Path) -> Callable[[str], str | None]:
    """Return the `log` of `source_files` for a checkpoint on local disk."""

    def text_of(name: str) -> str | None:
        path = checkpoint / "sources" / "0" / name
        return path.read_text() if path.exists() else None

    return text_of
