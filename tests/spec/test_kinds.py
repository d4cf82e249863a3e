"""A kind of operator is defined in one place: its spec, and its entry in the table of kinds."""

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import millpond
from millpond.operators.kinds.registry import KINDS, state_tables
from millpond.operators.protocol import MAIN, TableKind
from millpond.slot.partition import tables
from millpond.spec.functions import INPUT_TYPE, KEY_COLUMNS
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.kinds.group_state import GroupStateSpec
from millpond.spec.kinds.join import JoinSide, JoinSpec
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.processor import ProcessorSpec, Variable
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import OP, AggregateCall, EventTime, Field, Order, Windows
from millpond.spec.protocol import ChangelogError, Spec
from millpond.state_reader.tables import _READ

SOURCES = Path(millpond.__file__).parent
SPECS = {kind.__name__ for kind in get_args(OperatorSpec)}

ALLOWED = {
    "plan/spark_state/rows.py": 8,  # what Spark keeps of each kind
    # The filter that bounds a rank lets all of its rows pass, so that it is read together with the rank's limit.
    "plan/changelog/changes.py": 1,
    "plan/reconcile.py": 1,  # the node above a processor says which of its columns is the event time
}
"""Where kinds are told apart outside their own rooms, how often, and why."""

K, T, V = Field("k", "string"), Field("t", "timestamp"), Field("v", "bigint")
WINDOW = Field("window", "struct<start:timestamp,end:timestamp>")
COUNT = AggregateCall("count", (0,), "bigint")
DISTINCT = AggregateCall("count", (0,), "bigint", distinct=True)
LIST = AggregateCall("collect_list", (0,), "array<bigint>")
NUMBER = Variable("number", "value", "struct<n:bigint>")
GROUP = Variable("groupState", "value", "struct<n:bigint>")
TEXTS = Variable("texts", "list", "struct<s:string>", ttl_ms=1000)
ENTRIES = Variable("entries", "map", "struct<n:bigint>", "struct<s:string>")
SIDE = JoinSide((K, V), (-1, 0), (V,))

EXAMPLES: dict[str, OperatorSpec] = {
    "running": AggregateSpec((K,), (V,), (COUNT,), "update"),
    "windows": AggregateSpec((WINDOW, K), (V,), (COUNT,), "append", EventTime(0, Windows(10, 10, 0))),
    "updated windows": AggregateSpec((WINDOW, K), (V,), (COUNT,), "update", EventTime(0, Windows(10, 10, 0))),
    "observed": AggregateSpec((WINDOW, K), (V,), (DISTINCT,), "append", EventTime(0, Windows(10, 10, 0))),
    "whole windows": AggregateSpec((WINDOW, K), (V,), (LIST,), "append", EventTime(0, Windows(10, 10, 0))),
    "distinct": AggregateSpec((K,), (V,), (DISTINCT,), "update"),
    "deduplicate": DeduplicateSpec((K, V), (0,)),
    "within": WithinSpec((K, T), (0,), EventTime(1), 1000),
    "sessions": SessionSpec((K,), WINDOW, (V,), (COUNT,), "append", 0, gap=5),
    "shown sessions": SessionSpec((K,), WINDOW, (V,), (COUNT,), "complete"),
    "whole sessions": SessionSpec((K,), WINDOW, (V,), (LIST,), "append", 0),
    "join": JoinSpec("inner", (K,), (False,), SIDE, SIDE),
    "semi join": JoinSpec("left_semi", (K,), (False,), SIDE, SIDE),
    "rank": RankSpec((K, V), (0,), (Order(1),), "row_number", 1),
    "ranks": RankSpec((K, V), (0,), (Order(1),), "rank", 3),
    "over": OverSpec((K, V), (0,), (Order(1),), (AggregateCall("sum", (1,), "bigint"),), (2,)),
    "processor": ProcessorSpec((V, K), (1,), (K, V), (NUMBER, TEXTS), "processing", "update"),
    "timers": ProcessorSpec((K, T), (0,), (K,), (ENTRIES,), "event", "append", EventTime(1), marked=True, emitted=0),
    "groups": GroupStateSpec((K, T), (0,), (K,), (GROUP,), "event", "update", EventTime(1), marked=True),
    "groups for ever": GroupStateSpec((V, K), (1,), (V,), (GROUP,), "none", "append"),
    "enrich": EnrichSpec((K, V), (0,), ("id",), (Field("name", "string"),)),
    "updated rows": EnrichSpec((K, V), (0,), ("id",), (Field("name", "string"),), updating=True),
}


def told_apart(source: str) -> int:
    """How often code asks of what kind a spec is."""
    asked = 0
    for node in ast.walk(ast.parse(source)):
        kinds: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "getattr"):
            if node.func.id == "isinstance":
                kinds = node.args[1:]
            else:  # asks a spec for what only some of them have
                asked += isinstance(node.args[0], ast.Name | ast.Attribute) and ast.unparse(node.args[0])[-4:] == "spec"
        if isinstance(node, ast.MatchClass):
            kinds = [node.cls]
        if isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            kinds = list(node.comparators)
        names = {part.id for kind in kinds for part in ast.walk(kind) if isinstance(part, ast.Name)}
        asked += bool(names & SPECS)
    return asked


