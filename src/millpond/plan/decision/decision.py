"""Data types of a decision: a query's plan, and for each stateful operator its engine and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.plan.catalyst.lookups import LOOKUP_NODE, lookup_title
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.reading.aggregate import MAPS, map_title
from millpond.plan.reading.join import JoinReading, join_title
from millpond.plan.reading.processor import GROUP_STATES, PROCESSORS, group_state_title, processor_title
from millpond.plan.reading.ranking import partitioned_by
from millpond.plan.reading.reading import Reading, calls_user_function
from millpond.plan.reading.reasons import Reason
from millpond.spec.kinds.union import OperatorSpec


@dataclass(frozen=True)
class Operator:
    """One stateful operator of the query.

    Attributes:
        title: the operator's title for people.
        spec: the spec that a slot runs; None if the operator stays on Spark.
        index: its number among the query's Millpond operators, bottom up, left to right; None on Spark.
        reading: the reading of its node: the projections around the operator.
        reason: why it stays on Spark.
    """

    title: str
    spec: OperatorSpec | None = None
    index: int | None = None
    reading: Reading | JoinReading | None = None
    reason: Reason | None = None

    @property
    def needs_no_data_batches(self) -> bool:
        """Whether the watermark closes state of this operator, which may emit results without new rows."""
        return self.spec is not None and self.spec.needs_no_data_batches

    @property
    def due_by_processing_time(self) -> bool:
        """Whether processing time has work for this operator, so that there is always another batch."""
        return self.spec is not None and self.spec.due_by_processing_time

    @property
    def stateful(self) -> bool:
        """Whether it has state; an operator on Millpond may have none."""
        return self.spec is None or self.spec.facts.stateful

    @property
    def functions(self) -> tuple[str, ...]:
        """The aggregate functions that a slot computes, in the query's words and the order of the spec's calls.

        All user functions share the last call, which keeps their columns. Its text names these columns alone: the
        functions and their code may change between starts.
        """
        reading = self.reading
        if not isinstance(reading, Reading):
            return ()
        functions = [aggregate for aggregate in reading.aggregates if not calls_user_function(aggregate)]
        texts = [function.sql(reading.column_numbers) for function in functions]
        if reading.user_calls.functions:
            columns = [reading.raw[reading.inputs[position].raw[0]] for position in reading.user_calls.inputs]
            texts.append(f"your functions of ({', '.join(column.sql(reading.column_numbers) for column in columns)})")
        return tuple(texts)

    def left_to_spark(self, reason: Reason) -> Operator:
        """Return the same operator, left to Spark."""
        return Operator(self.title, reason=reason)


@dataclass(frozen=True)
class Decided:
    """A plan node with the decisions about it and about the nodes below."""

    node: Node
    children: tuple[Decided, ...]
    operator: Operator | None = None

    def walk(self) -> Iterator[Decided]:
        """Yield this node and all descendants, bottom up, left to right."""
        for child in self.children:
            yield from child.walk()
        yield self

    def operators(self) -> Iterator[Operator]:
        """Yield all stateful operators, bottom up, left to right."""
        return (decided.operator for decided in self.walk() if decided.operator is not None)

    def with_ours(self, change: Callable[[Operator], Operator]) -> Decided:
        """Return the plan with `change` applied to every Millpond operator, bottom up, left to right."""
        children = tuple(child.with_ours(change) for child in self.children)
        operator = self.operator
        if operator is not None and operator.spec is not None:
            operator = change(operator)
        return Decided(self.node, children, operator)


class StageHints(NamedTuple):
    """Prefetch hints that a stage sends for an operator.

    Attributes:
        place: the stage's place among the operator's stages, in plan order; stages of several branches may share one.
        name: the hints' name.
        columns: the key hash and the operator's further hint columns, over the columns of the rows that pass.
    """

    place: int
    name: str
    columns: tuple[Expression, ...]


@dataclass(frozen=True)
class Stage:
    """A `millpond.lookahead` stage of the query.

    Attributes:
        node: its node in the plan that has stages.
        columns: the columns that it names.
        hints: operator index → the hints that the stage can send for it.
        reasons: title of an operator above → why the stage cannot compute its keys.
    """

    node: Node
    columns: tuple[str, ...]
    hints: Mapping[int, StageHints] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WrongShape:
    """A shape of the query for which Spark returns wrong rows.

    Attributes:
        code: a key of `plan.wrong_in_spark.SHAPES`.
        title: the title of the operator whose rows are wrong.
        detail: the part of the query that causes it.
        certain: whether rows are wrong for any data; otherwise only for an unfavourable order of rows.
        loss: the effect on the result.
        advice: the remedy.
    """

    code: str
    title: str
    detail: str
    certain: bool
    loss: str
    advice: str

    def __str__(self) -> str:
        return f"{self.code}: {self.loss} ({self.detail})"


@dataclass(frozen=True)
class Decision:
    """The decision about one query.

    Attributes:
        root: the decided plan.
        output_mode: `append`, `update` or `complete`.
        analyzed: the plan as the user wrote it.
        all_changes: whether the query also shows deleted rows, with a column `_op`.
        staged: the decided plan with lookahead stages; None if there are none.
        stages: the query's stages, bottom up.
        wrong: the shapes of the query for which Spark, and Millpond with it, returns wrong rows.
        operators: the query's stateful operators, bottom up, left to right.
    """

    root: Decided
    output_mode: str
    analyzed: Node
    all_changes: bool = False
    staged: Decided | None = None
    stages: tuple[Stage, ...] = ()
    wrong: tuple[WrongShape, ...] = ()
    operators: tuple[Operator, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", tuple(self.root.operators()))

    @property
    def on_millpond(self) -> list[Operator]:
        """The operators that run on Millpond, by index."""
        return [operator for operator in self.operators if operator.spec is not None]

    @property
    def on_spark(self) -> list[Operator]:
        """The operators that stay on Spark."""
        return [operator for operator in self.operators if operator.spec is None]

    @property
    def feeding_state(self) -> frozenset[int]:
        """Indexes of the operators without state whose whole output goes into an operator with state."""
        return frozenset(_feeding_state(self.root, above=False))

    @property
    def maps_windows(self) -> bool:
        """Whether `applyInPandas` or `applyInArrow` functions are called with whole closed windows."""
        operators = (decided.operator for decided in self.root.walk() if decided.node.kind in MAPS)
        return any(operator is not None and operator.spec is not None for operator in operators)

    @property
    def specs(self) -> list[OperatorSpec]:
        """The specs that slots run, by operator index."""
        return [operator.spec for operator in self.operators if operator.spec is not None]


def _feeding_state(decided: Decided, *, above: bool) -> Iterator[int]:
    operator = decided.operator
    if operator is not None and operator.index is not None:
        if above and not operator.stateful:
            yield operator.index
        above = above or operator.stateful
    for child in decided.children:
        yield from _feeding_state(child, above=above)


def describe(node: Node) -> str:
    """Return an operator's title, which is the same at each start: it is recorded with the state.

    Columns have their names, quoted if needed, and with a number if several have it. Computed ones have their SQL,
    without names of views and aliases.
    """
    if node.kind in MAPS:
        return map_title(node)
    if node.kind == LOOKUP_NODE:
        return lookup_title(node)
    if node.kind in PROCESSORS:
        return processor_title(node)
    if node.kind in GROUP_STATES:
        return group_state_title(node)
    if node.kind == "Aggregate":
        keys = ", ".join(grouping.label(node.column_numbers) for grouping in node.list("groupingExpressions"))
        return f"aggregate by {keys}" if keys else "aggregate"
    if node.kind == "Window":
        functions = [result.children[0].children[0] for result in node.list("windowExpressions")]
        keys = ", ".join(key.label(node.column_numbers) for key in partitioned_by(node))
        results = ", ".join(function.label(node.column_numbers) for function in functions)
        return f"{results} over rows" + (f" of each {keys}" if keys else "")
    if node.kind == "Join":
        return f"{join_title(node)} join"
    if node.kind in ("Deduplicate", "DeduplicateWithinWatermark"):
        within = " within the watermark" if node.kind == "DeduplicateWithinWatermark" else ""
        return "deduplicate by " + ", ".join(key.label(node.column_numbers) for key in node.list("keys")) + within
    return "distinct"
