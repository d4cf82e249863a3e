"""Canonical text of expressions and plans, equal in every session."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from py4j.protocol import Py4JError

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import INTEGERS, Expression, Node, items
from millpond.plan.catalyst.python import function_code, time_zone_seen
from millpond.plan.catalyst.session import settings_of

Cut = Callable[[Expression], str | None]
"""Returns the text that replaces an expression without looking into it; None if it is described in full."""

_GENERATED = re.compile(r"#-?\d+L?\b|(?<=_gen_alias)_\d+|(?<=\blambda )(?=\w)")
_NUMBERED = re.compile(r"\b(lambda [a-z]\w*?)_\d+")  # variables of lambda functions
_STABLE_FIELDS = re.compile(
    r"scala\.Enumeration\$Val|scala\.collection\.immutable\.Map.*|java\.math\..*|org\.apache\.spark\.sql\.types\..*|"
    r"org\.apache\.spark\.sql\.catalyst\.expressions\.NumericEvalContext|org\.apache\.spark\..*\$"
)
"""Classes of expression fields whose text has no numbers that depend on the session."""


def readable(expression: Expression) -> str:
    """Return an expression as SQL, for people."""
    try:
        sql = expression.sql()
    except Py4JError:
        sql = str(expression)
    return _NUMBERED.sub(r"\1", _GENERATED.sub("", sql))


class Canonical:
    """Describes the computation of expressions as text. Source columns are labelled by name, others by number.

    The code of user functions is not part of the text; Python functions are listed in `functions`.

    Args:
        catalyst: of the session.
        source: the columns from which all expressions are computed.

    Attributes:
        functions: the user's Python functions: each name with a digest of its code, empty if it is unreadable.
        zones: the time zones used by expressions.
        setting_free: whether the expressions are independent of the session's settings.
    """

    def __init__(self, catalyst: Catalyst, source: Sequence[Expression]) -> None:
        self._catalyst = catalyst
        names = [column.name for column in source]
        self._labels: dict[tuple[str, int], str] = {
            ("column", column.expr_id): f"{column.name}/{names[:number].count(column.name)}"
            for number, column in enumerate(source)
        }
        self.functions: set[tuple[str, str]] = set()
        self.zones: set[str] = set()
        self.setting_free = True

    def passes(self, result: Expression) -> bool:
        """Whether a projection's result is a column itself, perhaps under another name."""
        if result.kind == "Alias" and result.children[0].kind == "AttributeReference":
            self._labels["column", result.expr_id] = self._label("column", result.children[0].expr_id)
            return True
        return result.kind == "AttributeReference"

    def column(self, column: Expression) -> str:
        """Describe a column."""
        return f"{self._label('column', column.expr_id)}:{column.type}"

    def expression(self, expression: Expression, cut: Cut) -> str:
        """Describe an expression with all its descendants."""
        replacement = cut(expression)
        if replacement is not None:
            return replacement
        if expression.kind == "AttributeReference":
            return self.column(expression)
        self.setting_free = self.setting_free and _is_setting_free(expression)
        code = function_code(self._catalyst, expression)
        if code is not None:
            self.functions.add(code)
            zone = time_zone_seen(self._catalyst, expression)
            if zone is not None:
                self.zones.add(zone)
        parts = [self.expression(child, cut) for child in expression.children]
        plan = subquery(expression)
        if plan is not None:
            parts.append(self.plan(plan))
        own = f"{expression.kind}<{', '.join(self._fields(expression))}>"
        if expression.kind in ("Alias", "NamedLambdaVariable"):
            own += f" {self._label('column', expression.expr_id)}"
        return f"{own}:{expression.type}({', '.join(parts)})"

    def plan(self, node: Node) -> str:
        """Describe a plan over constant rows."""
        if not node.children:
            columns = ", ".join(self.column(column) for column in node.output)
            return f"{node.kind}<{constant_rows(node)}>({columns})"
        below = [self.plan(child) for child in node.children]
        described = [self.expression(expression, lambda _: None) for expression in node.expressions]
        return f"{node.kind}[{', '.join(described)}]({', '.join(below)})"

    def _label(self, kind: str, identity: int) -> str:
        return self._labels.setdefault((kind, identity), str(len(self._labels)))

    def _fields(self, expression: Expression) -> Iterator[str]:
        if expression.kind == "Literal":
            yield str(expression)
            return
        if expression.kind == "VariableReference":
            yield str(expression.constant)
        zoned = expression.kind != "Cast" or expression.java.needsTimeZone()
        for field in items(expression.java.productIterator().toSeq()):
            if isinstance(field, str | bool | int | float):
                # PySpark numbers the variables of lambda functions in the order in which an application makes them.
                if expression.kind != "NamedLambdaVariable" or not isinstance(field, str):
                    yield repr(field)
                continue
            name = field.getClass().getName() if field is not None else ""
            if name == "scala.Some":
                value = field.get()
                if isinstance(value, str) and value == expression.get("timeZoneId"):
                    if zoned:
                        self.zones.add(value)
                elif isinstance(value, str | bool | int | float):
                    yield repr(value)
            elif name.endswith("CommonExpressionId"):
                yield self._label("common", int(field.id()))
            elif _STABLE_FIELDS.fullmatch(name):
                yield str(field.toString())
            elif name == "java.lang.Class":
                yield str(field.getName())


