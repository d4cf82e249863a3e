"""The nouns of a decision: a query's plan, and for every stateful operator of it what runs where and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from millpond.plan.catalyst.lookups import NODE, lookup_title
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.text import nameless
from millpond.plan.reading.aggregate import Reading, calls_user
from millpond.plan.reading.join import JoinReading, join_title
from millpond.plan.reading.map_groups import MAPS, title_of
from millpond.plan.reading.processor import GROUP_STATES, PROCESSORS, group_state_title, processor_title
from millpond.plan.reading.ranking import partitioned_by
from millpond.plan.reading.reasons import Reason
from millpond.spec.kinds.union import OperatorSpec


@dataclass(frozen=True)
class Operator:
    """One stateful operator of the query.

    Attributes:
        title: what it is, for people.
        spec: what a slot computes, if it runs on Millpond.
        index: its number among the query's Millpond operators, bottom up, left to right; None on Spark.
        reading: what to project around it.
        reason: why it stays on Spark.
    """

    title: str
    spec: OperatorSpec | None = None
    index: int | None = None
    reading: Reading | JoinReading | None = None
    reason: Reason | None = None

    @property
    def closes(self) -> bool:
        """Whether the watermark closes state of this operator, and has results shown that no row asks for."""
        return self.spec is not None and self.spec.closes

    @property
    def ticks(self) -> bool:
        """Whether the clock has something to do for this operator, so that there is always another batch."""
        return self.spec is not None and self.spec.ticks

    @property
    def stateful(self) -> bool:
        """Whether it has state; what runs here may have none."""
        return self.spec is None or self.spec.stateful

    @property
    def functions(self) -> tuple[str, ...]:
        """The aggregate functions that a slot computes, in the words of the query and the order of the spec's calls."""
        if not isinstance(self.reading, Reading):
            return ()
        return tuple(nameless(one.name) for one in self.reading.aggregates if not calls_user(one))

    def left(self, reason: Reason) -> Operator:
        """The same operator, left to Spark."""
        return Operator(self.title, reason=reason)


@dataclass(frozen=True)
class Decided:
    """A plan node with what was decided about it and about the nodes below."""

    node: Node
    children: tuple[Decided, ...]
    operator: Operator | None = None

    def walk(self) -> Iterator[Decided]:
        """This and all below, bottom up, left to right."""
        for child in self.children:
            yield from child.walk()
        yield self

    def operators(self) -> Iterator[Operator]:
        """All stateful operators, bottom up, left to right."""
        return (decided.operator for decided in self.walk() if decided.operator is not None)

    def with_ours(self, change: Callable[[Operator], Operator]) -> Decided:
        """The same plan with every operator that runs on Millpond changed, bottom up, left to right."""
        children = tuple(child.with_ours(change) for child in self.children)
        operator = self.operator
        if operator is not None and operator.spec is not None:
            operator = change(operator)
        return Decided(self.node, children, operator)


class Announces(NamedTuple):
    """How a stage tells the keys of an operator.

    Attributes:
        place: its place among those that can, in the order of the plan; stages of several branches may share one.
        name: under which it does.
        columns: the hash of a key and what else the operator asks for, over the columns of the rows that pass.
    """

    place: int
    name: str
    columns: tuple[Expression, ...]


@dataclass(frozen=True)
class Stage:
    """A `millpond.lookahead` of the query.

    Attributes:
        node: where it stands, in the plan that has stages.
        columns: what it names.
        announces: the operators whose keys it can tell, by index, and how.
        reasons: why it cannot tell the keys of others that its rows get to, by their titles.
    """

    node: Node
    columns: tuple[str, ...]
    announces: Mapping[int, Announces] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrong:
    """A shape of the query for which Spark gives wrong rows.

    Attributes:
        code: a key of `plan.wrong_in_spark.SHAPES`.
        title: of the operator whose rows are wrong.
        detail: the part of the query that it is about.
        certain: whether rows are wrong whatever the data; otherwise only if rows come in an unfavourable order.
        loss: what goes wrong. advice: what to do.
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
    """What was decided about one query.

    Attributes:
        root: the decided plan.
        output_mode: `append`, `update` or `complete`.
        analyzed: the plan as the user wrote it.
        all_changes: whether the query shows rows that are gone too, and a column `_op`.
        staged: the decided plan with the stages that announce keys in it; None if there are none.
        stages: those of the query, bottom up.
        wrong: the shapes of the query for which Spark, and Millpond with it, gives wrong rows.
        operators: the query's stateful operators, bottom up, left to right.
    """

    root: Decided
    output_mode: str
    analyzed: Node
    all_changes: bool = False
    staged: Decided | None = None
    stages: tuple[Stage, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    operators: tuple[Operator, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", tuple(self.root.operators()))

    @property
    def ours(self) -> list[Operator]:
        """The operators that run on Millpond, by index."""
        return [operator for operator in self.operators if operator.spec is not None]

    @property
    def theirs(self) -> list[Operator]:
        """The operators that stay on Spark."""
        return [operator for operator in self.operators if operator.spec is None]

    @property
    def covered(self) -> frozenset[int]:
        """The operators without state, by index, of which all that comes out goes into one that has state."""
        return frozenset(_covered(self.root, above=False))

    @property
    def maps_windows(self) -> bool:
        """Whether `applyInPandas` or `applyInArrow` is to be called with whole closed windows."""
        found = (decided.operator for decided in self.root.walk() if decided.node.kind in MAPS)
        return any(operator is not None and operator.spec is not None for operator in found)

    @property
    def specs(self) -> list[OperatorSpec]:
        """What the slots compute, by operator index."""
        return [operator.spec for operator in self.operators if operator.spec is not None]


def _covered(decided: Decided, *, above: bool) -> Iterator[int]:
    operator = decided.operator
    if operator is not None and operator.index is not None:
        if above and not operator.stateful:
            yield operator.index
        above = above or operator.stateful
    for child in decided.children:
        yield from _covered(child, above=above)


def describe(node: Node) -> str:
    """An operator in a few words, the same ones at each start: they are pinned."""
    if node.kind in MAPS:
        return nameless(title_of(node))
    if node.kind == NODE:
        return nameless(lookup_title(node))
    if node.kind in PROCESSORS:
        return nameless(processor_title(node))
    if node.kind in GROUP_STATES:
        return nameless(group_state_title(node))
    if node.kind == "Aggregate":
        keys = ", ".join(grouping.name for grouping in node.list("groupingExpressions"))
        return f"aggregate by {nameless(keys)}" if keys else "aggregate"
    if node.kind == "Window":
        results = ", ".join(result.children[0].children[0].name for result in node.list("windowExpressions"))
        keys = ", ".join(key.name for key in partitioned_by(node))
        return nameless(f"{results} over rows" + (f" of each {keys}" if keys else ""))
    if node.kind == "Join":
        return f"{join_title(node)} join"
    if node.kind in ("Deduplicate", "DeduplicateWithinWatermark"):
        within = " within the watermark" if node.kind == "DeduplicateWithinWatermark" else ""
        return "deduplicate by " + ", ".join(key.name for key in node.list("keys")) + within
    return "distinct"