def test_kinds_are_told_apart_where_they_are_at_home() -> None:
    found: Counter[str] = Counter()
    for path in SOURCES.rglob("*.py"):
        place = path.relative_to(SOURCES)
        if place.parts[0] != "spec":
            found[place.as_posix()] += told_apart(path.read_text())
    assert +found == Counter(ALLOWED), "let the spec, or its entry in operators/kinds/registry.py, say it"


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(spec, RankSpec)",
        "isinstance(one.spec, RankSpec | OverSpec)",
        "getattr(operator.spec, 'retracts', False)",
        "type(spec) is JoinSpec",
        "match spec:\n    case SessionSpec():\n        pass",
    ],
)
def test_that_is_seen(source: str) -> None:
    assert told_apart(source) == 1


def test_every_kind_has_its_entry() -> None:
    assert KINDS.keys() == set(get_args(OperatorSpec))
    assert {type(spec) for spec in EXAMPLES.values()} == KINDS.keys()


def test_every_kind_says_all_that_is_asked() -> None:
    """Mypy does not check the specs that are read from `query.json`."""
    asked = {name for name, said in vars(Spec).items() if getattr(said, "__isabstractmethod__", False)}
    assert asked
    for kind in get_args(OperatorSpec):
        left = {name for name in asked if getattr(getattr(kind, name), "__isabstractmethod__", False)}
        assert not left, kind


def test_every_store_is_opened_and_read() -> None:
    assert tables._OPEN.keys() == set(get_args(TableKind))
    assert _READ.keys() == tables._OPEN.keys() - tables._TEMPORARY


def test_what_is_pinned_keeps_its_names() -> None:
    """By these names, in this order, specs of earlier runs are read."""
    names = {kind.__struct_config__.tag: kind.__struct_fields__ for kind in get_args(OperatorSpec)}
    assert names == {
        "aggregate": ("keys", "inputs", "calls", "output_mode", "time", "retracts", "changes", "pattern"),
        "deduplicate": ("columns", "keys", "time", "unread_time"),
        "within": ("columns", "keys", "time", "delay_ms"),
        "session": ("keys", "window", "inputs", "calls", "output_mode", "lag_ms", "pattern", "gap"),
        "join": (
            *("kind", "keys", "null_safe", "left", "right"),
            *("earliest", "latest", "condition", "right_first", "lag_ms"),
        ),
        "rank": ("columns", "keys", "order", "function", "limit", "retracts", "changes"),
        "over": ("columns", "keys", "order", "calls", "preceding", "retracts", "changes"),
        "processor": (
            *("columns", "keys", "outputs", "variables", "time_mode", "output_mode"),
            *("time", "marked", "lag_ms", "purged", "emitted", "initial", "full"),
        ),
        "group_state": (
            *("columns", "keys", "outputs", "variables", "time_mode", "output_mode"),
            *("time", "marked", "lag_ms", "purged", "emitted", "initial", "full"),
        ),
        "enrich": (
            *("columns", "keys", "named", "found", "how", "on_error", "most", "ttl_ms", "timeout_ms", "retries"),
            *("concurrency", "request", "table", "name", "updating"),
        ),
    }


def changelog(change: Callable[[], OperatorSpec]) -> OperatorSpec | str:
    """A spec over a changelog, or with one as output; or why there is none."""
    try:
        return change()
    except ChangelogError as error:
        return str(error)


@pytest.mark.parametrize("spec", EXAMPLES.values(), ids=EXAMPLES)
class TestEveryKind:
    def test_comes_back_from_what_is_pinned(self, spec: OperatorSpec) -> None:
        pinned = msgspec.json.encode(spec)
        assert msgspec.json.decode(pinned, type=OperatorSpec) == spec

    def test_takes_changes_or_says_why_not(self, spec: OperatorSpec) -> None:
        """An operator that took deletes for rows would count them."""
        found = changelog(spec.consume_changelog)
        if isinstance(found, str):
            assert found
            return
        assert found.retracts
        assert found.input_fields == (*spec.input_fields, OP)

    def test_gives_out_its_changes_or_says_why_not(self, spec: OperatorSpec) -> None:
        """An operator that updates rows without their deletes must not stand below another operator."""
        found = changelog(spec.produce_changelog)
        if not spec.emits_updates:
            assert found == spec
        elif isinstance(found, str):
            assert found
        else:
            assert found.changes
            assert found.output_fields == (*spec.output_fields, OP)

    def test_has_a_table_of_what_is_shown(self, spec: OperatorSpec) -> None:
        shown = [name for name, table in state_tables(spec).items() if table.shown]
        assert bool(shown) == spec.facts.stateful
        if MAIN in state_tables(spec):
            assert state_tables(spec)[MAIN].axis == "hash"

    def test_watermark_comes_with_its_lag(self, spec: OperatorSpec) -> None:
        assert spec.with_lag(7).lag == (None if spec.lag is None else 7)
        assert spec.lag is not None or not spec.needs_no_data_batches

    def test_can_run(self, spec: OperatorSpec) -> None:
        assert spec.unsupported is None
        many = tuple(Field(f"k{number}", "int") for number in range(65))
        wide = (
            msgspec.structs.replace(spec, keys=many)
            if isinstance(spec, AggregateSpec | SessionSpec | JoinSpec)
            else msgspec.structs.replace(spec, columns=many, keys=tuple(range(65)))
        )
        if getattr(spec, "time", None) is None:
            assert wide.unsupported == KEY_COLUMNS
        if isinstance(spec, SessionSpec):  # the state has a column for the number of a key's session
            assert msgspec.structs.replace(spec, keys=many[:64]).unsupported == KEY_COLUMNS


