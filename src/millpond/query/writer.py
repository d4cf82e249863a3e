"""`millpond.writeStream(df)`: Spark's `DataStreamWriter`, whose `start()` and `toTable()` run the rewritten query.

Every call goes to Spark's own writer first, so that Spark's errors appear, and is recorded. At the start, the calls are
repeated on the writer of the rewritten DataFrame.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millpond.conf import Settings, read_settings
from millpond.errors import UnsupportedError
from millpond.plan.catalyst.exchange.forms import prepare
from millpond.plan.catalyst.session import settings_of
from millpond.plan.decide import decide
from millpond.plan.decision.decision import Decision, Operator
from millpond.plan.explain import as_text
from millpond.plan.reading.reasons import Reason
from millpond.query.launch import Launch, WriterCall
from millpond.query.running.session_settings import unchanged_settings, wait_for_other_starts
from millpond.query.starting.checks import (
    check_name,
    check_session,
    check_stream,
    check_user_functions,
    check_writer,
    check_wrong_in_spark,
    unsupported_anywhere,
)
from millpond.query.starting.locations import choose_checkpoint, is_refused, named_checkpoint
from millpond.query.starting.start import refuse_own_state

log = logging.getLogger("millpond")

_UNSUPPORTED_ANYWHERE = "'%s' does not run on Millpond, and Spark does not run it on streams either: %s. %s."


def _recorded(name: str) -> Callable[..., StreamWriter]:
    original = getattr(DataStreamWriter, name)

    @functools.wraps(original)
    def call(self: StreamWriter, *args: Any, **kwargs: Any) -> StreamWriter:
        original(self, *args, **kwargs)
        self._calls.append((name, args, kwargs))
        return self

    return call


class StreamWriter(DataStreamWriter):  # type: ignore[misc]
    """A `DataStreamWriter` that runs the query's supported stateful operators on Millpond.

    Args:
        df: a streaming DataFrame of a classic session.

    Raises:
        UsageError: the session is a Spark Connect session, or its version of Spark was never tested.

    Examples:
        >>> writer = millpond.writeStream(spark.readStream.format("rate").load()).outputMode("append")
        >>> query = writer.start(format="noop", checkpointLocation="/tmp/rate")
        >>> query.isActive
        True
        >>> query.stop()
    """

    def __init__(self, df: DataFrame) -> None:
        check_session(df)
        super().__init__(df)
        prepare(self._spark)
        # Spark's writer reads the session's default format when it is created. Later changes have no effect.
        self._calls: list[WriterCall] = [("format", (self._spark.conf.get("spark.sql.sources.default"),), {})]
        self._path: str | None = None
        self._table = False

    outputMode = _recorded("outputMode")
    format = _recorded("format")
    option = _recorded("option")
    options = _recorded("options")
    partitionBy = _recorded("partitionBy")
    clusterBy = _recorded("clusterBy")
    queryName = _recorded("queryName")
    trigger = _recorded("trigger")
    foreach = _recorded("foreach")
    foreachBatch = _recorded("foreachBatch")

    def start(
        self,
        path: str | None = None,
        format: str | None = None,
        outputMode: str | None = None,
        partitionBy: str | list[str] | None = None,
        queryName: str | None = None,
        **options: Any,
    ) -> StreamingQuery:
        """Start the query, as `DataStreamWriter.start` does.

        Raises:
            SettingError: a `spark.millpond.*` setting is unknown or malformed.
            UnsupportedError: an operator is not supported and `onUnsupported` is `error`.
            WrongInSparkError: Spark gives wrong rows for a shape of the query, and `onWrongInSpark` does not allow it.
            UsageError: the setup of the query would break its state.
            TransientError: another thread's start takes too long, or a store fails.
        """
        self._apply(format, outputMode, partitionBy, queryName, options)
        self._path, self._table = path, False
        return self._launch(lambda writer: DataStreamWriter.start(writer, path))

    def toTable(
        self,
        tableName: str,
        format: str | None = None,
        outputMode: str | None = None,
        partitionBy: str | list[str] | None = None,
        queryName: str | None = None,
        **options: Any,
    ) -> StreamingQuery:
        """Start the query into a table, as `DataStreamWriter.toTable` does; raise the errors of `start`."""
        self._apply(format, outputMode, partitionBy, queryName, options)
        self._path, self._table = None, True
        return self._launch(lambda writer: DataStreamWriter.toTable(writer, tableName))

    def _apply(self, format_: Any, output_mode: Any, partition_by: Any, query_name: Any, options: Any) -> None:
        self.options(**options)
        for method, value in (
            (self.outputMode, output_mode),
            (self.partitionBy, partition_by),
            (self.format, format_),
            (self.queryName, query_name),
        ):
            if value is not None:
                method(value)

    def _launch(self, launch: Callable[[DataStreamWriter], StreamingQuery]) -> StreamingQuery:
        settings = read_settings(settings_of(self._spark))
        if not settings.enabled:
            return self._launch_natively(launch, settings)
        mode = self._argument("outputMode") or "append"
        # Starts of other threads change settings that decide what runs where, and what Spark checks.
        with unchanged_settings():
            decision = decide(self._df, mode, settings.changes, settings.store_pattern, settings.map_groups)
            check_user_functions(self._spark, decision)
            unsupported = unsupported_anywhere(self._df, decision)
            self._report(decision, unsupported, settings)
            check_wrong_in_spark(self._df, decision, settings.on_wrong_in_spark)
        try:
            return self._launch_decided(launch, decision, settings)
        except AnalysisException as error:
            for operator in unsupported:
                assert operator.reason is not None
                error.add_note(_UNSUPPORTED_ANYWHERE % (operator.title, operator.reason, operator.reason.advice))
            raise

    def _launch_decided(
        self, launch: Callable[[DataStreamWriter], StreamingQuery], decision: Decision, settings: Settings
    ) -> StreamingQuery:
        if not decision.on_millpond:
            return self._launch_natively(launch, settings)
        trigger = self._continuous_trigger()
        if trigger and decision.maps_windows:
            raise UnsupportedError(
                f"The trigger {trigger} has no closed windows to call functions with.",
                action="Use another trigger, or set spark.millpond.mapGroups to 'batch'.",
            )
        if trigger:
            log.warning("the query stays on Spark: %s", Reason("MP-TRIGGER", trigger))
            return self._launch_natively(launch, settings)
        with unchanged_settings():
            check_stream(self._df, decision)
            check_writer(self._spark, self._option)
            check_name(self._spark, self._argument("queryName"))
            sink, path = self._sink(), self._path or self._option("path")
            name, given = self._argument("queryName"), self._option("checkpointLocation")
            checkpoint = choose_checkpoint(self._spark, sink, name, given, settings.state_location)
        if checkpoint is None or is_refused(sink, path, decision.output_mode):
            return launch(self)  # Spark raises its own error, and an active run of the query goes on
        # Not held while a query starts: that calls listeners, or changes the settings.
        with unchanged_settings():
            prepared = Launch(
                self._df,
                decision,
                settings,
                checkpoint,
                list(self._calls),  # the writer may be used again
                sink,
                path,
                launch,
            )
        return prepared.supervise()

    def _launch_natively(
        self, launch: Callable[[DataStreamWriter], StreamingQuery], settings: Settings
    ) -> StreamingQuery:
        checkpoint = named_checkpoint(self._spark, self._argument("queryName"), self._option("checkpointLocation"))
        if checkpoint is not None:
            refuse_own_state(self._spark, settings, checkpoint)
        wait_for_other_starts()
        return launch(self)

    def _report(self, decision: Decision, unsupported: list[Operator], settings: Settings) -> None:
        if settings.changes == "all" and decision.on_millpond and not decision.all_changes:
            log.warning(
                "spark.millpond.changes=all has no effect on this query, whose rows have no column _op: in output mode "
                "%s, %s",
                decision.output_mode,
                "no row that it shows changes later"
                if decision.output_mode != "complete"
                else "every batch shows all rows",
            )
        if settings.explain == "all":
            log.warning("%s", as_text(decision, unsupported))
        # If neither engine runs some operators, the query fails: report only these.
        for operator in unsupported or decision.on_spark:
            assert operator.reason is not None
            if settings.on_unsupported == "error":
                leave = "Change the query, or set spark.millpond.onUnsupported=spark to leave it to Spark."
                raise UnsupportedError(
                    f"The operator '{operator.title}' is not supported: {operator.reason}.",
                    action=f"{operator.reason.advice}. Spark does not run it on streams either."
                    if unsupported
                    else leave,
                )
            if settings.explain != "fallback":
                continue
            if unsupported:
                log.warning(_UNSUPPORTED_ANYWHERE, operator.title, operator.reason, operator.reason.advice)
            else:
                log.warning("'%s' stays on Spark's state store: %s", operator.title, operator.reason)

    def _continuous_trigger(self) -> str | None:
        """Return the name of a trigger without micro-batch commits, else None."""
        kwargs: dict[str, Any] = next((k for name, _, k in reversed(self._calls) if name == "trigger"), {})
        return next((name for name in ("continuous", "realTime") if kwargs.get(name) is not None), None)

    def _sink(self) -> str:
        """Return the sink's format, or `foreach`/`foreachBatch`; empty for a table."""
        if self._table:
            return ""
        names = [name for name, _, _ in self._calls if name in ("format", "foreach", "foreachBatch")]
        return str(self._argument("format")) if names[-1] == "format" else names[-1]

    def _argument(self, method: str) -> Any:
        """Return the argument of the last call of a one-argument method; None without a call."""
        values = [[*args, *kwargs.values()][0] for name, args, kwargs in self._calls if name == method]
        return values[-1] if values else None

    def _option(self, name: str) -> str | None:
        """Return the value of a writer's option as Spark does: names ignore case, the last value counts."""
        option_value = None
        for method, args, kwargs in self._calls:
            if method == "option":
                pair = dict(zip(("key", "value"), args, strict=False)) | kwargs
                options = {pair["key"]: pair["value"]}
            elif method == "options":
                options = kwargs
            else:
                continue
            for key, value in options.items():
                if key.lower() == name.lower() and value is not None:
                    option_value = str(value)
        return option_value
