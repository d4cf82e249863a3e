"""Millpond's settings: Spark settings named `spark.millpond.*`, read once when a query starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from millpond.errors import SettingError
from millpond.key_groups import KEY_GROUPS
from millpond.setting_values import Count, Location, Positive, Share, Size, parse_value

PREFIX = "spark.millpond."

OnChangedState = Literal["error", "keep", "evolve"]
"""Reaction to a query whose state schema has changed."""

OnWrongInSpark = Literal["auto", "error", "warn"]
"""Reaction to a query shape for which Spark gives wrong rows."""


def setting(name: str, meaning: str, default: str = "") -> Meta:
    """Describe a field of `Settings`.

    Args:
        name: the setting's name below `spark.millpond.`.
        meaning: its effect, in Markdown.
        default: in Markdown, what applies if the field is None.

    Returns:
        Metadata for `Annotated`.
    """
    return Meta(title=name, description=meaning, extra={"default": default})


class Settings(msgspec.Struct, frozen=True):
    """All settings of one query, in the order of docs/settings.md. Sizes are in bytes; None: not set by the user."""

    enabled: Annotated[
        bool,
        setting("enabled", "`false` leaves every query to Spark"),
    ] = True

    state_location: Annotated[
        Location | None,
        setting(
            "state.location",
            "URL of the folder for state: `file:`, `s3:`, `gs:`, `az:`, `hdfs:`, `webhdfs:`, or a path. Each query has "
            "a folder below it, named after its id (`query.id`)",
            default="the checkpoint",
        ),
    ] = None

    partitions: Annotated[
        Annotated[int, Meta(ge=1, le=KEY_GROUPS)] | None,
        setting(
            "partitions",
            "partitions of the state, 1 to 32768; a few per core are enough. Another number at a later start "
            "rescales the state: no data moves, each partition reads its part of the old ones",
            default="the number that the state has; at the first start `spark.sql.shuffle.partitions`",
        ),
    ] = None

    slots: Annotated[
        Positive | None,
        setting("slots", "slots per host", default="cores of a host"),
    ] = None

    slot_memory: Annotated[
        Annotated[Size, Meta(ge=16 << 20)],
        setting(
            "slot.memory",
            "memory of one slot, at least `16m`, for tables, caches and the work on them, in addition to the memory of "
            "an idle slot. The first query of an application sets it for all queries; a query with another value logs "
            "a warning. It lies outside executor memory, so leave room for it (YARN, Kubernetes: memory overhead)",
        ),
    ] = 1 << 30

    cache_disk: Annotated[
        Size | None,
        setting(
            "cache.disk",
            "for state on an object store: local disk for copies of its files, per query and slot (`10g`); `0` for "
            "none",
            default="half of the free space that other queries leave, shared by the slots",
        ),
    ] = None

    cache_admission: Annotated[
        Annotated[float, Meta(ge=0, le=1000)],
        setting(
            "cache.admission",
            "for state on an object store: when a file gets a local copy. Within a minute, more than this number of "
            "times the file's length must have been read of it, in addition to the bytes read of the copies that it "
            "evicts (0 to 1000)",
        ),
    ] = 2.0

    requests_hedged: Annotated[
        Share,
        setting(
            "requests.hedged",
            "for state on an object store: the share of range reads that may be hedged, that is sent a second time "
            "when the first answer takes longer than 95 % of them (0 to 1); `0`: no read is sent twice",
        ),
    ] = 0.05

    cache_policy: Annotated[
        Literal["timestamp", "lru", "clock"],
        setting(
            "cache.policy",
            "for state larger than memory: which rows are evicted first. `timestamp`: the least recently used rows, by "
            "batch or event time, without keys that have prefetch hints; `lru`: the least recently used rows; `clock`: "
            "rows not used since the last eviction ([prefetching](guides/prefetching.md))",
        ),
    ] = "timestamp"

    prefetch: Annotated[
        Literal["auto", "on", "off"],
        setting(
            "prefetch",
            "for state larger than memory: whether slots get prefetch hints, keys whose rows come later, and read "
            "their state in advance ([prefetching](guides/prefetching.md)). `auto`: in queries that call "
            "`millpond.lookahead`; `on`: wherever keys are known early; `off`: never",
        ),
    ] = "auto"

    prefetch_hot: Annotated[
        Count,
        setting(
            "prefetch.hot", "keys that recently came this number of times count as in memory, and get no prefetch hint"
        ),
    ] = 8

    read_batch_ratio: Annotated[
        Share,
        setting(
            "store.readBatchRatio",
            "for sessions that keep their rows until they close: the share of the open sessions whose rows are read "
            "ahead when rows on disk have to be read, in the order in which sessions are expected to close (0 to 1); "
            "`0`: no read-ahead",
        ),
    ] = 0.02

    max_space_amplification: Annotated[
        Annotated[float, Meta(ge=1.1, le=100)],
        setting(
            "store.maxSpaceAmplification",
            "for sessions that keep their rows until they close: the number of rows on disk, per row of an open "
            "session, that starts a compaction (1.1 to 100)",
        ),
    ] = 1.5

    store_pattern: Annotated[
        Literal["auto", "append", "rmw"],
        setting(
            "store.pattern",
            "how aggregates over windows and sessions in append mode keep their state, where the functions leave a "
            "choice. `append`: all rows, until their window closes; `rmw` (read-modify-write): partial results, "
            "changed by each row; `auto`: by the functions (`explain` shows the choice), or, for distinct inputs of "
            "tumbling windows, by the data while the query runs. The first start of a query fixes it",
        ),
    ] = "auto"

    commit_mode: Annotated[
        Literal["async", "sync"] | None,
        setting(
            "commit.mode",
            "`async`: commits lag by at most one batch; `sync`: each batch waits for its own commit. The default is "
            "`sync` for a query with a processor, or whose input cannot be repeated, else `async`. There is no commit "
            "interval: the query's trigger decides how often ([commit](architecture/05-commit.md))",
            default="by query",
        ),
    ] = None

    compaction: Annotated[
        Literal["local", "remote"],
        setting(
            "compaction",
            "`local`: slots compact the files of the state themselves, in the background; `remote`: processes of "
            "`millpond compactor` do it, on any machine, and a slot does it only if no compactor does "
            "([remote compaction](guides/state-files.md#remote-compaction))",
        ),
    ] = "local"

    compaction_timeout: Annotated[
        Annotated[float, Meta(ge=1, le=3600)],
        setting(
            "compaction.timeout",
            "with `compaction=remote`: seconds without a sign of life from a compactor after which a slot does the "
            "work itself, 1 to 3600",
        ),
    ] = 60.0

    on_unsupported: Annotated[
        Literal["spark", "error"],
        setting(
            "onUnsupported", "`spark` leaves unsupported operators to Spark with a warning, `error` refuses the query"
        ),
    ] = "spark"

    on_wrong_in_spark: Annotated[
        OnWrongInSpark,
        setting(
            "onWrongInSpark",
            "reaction to a query shape for which Spark gives wrong rows, and Millpond the same ones "
            "([list](compatibility.md#where-spark-is-wrong)). `error` refuses the query; `warn` runs it with a "
            "warning; `auto` refuses shapes that are wrong for all data, and warns of shapes that are wrong for some "
            "data",
        ),
    ] = "auto"

    on_changed_replay: Annotated[
        Literal["error", "run"],
        setting(
            "onChangedReplay",
            "reaction to a query that has changed in or below its stateful operators, when its last batch has to run "
            "again after a crash. `error` refuses the start; `run` makes the state from the query as it is now "
            "([restarts](guides/restarts-and-changes.md#what-may-change-between-two-starts))",
        ),
    ] = "error"

    on_changed_state: Annotated[
        OnChangedState,
        setting(
            "onChangedState",
            "reaction to a query whose state has changed. `error` refuses the start; `keep` lets functions with "
            "changed arguments keep their old values, as Spark does; `evolve` goes on with the old state where that is "
            "possible: functions that stay keep their values, and new functions see the rows from now on "
            "([changing a query](guides/changing-a-query.md))",
        ),
    ] = "error"

    state_retain: Annotated[
        Count,
        setting(
            "state.retain",
            "number of versions of the state that stay readable by `millpond.read_state(…, version=…)`, if that is "
            "more than Spark's `spark.sql.streaming.minBatchesToRetain`",
        ),
    ] = 0

    explain: Annotated[
        Literal["none", "fallback", "all"],
        setting("explain", "the operators that are logged at start: `none`, `fallback` (those on Spark), `all`"),
    ] = "fallback"

    batch_rows: Annotated[
        Positive,
        setting(
            "batch.rows",
            "rows of one Arrow batch between Spark and its Python workers; at most 4096 if there are columns of "
            "variable length. It applies to the whole query, your own Arrow and pandas functions included",
        ),
    ] = 100_000

    changes: Annotated[
        Literal["upsert", "all"],
        setting(
            "changes",
            "the changelog that update mode shows. `upsert`: inserts and the new images of updates; `all`: deletes, "
            "too, with a column `_op` (see [changes](changes.md))",
        ),
    ] = "upsert"

    map_groups: Annotated[
        Literal["batch", "window"],
        setting(
            "mapGroups",
            "the rows of one call of `applyInPandas` and `applyInArrow` on a stream. `batch`: a group's rows in one "
            "micro-batch, as in Spark; `window`: all rows of a group, once, when its window has closed (see "
            "[functions](functions.md))",
        ),
    ] = "batch"

    async_in_flight: Annotated[
        Positive,
        setting(
            "async.inFlight",
            "for asynchronous processors: the number of keys that may wait for state at a time, in each partition "
            "([processors](guides/processors.md#asynchronous-processors))",
        ),
    ] = 6000

    exchange: Annotated[
        Literal["auto", "local", "spark"],
        setting(
            "exchange",
            "`spark`: rows reach their partition through Spark's shuffle; `local`: through files on the host, which "
            "requires all tasks to run on one host; `auto`: `local` under a `local[…]` master, else `spark`",
        ),
    ] = "auto"

    combine: Annotated[
        Literal["auto", "on", "off"],
        setting(
            "combine",
            "whether Spark combines the rows of each group before the exchange, where the functions allow it "
            "([combining](guides/combining.md)). `auto`: in batches where that leaves few rows; `on`: in every batch; "
            "`off`: never",
        ),
    ] = "auto"

    placement: Annotated[
        Literal["auto", "off"],
        setting(
            "placement",
            "on a cluster: `auto` runs each partition's tasks on one host, the same in every batch, so that its state "
            "stays in memory there; `off` leaves the choice to Spark",
        ),
    ] = "auto"

    restarts: Annotated[
        Count,
        setting(
            "restarts",
            "on a cluster: how often within ten minutes the query is started again, inside the application, when a "
            "host was lost with state that was not durable yet; `0`, and always without `placement`: the query fails",
        ),
    ] = 3

    executor_timeout: Annotated[
        Annotated[float, Meta(ge=1, le=3600)],
        setting(
            "executor.timeout",
            "on a cluster, with `placement`: seconds without an answer from an executor after which its tasks run "
            "elsewhere, 1 to 3600. Spark itself waits for `spark.network.timeout` (120 s)",
        ),
    ] = 30.0

    metrics_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        setting(
            "metrics.port",
            "the driver's port from which Prometheus scrapes the query's metrics "
            "([Prometheus](guides/watching-a-query.md#for-prometheus)); requires the extra `prometheus`",
            default="not set",
        ),
    ] = None

    metrics_host: Annotated[
        Annotated[str, Meta(min_length=1)],
        setting("metrics.host", "the address to listen on; `0.0.0.0` makes the port reachable from other hosts"),
    ] = "127.0.0.1"


class Setting(NamedTuple):
    """Description of one setting.

    Attributes:
        field: the name of its field in `Settings`.
        type: the type of its value.
        meaning, default: see `setting`.
    """

    field: str
    type: Any
    meaning: str
    default: str

    def parse(self, text: str) -> Any:
        """Convert the user's text to a value.

        Raises:
            ValueError: the text is not valid; the message describes valid texts.
        """
        return parse_value(text, self.type)


def _settings() -> dict[str, Setting]:
    settings = {}
    for field, hint in get_type_hints(Settings, include_extras=True).items():
        *own, meta = hint.__metadata__
        type_ = Annotated[hint.__origin__, *own] if own else hint.__origin__
        if get_origin(type_) in (Union, UnionType):  # drop None: no text stands for it
            type_ = get_args(type_)[0]
        settings[meta.title] = Setting(field, type_, meta.description, meta.extra["default"])
    return settings


SETTINGS = _settings()
"""All settings by their names below `spark.millpond.`, in the order of docs/settings.md."""


def read_settings(conf: Mapping[str, str]) -> Settings:
    """Read Millpond's settings; other settings of Spark are ignored.

    Args:
        conf: all settings of a session, by full name.

    Raises:
        SettingError: a setting is unknown or malformed; the message lists similar and known settings.
    """
    values: dict[str, Any] = {}
    for name, text in conf.items():
        if not name.lower().startswith(PREFIX):
            if _is_misspelt(name):
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


def _is_misspelt(name: str) -> bool:
    """Return whether a name without the prefix is a misspelt setting of Millpond."""
    first, _, rest = name.lower().removeprefix("spark.").partition(".")
    return bool(rest and difflib.get_close_matches(first, [PREFIX.split(".")[1]], cutoff=0.8))


def _unknown(name: str) -> SettingError:
    """Return the error for an unknown setting; its action names similar settings, then all settings."""
    lowered = {key.lower(): key for key in SETTINGS}
    below = name.lower().removeprefix("spark.").partition(".")[2]
    meant = difflib.get_close_matches(below, lowered, n=2, cutoff=0.6)
    question = f"Did you mean {' or '.join(PREFIX + lowered[key] for key in meant)}? " if meant else ""
    listing = f"Known settings, all below {PREFIX}: {', '.join(sorted(SETTINGS))}."
    return SettingError(f"{name} is not a setting of Millpond.", action=question + listing)
