"""How long rows took from their arrival to the end of the batch that gave their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def read_by(checkpoint: Path, batch: int) -> list[str]:
    """The names of the files that a batch has read."""
    log = checkpoint / "sources" / "0"
    path = log / str(batch)
    if not path.exists():
        path = log / f"{batch}.compact"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [Path(unquote(urlsplit(line["path"]).path)).name for line in lines if line["batchId"] == batch]