@pytest.mark.parametrize("kind", [ProcessorSpec, GroupStateSpec])
def test_output_types_of_user_code(kind: type[ProcessorSpec]) -> None:
    """A type without an Arrow form is refused when the query is planned, not in its first batch."""

    def unsupported(type_: str) -> str | None:
        return kind((K, V), (0,), (K, Field("x", type_)), (GROUP,), "none", "update").unsupported

    for type_ in ("time(3)", "array<interval day to second>", "variant", "geometry(any)", "struct<a:int,a:int>"):
        assert unsupported(type_) == INPUT_TYPE
    for type_ in ("void", "map<string,array<timestamp>>", "string collate UNICODE"):
        assert unsupported(type_) is None


@pytest.mark.parametrize(
    "specs",
    [
        (DeduplicateSpec((K,), (0,)), DeduplicateSpec((V, K, T), (1,), EventTime(2), unread_time=False)),
        (DeduplicateSpec((K,), (0,)), DeduplicateSpec((K, V), (0,), unread_time=True)),
        (DeduplicateSpec((K, T), (0, 1), EventTime(1)), DeduplicateSpec((T, V, K), (2, 0), EventTime(0))),
        (WithinSpec((K, T), (0,), EventTime(1), 5), WithinSpec((T, V, K), (2,), EventTime(0), 7)),
    ],
)
def test_what_is_not_in_the_state_of_a_deduplication_may_change(specs: tuple[OperatorSpec, OperatorSpec]) -> None:
    before, now = (spec.compatibility_spec for spec in specs)
    assert before == now
    assert state_tables(before)[MAIN].schema == state_tables(specs[1])[MAIN].schema


@pytest.mark.parametrize(
    "specs",
    [
        (DeduplicateSpec((K, V), (0,)), DeduplicateSpec((K, V), (1,))),
        (DeduplicateSpec((K, V), (0, 1)), DeduplicateSpec((K, V), (1, 0))),
        (DeduplicateSpec((K, T), (0, 1), EventTime(1)), DeduplicateSpec((K, T), (0, 1))),
        (WithinSpec((K, V, T), (0,), EventTime(2), 5), WithinSpec((K, V, T), (1,), EventTime(2), 5)),
    ],
)
def test_what_is_in_the_state_of_a_deduplication_may_not_change(specs: tuple[OperatorSpec, OperatorSpec]) -> None:
    before, now = (spec.compatibility_spec for spec in specs)
    assert before != now


def test_only_updates_of_operators_of_spark_are_further_rows() -> None:
    taking = {name for name, spec in EXAMPLES.items() if spec.facts.reads_updates_as_rows}
    assert taking == {"deduplicate", "processor", "timers", "groups", "groups for ever", "enrich", "updated rows"}
    assert {name for name, spec in EXAMPLES.items() if spec.facts.beyond_spark} == {"rank", "ranks", "over"}


def test_changes_of_windows_stay_in() -> None:
    kept = {name for name, spec in EXAMPLES.items() if isinstance(changelog(spec.produce_changelog), str)}
    assert kept == {"updated windows", "shown sessions", "updated rows"}


def test_stores_are_chosen_by_access() -> None:
    stores = {name: spec.access_pattern.store for name, spec in EXAMPLES.items()}
    assert stores | dict.fromkeys(("join", "semi join"), "ordered") == stores
    assert stores["whole windows"] == "aligned append"
    assert stores["whole sessions"] == "unaligned append"
    assert stores["observed"] == "observed"
    held = {"aligned append": "aligned", "unaligned append": "unaligned", "ordered": "ordered"}
    for name, spec in EXAMPLES.items():
        kinds = {table.kind for table in state_tables(spec).values()}
        if not spec.facts.stateful:
            assert not kinds
            continue
        assert held.get(stores[name], "rmw") in kinds
