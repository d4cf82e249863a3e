"""Millpond's settings: Spark settings named `spark.millpond.*`, read once when a query starts."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from millpond.errors import SettingError

PREFIX = "spark.millpond."
KEY_GROUP_BITS = 15
"""The key space is divided into 2¹⁵ key groups; a partition is a contiguous range of them."""

OnChangedState = Literal["error", "keep", "evolve"]
"""What happens where a query has changed in what its state holds."""

OnWrongInSpark = Literal["auto", "error", "warn"]
"""What happens where a query has a shape for which Spark gives wrong rows."""

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)i?b?", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """All settings of one query: a field for each of `SETTINGS`, which say what they mean.

    Sizes are in bytes; None is what the user has left open.
    """

    enabled: bool = True
    state_location: str | None = None
    partitions: int | None = None
    slots: int | None = None
    slot_memory: int = 1 << 30
    cache_disk: int | None = None
    cache_admission: float = 2.0
    requests_hedged: float = 0.05
    read_batch_ratio: float = 0.02
    max_space_amplification: float = 1.5
    commit_mode: Literal["async", "sync"] | None = None
    compaction: Literal["local", "remote"] = "local"
    compaction_timeout: float = 60.0
    on_unsupported: str = "spark"
    on_wrong_in_spark: OnWrongInSpark = "auto"
    on_changed_replay: Literal["error", "run"] = "error"
    on_changed_state: OnChangedState = "error"
    state_retain: int = 0
    explain: str = "fallback"
    key_groups: int = 1 << KEY_GROUP_BITS
    batch_rows: int = 100_000
    exchange: Literal["auto", "local", "spark"] = "auto"
    combine: Literal["auto", "on", "off"] = "auto"
    cache_policy: Literal["timestamp", "lru", "clock"] = "timestamp"
    prefetch: Literal["on", "off"] = "on"
    prefetch_hot: int = 8
    changes: Literal["upsert", "all"] = "upsert"
    store_pattern: Literal["auto", "append", "rmw"] = "auto"
    map_groups: Literal["batch", "window"] = "batch"
    async_in_flight: int = 6000
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"


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


def _count(text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def _partitions(text: str) -> int:
    number = _positive(text)
    if number > 1 << KEY_GROUP_BITS:
        raise ValueError(f"a whole number from 1 to {1 << KEY_GROUP_BITS}, the number of key groups")
    return number


def _port(text: str) -> int:
    if not text.strip().isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError("a port, from 1 to 65535")
    return int(text)


def _host(text: str) -> str:
    if not text.strip():
        raise ValueError("an address of this host, as 127.0.0.1 or 0.0.0.0")
    return text.strip()


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


def _lengths(text: str) -> float:
    return _number(text, 0.0, 1000.0, "a number from 0 to 1000")


def _amplification(text: str) -> float:
    return _number(text, 1.1, 100.0, "a number from 1.1 to 100")


def _seconds(text: str) -> float:
    return _number(text, 1.0, 3600.0, "a number of seconds from 1 to 3600")


def _location(text: str) -> str:
    """A URL, or the absolute path that a path means to this process: slots are others, with other working folders."""
    text = text.strip()
    scheme, colon, _ = text.partition(":")
    if not text or scheme == "memory":
        raise ValueError("a path, or a URL that other processes can reach: file:, s3:, gs:, az: or hdfs:")
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


class Setting(NamedTuple):
    """What is known of one setting.

    Attributes:
        field: the field of `Settings` that holds it.
        parse: makes the value from the user's text; raises ValueError, saying what is wanted.
        meaning: what it does, in Markdown, for docs/settings.md.
        default: what holds where the field is None, likewise.
    """

    field: str
    parse: Callable[[str], Any]
    meaning: str
    default: str = ""


SETTINGS = {
    "enabled": Setting("enabled", _boolean, "`false` leaves every query to Spark"),
    "state.location": Setting(
        "state_location",
        _location,
        "URL below which state lies, in a folder called after the id of each query (`query.id`): `file:`, `s3:`, "
        "`gs:`, `az:`, `hdfs:`, `webhdfs:`, or a path",
        default="the checkpoint",
    ),
    "partitions": Setting(
        "partitions",
        _partitions,
        "partitions of the state, 1 to 32768; a few per core are enough. Another number at a later start rescales the "
        "state: no data moves, each partition reads its part of the old ones",
        default="as many as there are; at the first start `spark.sql.shuffle.partitions`",
    ),
    "slots": Setting("slots", _positive, "slots per host", default="cores of a host"),
    "slot.memory": Setting(
        "slot_memory",
        _memory,
        "memory of one slot, at least `16m`, for tables, caches and what works on them, above what an idle slot "
        "takes; the first query of an application sets it for all, others that differ are told so; it lies outside "
        "executor memory, so leave room for it (YARN, Kubernetes: memory overhead)",
    ),
    "cache.disk": Setting(
        "cache_disk",
        parse_size,
        "where the state is on an object store: local disk for copies of its files, per slot (`10g`); `0` for none",
        default="half of what is free, shared by the slots",
    ),
    "cache.admission": Setting(
        "cache_admission",
        _lengths,
        "likewise: a file that is read from the store gets a local copy once more than so many times its length was "
        "read of it within a minute, on top of what was read of the copies that have to go for it (0 to 1000)",
    ),
    "requests.hedged": Setting(
        "requests_hedged",
        _share,
        "likewise: of the requests that read parts of files, the share that may be made a second time because the "
        "first answer takes longer than 95 of 100 do (0 to 1); 0 makes none twice",
    ),
    "cache.policy": Setting(
        "cache_policy",
        _one_of("timestamp", "lru", "clock"),
        "where state is larger than memory, which rows leave it first: `timestamp`: those used longest ago, by batch "
        "or event time, unless their keys are announced; `lru`: those used longest ago; `clock`: those not used since "
        "rows left last ([prefetching](guides/prefetching.md))",
    ),
    "prefetch": Setting(
        "prefetch",
        _one_of("on", "off"),
        "`on`: where state is larger than memory, keys are announced to their slot before their rows reach it, so that "
        "their state is read meanwhile ([prefetching](guides/prefetching.md)); `off`: it is read when they come",
    ),
    "prefetch.hot": Setting(
        "prefetch_hot",
        _count,
        "keys that came so many times lately are surely in memory, and are not announced",
    ),
    "store.readBatchRatio": Setting(
        "read_batch_ratio",
        _share,
        "where rows are kept until their session closes: of the open sessions, the share whose rows are read "
        "ahead, those first that are expected to close next, when rows on disk have to be read at all (0 to 1); 0 "
        "reads nothing ahead",
    ),
    "store.maxSpaceAmplification": Setting(
        "max_space_amplification",
        _amplification,
        "likewise: rows on disk per row of an open session from which they are compacted (1.1 to 100)",
    ),
    "store.pattern": Setting(
        "store_pattern",
        _one_of("auto", "append", "rmw"),
        "how aggregates over windows and sessions in append mode keep what is shown once, where their functions "
        "leave a choice: `append`: all rows, until their window closes; `rmw` (read-modify-write): partial "
        "results, changed by each row; `auto`: as the functions suggest, which `explain` tells, or, for distinct "
        "inputs of tumbling windows, as the data suggest while the query runs. The first start of a query fixes it",
    ),
    "commit.mode": Setting(
        "commit_mode",
        _one_of("async", "sync"),
        "`async`: commits lag by at most one batch; `sync`: each batch waits for its own. Chosen `sync` where the "
        "input cannot be repeated",
        default="by query",
    ),
    "compaction": Setting(
        "compaction",
        _one_of("local", "remote"),
        "`local`: slots compact the files of the state themselves, behind the batches; `remote`: processes of "
        "`millpond compactor` do, wherever they run, and slots only if none of them does "
        "([operations](operations.md#compaction-elsewhere))",
    ),
    "compaction.timeout": Setting(
        "compaction_timeout",
        _seconds,
        "with `compaction=remote`: seconds without a sign of life from a compactor after which a slot does the work "
        "itself, 1 to 3600",
    ),
    "onUnsupported": Setting(
        "on_unsupported",
        _one_of("spark", "error"),
        "`spark` leaves unsupported operators to Spark with a warning, `error` refuses the query",
    ),
    "onWrongInSpark": Setting(
        "on_wrong_in_spark",
        _one_of("auto", "error", "warn"),
        "where the query has a shape for which Spark gives wrong rows, and Millpond the same ones "
        "([which](compatibility.md#where-spark-is-wrong)): `error` refuses it, `warn` runs it with a warning; `auto` "
        "refuses shapes that are wrong whatever the data, and warns of those that are wrong for some data",
    ),
    "onChangedReplay": Setting(
        "on_changed_replay",
        _one_of("error", "run"),
        "after a crash, when the last batch has to run once more and the query has changed up to its stateful "
        "operators: `error` refuses the start, `run` makes the state from the query as it is now "
        "([operations](operations.md))",
    ),
    "onChangedState": Setting(
        "on_changed_state",
        _one_of("error", "keep", "evolve"),
        "where the query has changed in what its state holds: `error` refuses the start; `keep` lets functions that "
        "are called with something else go on with the values that they have, as Spark does; `evolve` goes on with the "
        "old state where it can be followed: functions that stay keep their values, new ones see the rows from now on "
        "([changing a query](guides/changing-a-query.md))",
    ),
    "state.retain": Setting(
        "state_retain",
        _count,
        "versions of the state that stay readable by `millpond.read_state(…, version=…)`, where that is more than "
        "Spark's `spark.sql.streaming.minBatchesToRetain`",
    ),
    "explain": Setting(
        "explain",
        _one_of("none", "fallback", "all"),
        "what is logged at start: `none`, `fallback` (operators that stay on Spark), `all`",
    ),
    "keyGroups": Setting("key_groups", _key_groups, "fixed in this version"),
    "batch.rows": Setting(
        "batch_rows",
        _positive,
        "rows of one Arrow batch between Spark and a pipe; at most 4096 where there are columns of variable "
        "length. It holds for the whole query, your own Arrow and pandas functions included",
    ),
    "changes": Setting(
        "changes",
        _one_of("upsert", "all"),
        "what update mode shows of rows that change: `upsert`: their new images; `all`: also rows that are gone, "
        "and a column `_op` (see [changes](changes.md))",
    ),
    "mapGroups": Setting(
        "map_groups",
        _one_of("batch", "window"),
        "what `applyInPandas` and `applyInArrow` on a stream are called with: `batch`: the rows that a micro-batch "
        "has of a group, as by Spark; `window`: all rows of a group, once, when its window has closed (see "
        "[functions](functions.md))",
    ),
    "async.inFlight": Setting(
        "async_in_flight",
        _positive,
        "of an asynchronous processor, how many keys may wait for state at a time, in each partition "
        "([processors](guides/processors.md#asynchronous-processors))",
    ),
    "exchange": Setting(
        "exchange",
        _one_of("auto", "local", "spark"),
        "`spark`: rows reach their partition through Spark's shuffle; `local`: through files of the host, which "
        "all tasks have to share; `auto`: `local` under a `local[…]` master, else `spark`",
    ),
    "combine": Setting(
        "combine",
        _one_of("auto", "on", "off"),
        "whether Spark combines the rows of each group before the exchange, where the functions allow it "
        "([combining](guides/combining.md)): `auto`: in batches of which it leaves few rows; `on`: in all; `off`: in "
        "none",
    ),
    "metrics.port": Setting(
        "metrics_port",
        _port,
        "a port of the driver's on which Prometheus finds the query's figures ([operations](operations.md)); needs the "
        "extra `prometheus`",
        default="not set",
    ),
    "metrics.host": Setting(
        "metrics_host", _host, "the address to listen on: others than the driver's host reach it on `0.0.0.0`"
    ),
}
"""Every setting, by its name below `spark.millpond.`, in the order of docs/settings.md."""


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
            if _meant(name):
                raise _unknown(name)
            continue
        setting = SETTINGS.get(name.removeprefix(PREFIX))
        if setting is None:
            raise _unknown(name)
        try:
            values[setting.field] = setting.parse(text)
        except ValueError as error:
            raise SettingError(
                f"{name} is {text!r}, but has to be {error}.", action="See `millpond docs settings`."
            ) from None
    return Settings(**values)


def _meant(name: str) -> bool:
    """Whether a name that has not the prefix is one that should have it."""
    first, _, rest = name.lower().removeprefix("spark.").partition(".")
    return bool(rest and difflib.get_close_matches(first, [PREFIX.split(".")[1]], cutoff=0.8))


def _unknown(name: str) -> SettingError:
    """The error for a setting that does not exist: what may have been meant, then all there are, in short."""
    lowered = {key.lower(): key for key in SETTINGS}
    below = name.lower().removeprefix("spark.").partition(".")[2]
    meant = difflib.get_close_matches(below, lowered, n=2, cutoff=0.6)
    question = f"Did you mean {' or '.join(PREFIX + lowered[key] for key in meant)}? " if meant else ""
    listing = f"Known settings, all below {PREFIX}: {', '.join(sorted(SETTINGS))}."
    return SettingError(f"{name} is not a setting of Millpond.", action=question + listing)