_SETTING_FREE = frozenset(
    {
        *("Alias", "Literal", "And", "Or", "Not", "IsNull", "IsNotNull", "EqualTo", "EqualNullSafe", "LessThan"),
        *("LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Between", "With", "CommonExpressionDef"),
        *("CommonExpressionRef", "SortOrder"),
    }
)


def _is_setting_free(expression: Expression) -> bool:
    if expression.kind == "Cast" and expression.type in INTEGERS:
        source = expression.children[0].type
        return source in INTEGERS and INTEGERS.index(source) <= INTEGERS.index(expression.type)
    return expression.kind in _SETTING_FREE


def subquery(expression: Expression) -> Node | None:
    """Return the plan of a subquery expression; None for other expressions."""
    if expression.kind not in _SUBQUERIES:
        return None
    return Node(expression.java.plan())


_SUBQUERIES = frozenset({"ScalarSubquery", "ListQuery", "Exists", "LateralSubquery"})


def constant_rows(leaf: Node) -> str | None:
    """Return the rows that a leaf relation holds in the plan, as text; None if the plan only refers to them."""
    if leaf.kind == "LocalRelation" and not leaf.streaming:
        return str(leaf.java.data().mkString(";"))
    if leaf.kind == "Range":
        java = leaf.java
        return f"{java.start()}, {java.end()}, {java.step()}"
    return "" if leaf.kind == "OneRowRelation" else None


_SEMANTIC_PREFIXES = (
    "spark.sql.legacy.",
    "spark.sql.ansi.",
    "spark.sql.json",
    "spark.sql.xml",
    "spark.sql.variant",
    "spark.sql.collation",
    "spark.sql.function",
    "spark.sql.decimalOperations.",
    "spark.sql.caseSensitive",
    "spark.sql.mapKeyDedupPolicy",
    "spark.sql.columnNameOfCorruptRecord",
    "spark.sql.binaryOutputStyle",
    "spark.sql.charAsVarchar",
    "spark.sql.chunkBase64String.",
    "spark.sql.icu.",
    "spark.sql.execution.pythonUDF.",
    "spark.sql.execution.pandas.",
    "spark.sql.preserveCharVarcharTypeInfo",
    "spark.sql.datetime",
    "spark.sql.timestampType",
)
"""Prefixes of settings that change the meaning of expressions, besides the time zone."""

_ALWAYS_RECORDED = ("spark.sql.ansi.enabled", "spark.sql.caseSensitive", "spark.sql.legacy.timeParserPolicy")
"""Settings among them that are recorded even with their default values."""


def semantic_settings(catalyst: Catalyst) -> dict[str, str]:
    """Return the session's settings that change the meaning of expressions and differ from their defaults."""
    settings = settings_of(catalyst.spark)
    defaults = _defaults(catalyst)
    chosen = {name: str(catalyst.spark.conf.get(name)).lower() for name in _ALWAYS_RECORDED}
    for name, value in settings.items():
        if name.startswith(_SEMANTIC_PREFIXES) and str(value).lower() != defaults(name):
            chosen[name] = str(value).lower()
    return dict(sorted(chosen.items()))


def _defaults(catalyst: Catalyst) -> Callable[[str], str | None]:
    fresh = catalyst.new("org.apache.spark.sql.internal.SQLConf")

    @cache
    def default(name: str) -> str | None:
        try:
            return str(fresh.getConfString(name)).lower()
        except Py4JError:
            return None

    return default


def constant_string(expression: Expression) -> str | None:
    """Return the value of a constant string expression; None for others, and if it has no value."""
    if not expression.type.startswith("string") or not expression.foldable:
        return None
    value: Any = expression.constant_or_none
    return None if value is None else str(value.toString() if hasattr(value, "toString") else value)


def walk(expressions: Sequence[Expression], cut: Cut) -> Iterator[Expression]:
    """Yield expressions and their descendants, top down; below a runtime-replaceable one, what Spark evaluates instead.

    Args:
        expressions: resolved expressions.
        cut: returns a text for expressions to skip, with all below.
    """
    pending = [*reversed(expressions)]
    while pending:
        expression = pending.pop()
        if cut(expression) is not None:
            continue
        yield expression
        # The replacement contains the operands: with both, each level would double the number of visits.
        replacement = expression.expression("replacement")
        pending += reversed(expression.children) if replacement is None else [replacement]
