"""Reasons why a stateful operator stays on Spark: a stable code and one sentence each."""

from __future__ import annotations

from dataclasses import dataclass

REASONS = {
    "MP-MODE": "it does not run in output mode {detail}",
    "MP-WATERMARK": "in output mode append it needs an event time with a watermark to group by",
    "MP-EVENT-TIME": "it groups by event time ({detail}), whose state expires with the watermark",
    "MP-SINGLE": "spark.sql.streaming.statefulOperator.allowMultiple is false, which changes what is late",
    "MP-BESIDE": "its state is closed by the watermark, beside a stateful operator that stays on Spark",
    "MP-FUNCTION": "the aggregate function {detail} is not supported",
    "MP-PYTHON": "the user's function {detail} is called in a way that is not supported",
    "MP-VERSION": "{detail} needs Spark 4.3",
    "MP-MAP": "applyInPandas and applyInArrow over closed windows need {detail}",
    "MP-WHOLE": "{detail} needs all rows of a group, which are kept for event-time windows in output mode append only",
    "MP-SESSION-DISTINCT": "{detail} over distinct inputs is supported in session windows in output mode append only",
    "MP-PROCESSOR": "processors with {detail} are not supported",
    "MP-KEY-TYPE": "the key {detail} has a type that cannot be a key",
    "MP-INPUT-TYPE": "{detail} has a type that is not supported",
    "MP-KEYS": "it has more key columns than the supported 64 ({detail})",
    "MP-OPERATOR": "{detail} is not supported",
    "MP-ABOVE": "a stateful operator above it does not run on Millpond and would count its updates twice",
    "MP-BELOW": "'{detail}' below it stays on Spark, and each new version of its rows would count as a row",
    "MP-MERGED": "Spark's optimiser removes, or merges with others, a stateful operator of this query: {detail}",
    "MP-CONDITION": "whether a row has a partner depends on {detail}, which is not supported in such a join",
    "MP-CTE": "it stands in a common table expression that is evaluated once for several readers",
    "MP-WINDOW": "the window function {detail} is not supported on streams",
    "MP-UNBOUNDED": "no filter above bounds {detail} by a constant, so that all rows would have to be kept",
    "MP-CHANGES": "rows below it change, and their changes do not pass {detail}",
    "MP-BETWEEN": "rows below it change, and when one is taken back {detail} may not be what it was",
    "MP-RETRACT": "rows below it change, and {detail} cannot take rows back",
    "MP-TRIGGER": "the trigger {detail} runs without micro-batch commits",
}


_ADVICE = {
    "MP-MODE": "Use another output mode: `millpond docs compatibility` has what runs in which",
    "MP-WATERMARK": "Group by a time that has a watermark (withWatermark), or its windows, or use output mode update",
    "MP-WHOLE": "Group by windows of a time that has a watermark, in output mode append (`millpond docs functions`)",
    "MP-INPUT-TYPE": "Select the columns that you need first, without it, or output another type",
    "MP-KEY-TYPE": "Use a key of another type",
    "MP-VERSION": "Use Spark 4.3; on Spark's own state store, processors need the RocksDB provider and the packages "
    "protobuf, grpcio and googleapis-common-protos",
    "MP-FUNCTION": "Use one of the functions that `millpond docs compatibility` has",
    "MP-WINDOW": "Use row_number, rank or dense_rank under a filter, or aggregates over ROWS n PRECEDING",
    "MP-UNBOUNDED": "Filter by it with a constant, as in WHERE rank <= 3",
    "MP-ABOVE": "Change the operator above it",
    "MP-BELOW": "Change the operator below it",
    "MP-BESIDE": "Change the operator beside it",
    "MP-MERGED": "Leave the operator out of the query if nothing needs it",
    "MP-BETWEEN": "Compute it below the lowest stateful operator, or above the topmost",
    "MP-CTE": "Write the common table expression out where it is read",
    "MP-SINGLE": "Set spark.sql.streaming.statefulOperator.allowMultiple to true",
}


_CHANGE = "Change the query; `millpond docs changes` and `millpond docs compatibility` say what runs"


@dataclass(frozen=True)
class Reason:
    """A stable code with the part of the query that it refers to.

    Attributes:
        code: a key of `REASONS`.
        detail: the part of the query.
    """

    code: str
    detail: str = ""

    @property
    def advice(self) -> str:
        """The remedy if Spark does not run the operator either."""
        return _ADVICE.get(self.code, _CHANGE)

    def __str__(self) -> str:
        return f"{self.code}: {REASONS[self.code].format(detail=self.detail)}"


class Unsupported(Exception):  # control flow within this package; users never see it
    """An operator, or a part of it, has to stay on Spark."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason
