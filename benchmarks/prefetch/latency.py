"""How long rows took from their arrival to the end of the batch that gave their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np


class Latency(msgspec.Struct, frozen=True):
    """Percentiles, in milliseconds."""

    p50: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Compute the percentiles of durations in seconds."""
        values = np.percentile(np.asarray(seconds, float) * 1000, [50, 99, 99.9, 100])
        return cls(*(round(float(value), 1) for value in values))


def ended(progress: Mapping[str, Any]) -> float:
    """When a batch ended, in seconds since the epoch."""
    started = datetime.fromisoformat(progress["timestamp"]).timestamp()
    return float(started + progress["durationMs"]["triggerExecution"] / 1000)


def read_by(log: Callable[[str], str | None], batch: int) -> list[str]:
    """Return the names of the files that a batch has read.

    Args:
        log: returns the text of an entry of the source's log by its name, or None if there is none.
    """
    text = log(str(batch)) or log(f"{batch}.compact") or ""
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    return [Path(unquote(urlsplit(line["path"]).path)).name for line in lines if line["batchId"] == batch]


def local_log(checkpoint: Path) -> Callable[[str], str | None]:
    """Return the entries of the source's log in a checkpoint on local disk."""

    def entry(name: str) -> str | None:
        path = checkpoint / "sources" / "0" / name
        return path.read_text() if path.exists() else None

    return entry
