"""Millpond's settings: Spark settings named `spark.millpond.*`, read once when a query starts."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from millpond.errors import SettingError

PREFIX = "spark.millpond."
KEY_GROUP_BITS = 15
"""The key space is divided into 2¹⁵ key groups; a partition is a contiguous range of them."""

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)i?b?", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """All settings of one query.

    Attributes:
        enabled: whether Millpond runs anything at all.
        state_location: URL below which state lives; None for the query's checkpoint.
        partitions: number of state partitions; None for `spark.sql.shuffle.partitions`.
        slots: slots per host; None for one per core.
        slot_memory: bytes that each slot may hold (outside the executors' memory).
        cache_disk: bytes of local disk for cached state files, per slot; 0 for as much as there is.
        read_batch_ratio: of the sessions whose rows are kept until they close, the share that is read ahead with those
            that close.
        max_space_amplification: rows on disk per row of an open session from which they are compacted.
        commit_mode: `async` lets a commit lag by one batch, `sync` waits for it; None lets the query decide.
        compaction: `local` merges state files beside the query, `off` does not.
        on_unsupported: `spark` leaves unsupported operators to Spark with a warning, `error` refuses the query.
        on_changed_replay: after a crash, when the last batch has to run once more and the query computes something else
            up to its operators than the run that crashed: `error` refuses the start, `run` runs it so.
        explain: what to print at start: `none`, `fallback` (operators that stay on Spark) or `all`.
        key_groups: always 2¹⁵.
        batch_rows: rows of one Arrow batch between Spark and the pipe.
        exchange: how rows reach their partition: `spark` through its shuffle, `local` through files of the host where
            all tasks run, `auto` as the master's URL says.
        changes: what update mode shows of rows that change: `upsert` their new images, `all` also rows that are gone,
            and a column `_op` that tells them apart.
        store_pattern: how groups that are shown once, when their window closes, are kept where there is a choice: as
            rows (`append`), as partial results (`rmw`), or as the functions suggest (`auto`).
        map_groups: what `applyInPandas` and `applyInArrow` are called with: a group's rows in a micro-batch (`batch`),
            as by Spark, or all of its rows, once its window has closed (`window`).
    """

    enabled: bool = True
    state_location: str | None = None
    partitions: int | None = None
    slots: int | None = None
    slot_memory: int = 1 << 30
    cache_disk: int = 0
    read_batch_ratio: float = 0.02
    max_space_amplification: float = 1.5
    commit_mode: Literal["async", "sync"] | None = None
    compaction: str = "local"
    on_unsupported: str = "spark"
    on_changed_replay: Literal["error", "run"] = "error"
    explain: str = "fallback"
    key_groups: int = 1 << KEY_GROUP_BITS
    batch_rows: int = 100_000
    exchange: Literal["auto", "local", "spark"] = "auto"
    changes: Literal["upsert", "all"] = "upsert"
    store_pattern: Literal["auto", "append", "rmw"] = "auto"
    map_groups: Literal["batch", "window"] = "batch"


def parse_size(text: str) -> int:
    """Bytes in `512`, `64k`, `100 MB`, `1g`.

    Raises:
        ValueError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size such as 512m or 1g")
    return int(match[1]) * _UNITS[match[2].lower()]


def _boolean(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.strip().lower() == "true"


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError("a whole number above 0")
    return int(text)


def _partitions(text: str) -> int:
    number = _positive(text)
    if number > 1 << KEY_GROUP_BITS:
        raise ValueError(f"a whole number from 1 to {1 << KEY_GROUP_BITS}, the number of key groups")
    return number


def _memory(text: str) -> int:
    number = parse_size(text)
    if number < 16 << 20:
        raise ValueError("a size of at least 16m")
    return number


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ValueError(what)
    return number


def _share(text: str) -> float:
    return _number(text, 0.0, 1.0, "a number from 0 to 1")


def _amplification(text: str) -> float:
    return _number(text, 1.1, 100.0, "a number from 1.1 to 100")


def _location(text: str) -> str:
    """A URL, or the absolute path that a path means to this process: slots are others, with other working folders."""
    text = text.strip()
    scheme, colon, _ = text.partition(":")
    if not text or scheme == "memory":
        raise ValueError("a path, or a URL that other processes can reach: file:, s3:, gs: or az:")
    return text if colon and "/" not in scheme else os.path.abspath(text)


def _one_of(*choices: str) -> Any:
    def parse(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError(" or ".join(choices))
        return text.strip().lower()

    return parse


def _key_groups(text: str) -> int:
    if text.strip() != str(1 << KEY_GROUP_BITS):
        raise ValueError(f"{1 << KEY_GROUP_BITS}, the only number of key groups in this version")
    return int(text)


_KNOWN: dict[str, tuple[str, Any]] = {
    "enabled": ("enabled", _boolean),
    "state.location": ("state_location", _location),
    "partitions": ("partitions", _partitions),
    "slots": ("slots", _positive),
    "slot.memory": ("slot_memory", _memory),
    "cache.disk": ("cache_disk", parse_size),
    "store.readBatchRatio": ("read_batch_ratio", _share),
    "store.maxSpaceAmplification": ("max_space_amplification", _amplification),
    "store.pattern": ("store_pattern", _one_of("auto", "append", "rmw")),
    "commit.mode": ("commit_mode", _one_of("async", "sync")),
    "compaction": ("compaction", _one_of("local", "off")),
    "onUnsupported": ("on_unsupported", _one_of("spark", "error")),
    "onChangedReplay": ("on_changed_replay", _one_of("error", "run")),
    "explain": ("explain", _one_of("none", "fallback", "all")),
    "keyGroups": ("key_groups", _key_groups),
    "batch.rows": ("batch_rows", _positive),
    "changes": ("changes", _one_of("upsert", "all")),
    "mapGroups": ("map_groups", _one_of("batch", "window")),
    "exchange": ("exchange", _one_of("auto", "local", "spark")),
}


def read_settings(conf: Mapping[str, str]) -> Settings:
    """The settings among Spark settings; others than `spark.millpond.*` are ignored.

    Args:
        conf: Spark settings by full name.

    Raises:
        SettingError: a setting is unknown or malformed; the message tells which ones are meant, or are known.
    """
    values: dict[str, Any] = {}
    for name, text in conf.items():
        if not name.lower().startswith(PREFIX):
            continue
        known = _KNOWN.get(name.removeprefix(PREFIX))
        if known is None:
            raise _unknown(name)
        field, parse = known
        try:
            values[field] = parse(text)
        except ValueError as error:
            raise SettingError(f"{name} is {text!r}, but has to be {error}.", action="See docs/settings.md.") from None
    return Settings(**values)


def _unknown(name: str) -> SettingError:
    """The error for a setting that does not exist: what may have been meant, then all there are, in short."""
    lowered = {key.lower(): key for key in _KNOWN}
    meant = difflib.get_close_matches(name[len(PREFIX) :].lower(), lowered, n=2, cutoff=0.6)
    question = f"Did you mean {' or '.join(PREFIX + lowered[key] for key in meant)}? " if meant else ""
    listing = f"Known settings, all below {PREFIX}: {', '.join(sorted(_KNOWN))}."
    return SettingError(f"{name} is not a setting of Millpond.", action=question + listing)
