"""Messages of a restart with a query other than the one that wrote the checkpoint, by plain specs."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from millpond.checkpoint.state_schema import BetweenSchema, OperatorSchema, StateSchema, plain
from millpond.errors import StateIncompatibleError
from millpond.query.schema.differences import differences
from millpond.query.schema.evolution import persistent_spec, with_state_names
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import AggregateCall, EventTime, Field, Order, Windows
from tests.spec.test_kinds import EXAMPLES, GROUP, NUMBER, SIDE, TEXTS, K, T, V

S = Field("s", "string")
SUM = AggregateCall("sum", (0,), "bigint")
MINUTES = 60_000_000
TIMED = EventTime(0, Windows(10 * MINUTES, 10 * MINUTES, 0))
EXTRA = {
    "sliding windows": msgspec.structs.replace(EXAMPLES["windows"], time=EventTime(0, Windows(10, 5, 0, True))),  # type: ignore[type-var]
    "keys with a time": msgspec.structs.replace(
        EXAMPLES["deduplicate"], columns=(K, T), keys=(0, 1), time=EventTime(1)
    ),  # type: ignore[type-var]
}
SPECS = EXAMPLES | EXTRA


def query(spec: OperatorSpec, name: str = "it", functions: tuple[str, ...] = ()) -> dict[str, Any]:
    pinned: dict[str, Any] = plain(StateSchema(1 << 15, (OperatorSchema(name, persistent_spec(spec), {}, functions),)))
    return pinned


def said(before: OperatorSpec, functions: tuple[str, ...] = (), now: tuple[str, ...] = (), **changes: Any) -> list[str]:
    """The differences to a spec with changed fields."""
    changed = msgspec.structs.replace(before, **changes)
    return [
        line.removeprefix("it: ")
        for line in differences(query(before, functions=functions), query(changed, functions=now or functions))
    ]


def side(**changes: Any) -> Any:
    return msgspec.structs.replace(SIDE, **changes)


RUNNING, WINDOWED, SESSIONS = EXAMPLES["running"], EXAMPLES["windows"], EXAMPLES["sessions"]
TOLD: dict[str, tuple[list[str], list[str]]] = {
    "key": (
        said(RUNNING, keys=(Field("user", "string"), Field("country", "string"))),
        ["the query groups by (user, country); its checkpoint groups by (k)"],
    ),
    "type of a key": (
        said(RUNNING, keys=(Field("k", "int"),)),
        ["the query groups by (k int); its checkpoint groups by (k string)"],
    ),
    "no key": (said(RUNNING, keys=()), ["the query groups by (); its checkpoint groups by (k)"]),
    "mode": (
        said(RUNNING, output_mode="complete"),
        ["the query runs in output mode complete; its checkpoint runs in output mode update"],
    ),
    "pattern": (
        said(RUNNING, pattern="append"),
        [
            "the query keeps groups by spark.millpond.store.pattern=append; its checkpoint keeps groups by "
            "spark.millpond.store.pattern=auto"
        ],
    ),
    "rows that change": (
        said(RUNNING, retracts=True),
        ["the query reads rows that may be taken back; its checkpoint reads rows that stay"],
    ),
    "deletions": (
        said(RUNNING, changes=True),
        [
            "the query gives out also which rows are gone (spark.millpond.changes, or the operator above); its "
            "checkpoint gives out new rows alone"
        ],
    ),
    "a function": (
        said(RUNNING, ("count(v)",), ("sum(v)",), calls=(SUM,)),
        ["the query computes sum(v); its checkpoint computes count(v)"],
    ),
    "a function of another struct": (
        said(RUNNING, ("count(after.v)",), ("count(before.v)",)),
        ["the query computes count(before.v); its checkpoint computes count(after.v)"],
    ),
    "a function without a text": (
        said(RUNNING, calls=(SUM,)),
        ["the query computes sum(bigint); its checkpoint computes count(bigint)"],
    ),
    "one more function": (
        said(RUNNING, ("count(v)",), ("count(v)", "sum(v)"), calls=(EXAMPLES["running"].calls[0], SUM)),
        ["the query computes sum(v); its checkpoint does not"],
    ),
    "one less function": (
        said(RUNNING, ("count(v)",), calls=()),
        ["the query does not compute count(v); its checkpoint does"],
    ),
    "type of an input": (
        said(RUNNING, ("count(v)",), inputs=(Field("v", "int"),)),
        ["the query computes count(v) of int; its checkpoint of bigint"],
    ),
    "type of a result": (
        said(RUNNING, ("count(v)",), calls=(AggregateCall("count", (0,), "int"),)),
        ["the query's count(v) gives int; its checkpoint's gives bigint"],
    ),
    "a condition": (
        said(RUNNING, calls=(AggregateCall("count", (0,), "bigint", filter=0),)),
        ["the query computes count(bigint) FILTER (WHERE …); its checkpoint computes count(bigint)"],
    ),
    "another argument": (
        said(RUNNING, ("count(v)",), inputs=(V, V), calls=(AggregateCall("count", (1,), "bigint"),)),
        ["the query's count(v) reads other columns than its checkpoint's, or shares them with other functions"],
    ),
    "size of windows": (
        said(msgspec.structs.replace(WINDOWED, time=TIMED), time=EventTime(0, Windows(5 * MINUTES, 5 * MINUTES, 0))),
        ["the query has windows of 5 minutes; its checkpoint has windows of 10 minutes"],
    ),
    "slide of windows": (
        said(
            msgspec.structs.replace(WINDOWED, time=TIMED),
            time=EventTime(0, Windows(10 * MINUTES, 5 * MINUTES, MINUTES)),
        ),
        [
            "the query has windows of 10 minutes every 5 minutes (startTime 1 minute); its checkpoint has windows of "
            "10 minutes"
        ],
    ),
    "panes": (
        said(WINDOWED, time=EventTime(0, Windows(10, 10, 0, True))),
        ["the query keeps sliding windows by what they share; its checkpoint keeps sliding windows each by itself"],
    ),
    "no watermark": (
        said(WINDOWED, time=None),
        [
            "the query assigns no windows of event time; its checkpoint has windows of 10 microseconds",
            "the query keeps groups for ever; its checkpoint keeps groups until the watermark passes window",
        ],
    ),
    "a late watermark": (said(WINDOWED, time=EventTime(0, Windows(10, 10, 0), 60_000)), []),
    "key of sessions": (
        said(SESSIONS, keys=(S,)),
        ["the query groups by sessions and (s); its checkpoint groups by sessions and (k)"],
    ),
    "sessions for ever": (
        said(SESSIONS, lag_ms=None),
        ["the query keeps sessions for ever; its checkpoint keeps sessions until the watermark passes them"],
    ),
    "key of a deduplication": (
        said(EXAMPLES["deduplicate"], keys=(0, 1)),
        ["the query deduplicates by (k, v); its checkpoint deduplicates by (k)"],
    ),
    "columns beside the key of a deduplication": (said(EXAMPLES["deduplicate"], columns=(K, V, S)), []),
    "delay of a deduplication": (said(EXAMPLES["within"], delay_ms=60_000), []),
    "kind of a join": (
        said(EXAMPLES["join"], kind="left_outer"),
        ["the query has a join of the kind left outer; its checkpoint has a join of the kind inner"],
    ),
    "range of a join": (
        said(EXAMPLES["join"], earliest=0, latest=MINUTES),
        [
            "the query joins rows whose left time is from 0 seconds to 1 minute after the right one; its checkpoint "
            "joins rows of any times"
        ],
    ),
    "condition of a join": (
        said(EXAMPLES["join"], condition=["and", ["<", ["left", 0], ["right", 0]], ["not", ["left", 7]]]),
        [
            "the query has ((left.v < right.v) and not (left.value 7)) as its further condition; its "
            "checkpoint has nothing as its further condition"
        ],
    ),
    "side of a join": (
        said(EXAMPLES["join"], left=side(expiry_ms=-60_000)),
        [
            "the query keeps left rows until the watermark is 1 minute past them; its checkpoint keeps left rows for "
            "ever"
        ],
    ),
    "rank": (
        said(EXAMPLES["ranks"], limit=5, function="dense_rank"),
        ["the query keeps rows with dense_rank() up to 5; its checkpoint keeps rows with rank() up to 3"],
    ),
    "order": (
        said(EXAMPLES["ranks"], order=(Order(1, True, True), Order(0, False, True))),
        ["the query orders by (v desc, k nulls last); its checkpoint orders by (v)"],
    ),
    "rows before": (
        said(EXAMPLES["over"], preceding=(5,)),
        [
            "the query computes its functions over (5 rows) preceding the current one; its checkpoint computes its "
            "functions over (2 rows) preceding the current one"
        ],
    ),
    "variables": (
        said(EXAMPLES["processor"], variables=(NUMBER,)),
        [
            "the query has the state variables (number: a value of struct<n:bigint>); its checkpoint has the state "
            "variables (number: a value of struct<n:bigint>, texts: a list of struct<s:string>, with a time to live)"
        ],
    ),
    "times": (
        said(EXAMPLES["processor"], time_mode="event"),
        ["the query has event time; its checkpoint has processing time"],
    ),
    "state of groups": (
        said(EXAMPLES["groups"], variables=(msgspec.structs.replace(GROUP, value="struct<n:int>"),)),
        ["the query has a state of struct<n:int>; its checkpoint has a state of struct<n:bigint>"],
    ),
    "timeouts": (
        said(EXAMPLES["groups"], time_mode="none"),
        ["the query has no timeouts; its checkpoint has timeouts of event time"],
    ),
    "lookup": (said(EXAMPLES["enrich"], keys=(1,)), ["the query looks up by (v); its checkpoint looks up by (k)"]),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_difference_in_the_words_of_the_query(name: str) -> None:
    lines, wanted = TOLD[name]
    assert lines == wanted


OTHERS: dict[str, Any] = {
    "keys": [(K, V), (1,), ()],
    "inputs": [(Field("v", "int"),)],
    "columns": [(K, T, S), (V, K), (K,)],
    "calls": [(SUM,), (AggregateCall("count", (0,), "bigint", options={"eval_mode": "try"}),)],
    "output_mode": ["complete"],
    "time": [None, EventTime(1), EventTime(0, Windows(20, 10, 0)), EventTime(0, None, 7)],
    "retracts": [True],
    "changes": [True],
    "pattern": ["rmw"],
    "unread_time": [True],
    "delay_ms": [7],
    "window": [Field("w", "struct<start:timestamp,end:timestamp>")],
    "lag_ms": [7],
    "gap": [7],
    "kind": ["full_outer"],
    "null_safe": [(True,)],
    "left": [
        side(**{name: value})
        for name, value in {
            "columns": (K, S),
            "places": (-1, 1),
            "values": (S,),
            "keeps": True,
            "late": "time",
            "expiry_ms": 7,
            "expiry_cap_ms": 7,
            "filtered": True,
        }.items()
    ],
    "earliest": [7],
    "latest": [7],
    "condition": [["<", ["left", 0], ["right", 0]]],
    "right_first": [True],
    "order": [(Order(0),), (Order(1, True),)],
    "function": ["dense_rank"],
    "limit": [7],
    "preceding": [(7,)],
    "variables": [(NUMBER,), (msgspec.structs.replace(TEXTS, ttl_ms=0),)],
    "time_mode": ["none"],
}
"""Other values of fields that last."""
OTHERS["right"] = OTHERS["left"]
FREE = {"outputs", "marked", "purged", "emitted", "initial", "full"} | {*EXAMPLES["enrich"].__struct_fields__[2:]}
"""Fields of which nothing depends in the state."""
INTERNAL = re.compile(
    r"_ms\b|\bspec\b|retract|shared|\bpassed\b|preceding\[|\w\[|\blag\b|None|True|False|\bfield\b|earliest|places|__"
)


@pytest.mark.parametrize("name", SPECS)
def test_no_difference_goes_unsaid(name: str) -> None:
    """A field that lasts and has no words would have another query go on with the state."""
    spec = SPECS[name]
    for field in {*spec.__struct_fields__} - FREE:
        for value in OTHERS[field]:
            changed = msgspec.structs.replace(spec, **{field: value})
            try:
                msgspec.convert(plain(changed), OperatorSpec)
                same = persistent_spec(changed) == persistent_spec(spec)
                lines = differences(query(spec), query(changed))
            except (IndexError, ValueError):  # a value of another kind, or a position that there is not
                continue
            assert bool(lines) != same, (field, value)
            unclear = [line for line in lines if "another version" in line or INTERNAL.search(line)]
            assert not unclear, (field, value)


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        ({"ignore_nulls": False}, {"ignore_nulls": True}, "ignores nulls; its checkpoint's takes nulls"),
        ({}, {"eval_mode": "try"}, "gives null on overflow (try_); its checkpoint's has no such option"),
        (
            {"null_on_divide_by_zero": True},
            {"null_on_divide_by_zero": False},
            "gives NaN where it would divide by zero; its checkpoint's gives null where it would divide by zero",
        ),
        (
            {"relative_sd": 0.05, "raw_estimates": [1.0]},
            {"relative_sd": 0.01, "raw_estimates": [2.0]},
            "has a relative standard deviation of 0.01; its checkpoint's has a relative standard deviation of 0.05",
        ),
        (
            {"delimiter": "2c"},
            {"delimiter": "3b20"},
            "puts '; ' between values; its checkpoint's puts ',' between values",
        ),
        (
            {"order": [[False, False]]},
            {"order": [[True, False], [False, True]]},
            "orders values descending nulls first, ascending nulls last; its checkpoint's orders values ascending",
        ),
        (
            {"percentages": [0.5]},
            {"percentages": [0.5, 0.9]},
            "computes the shares 0.5, 0.9; its checkpoint's computes the shares 0.5",
        ),
        ({"accuracy": 100}, {"accuracy": 1000}, "has an accuracy of 1000; its checkpoint's has an accuracy of 100"),
        ({"array": False}, {"array": True}, "gives an array; its checkpoint's gives one value"),
        (
            {"width": 7},
            {"width": 9},
            "has an error that takes 9 counters; its checkpoint's has an error that takes 7 counters",
        ),
    ],
    ids=str,
)
def test_options_of_functions(before: dict[str, Any], now: dict[str, Any], wanted: str) -> None:
    calls = [AggregateCall("f", (0,), "bigint", options=options) for options in (before, now)]
    specs = [msgspec.structs.replace(RUNNING, calls=(call,)) for call in calls]
    assert differences(*(query(spec, functions=("f(v)",)) for spec in specs)) == [f"it: the query's f(v) {wanted}"]


@pytest.mark.parametrize("option", ["merges_empty", "weighted"])
def test_an_upgrade_of_spark_is_no_difference_to_functions(option: str) -> None:
    calls = [AggregateCall("f", (0,), "bigint", options=options) for options in ({option: True}, {})]
    specs = [msgspec.structs.replace(RUNNING, calls=(call,)) for call in calls]
    assert differences(*(query(spec, functions=("f(v)",)) for spec in specs)) == []


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("semi join", msgspec.structs.replace(EXAMPLES["semi join"], right_first=True)),  # since Spark 4.2
        # Above a semi join, the lag is another since Spark 4.3.
        *((name, EXAMPLES[name].with_lag(60_000)) for name in ("semi join", "windows", "sessions", "within")),
    ],
)
def test_an_upgrade_of_spark_is_no_difference_to_operators(name: str, now: OperatorSpec) -> None:
    assert now != EXAMPLES[name]
    assert query(now) == query(EXAMPLES[name])
    assert differences(query(EXAMPLES[name]), query(now)) == []


def test_a_spec_of_another_version_is_refused() -> None:
    before, now = query(RUNNING), query(RUNNING)
    before["operators"][0]["spec"]["later"] = 1
    now["operators"][0]["tables"] = {"main": {}}
    broken = query(RUNNING)
    broken["operators"][0]["spec"]["keys"] = 7
    for other in (before, now, broken):
        assert differences(other, query(RUNNING)) == [
            "it: another version of Millpond made its state, which this one does not read"
        ]
    with pytest.raises(StateIncompatibleError, match="it: another version of Millpond made its state"):
        with_state_names(RUNNING, OperatorSchema("it", broken["operators"][0]["spec"], {}))


def test_operators_that_come_and_go() -> None:
    one, other, both = (
        plain(StateSchema(1 << 15, tuple(OperatorSchema(name, plain(RUNNING), {}) for name in names)))
        for names in (("a",), ("a", "b"), ("b", "a"))
    )
    more = "the query has 2 stateful operators on Millpond; its checkpoint has 1 stateful operator"
    assert differences(one, other) == [more, "the query has 'b'; its checkpoint has none"]
    less = "the query has 1 stateful operator on Millpond; its checkpoint has 2 stateful operators"
    assert differences(other, one) == [less, "the query has no 'b'; its checkpoint has one"]
    assert differences(other, both) == [
        "the query has the stateful operators 'b', 'a'; its checkpoint 'a', 'b'",
    ]
    kinds = differences(query(RUNNING, "aggregate by k"), query(EXAMPLES["deduplicate"], "deduplicate by k"))
    assert kinds == ["the query has 'deduplicate by k' where its checkpoint has 'aggregate by k'"]
    groups = {**one, "key_groups": 64}
    assert differences(one, groups) == ["this version of Millpond has 64 key groups; the checkpoint has 32768"]


def test_what_stands_between_operators() -> None:
    def between(computes: list[str], zone: str, ansi: str, *codes: str) -> dict[str, Any]:
        functions = tuple(("scored", code) for code in codes)
        digest = "".join(computes) + zone + ansi
        one = BetweenSchema(
            "aggregate by k", "aggregate", tuple(computes), functions, (zone,), {"spark.sql.ansi.enabled": ansi}, digest
        )
        found: dict[str, Any] = plain(StateSchema(1 << 15, (), (one,)))
        return found

    where = "between 'aggregate by k' and 'aggregate': "
    before = between(["Filter: (n >= 1)", "Aggregate: count(1)"], "UTC", "true")
    assert differences(before, before) == []
    assert differences(before, between(["Filter: (n >= 2)", "Aggregate: count(1)"], "UTC", "true")) == [
        where + "the query has Filter: (n >= 2); its checkpoint has Filter: (n >= 1)"
    ]
    called = [between(["Filter: scored(n)"], "UTC", "true", *codes) for codes in (("a", "b"), ("a", "c"), ("a", ""))]
    assert differences(called[0], called[1]) == [
        where + "the query's function scored has other code than its checkpoint's (or refers to other code, or runs on "
        "another release of Python)"
    ]
    assert differences(called[0], called[2]) == []  # some code cannot be read
    assert differences(before, between(["Aggregate: count(1)"], "Asia/Tokyo", "false")) == [
        where + "the query has nothing there; its checkpoint has Filter: (n >= 1)",
        where + "the query computes in the time zone Asia/Tokyo; its checkpoint in UTC",
        where + "the query runs with spark.sql.ansi.enabled=false; its checkpoint with true",
    ]
