"""NEXMark's queries in plain Spark: functions from the streams to the result, for streaming and batch.

The meaning is that of Flink's NEXMark SQL. Three things differ in Flink. `avg` of a bigint is a bigint, hence the
cast. A regular expression without a match gives NULL instead of `''`. `count_char` is a function of that benchmark.
Event times are read in the session's time zone: set `spark.sql.session.timeZone` to UTC.

`q5-append`, `q7-append`, `q7-session` and `q11-median` are variants from the paper on FlowKV (EuroSys 2023): they
collect all rows of a window.
"""

from __future__ import annotations

from benchmarks.nexmark.queries.aggregates import q4, q15, q16, q17
from benchmarks.nexmark.queries.joins import q3, q20, q23
from benchmarks.nexmark.queries.query import Query
from benchmarks.nexmark.queries.ranking import q6, q9, q18, q19
from benchmarks.nexmark.queries.stateless import q0, q1, q2, q10, q13, q14, q21, q22
from benchmarks.nexmark.queries.windows import q5, q5_append, q7, q7_append, q7_session, q8, q11, q11_median, q12

QUERIES: dict[str, Query] = {
    query.name: query
    for query in (
        *(q0, q1, q2, q3, q4, q5, q6, q7, q8, q9, q10, q11, q12, q13, q14, q15, q16, q17, q18, q19, q20, q21, q22, q23),
        *(q5_append, q7_append, q7_session, q11_median),
    )
}
__all__ = ["QUERIES", "Query"]
