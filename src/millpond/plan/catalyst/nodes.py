"""Wrappers of Spark's plans and expressions for reading: `Node` and `Expression` wrap Catalyst's trees.

`Catalyst` (jvm.py) makes new trees. The rest of this package uses these wrappers, so that another plan reader (Spark
Connect's protobuf plans) could replace them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from py4j.java_gateway import JavaClass, get_field
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.types import DataType, StructType

from millpond.tasks.ddl import PLAIN_NAME, ddl

_DAY_MICROS = 86_400_000_000
_NO_NUMBERS: Mapping[int, int] = MappingProxyType({})

WATERMARK_DELAY = "spark.watermarkDelayMs"
INTEGERS = ("tinyint", "smallint", "int", "bigint")
"""Names of integral types, in ascending width."""
TIME_WINDOW = "spark.timeWindow"
SESSION_WINDOW = "spark.sessionWindow"
BATCH_TIMES = frozenset({"CurrentTimestamp", "CurrentDate", "LocalTimestamp"})
"""Expressions for which Spark takes the time of the micro-batch, which is logged with its offsets."""
CLOCKS = BATCH_TIMES | {"Now", "CurrentTime"}
"""Expressions that read the clock. Spark evaluates them in each batch, but can do so when a query starts."""


def items(sequence: Any) -> list[Any]:
    """Return a Scala sequence as a Python list."""
    return [sequence.apply(index) for index in range(sequence.size())]


def scala_seq(client: Any, values: Sequence[Any]) -> Any:
    """Return an indexed Scala sequence of objects; `client` is py4j's connection to their JVM."""
    array = JavaClass("java.util.ArrayList", client)()
    for value in values:
        array.add(value)
    return JavaClass("scala.jdk.javaapi.CollectionConverters", client).asScala(array).toIndexedSeq()


def _field_names(type_: Any) -> Iterator[str]:
    """Yield the names of all fields in a data type, given as Spark's JSON."""
    if isinstance(type_, str):
        return
    for field in type_["fields"] if type_["type"] == "struct" else ():
        yield field["name"]
        yield from _field_names(field["type"])
    for part in ("elementType", "keyType", "valueType", "sqlType"):
        if part in type_:
            yield from _field_names(type_[part])


class Interval(NamedTuple):
    """A time interval in parts; only microseconds have a fixed length."""

    months: int
    days: int
    microseconds: int


class _Tree:
    """Base of plan nodes and expressions."""

    def __init__(self, java: Any) -> None:
        self.java = java

    @cached_property
    def kind(self) -> str:
        """The simple name of the node's class, e.g. `Aggregate`."""
        return str(self.java.getClass().getSimpleName()).removesuffix("$")

    def __str__(self) -> str:
        return str(self.java.toString())


class Expression(_Tree):
    """A resolved Catalyst expression."""

    @cached_property
    def children(self) -> list[Expression]:
        """The operands."""
        return [Expression(child) for child in items(self.java.children())]

    @cached_property
    def type(self) -> str:
        """The data type as DDL, e.g. `decimal(10,2)`, with field names quoted where necessary."""
        type_ = str(self.java.dataType().catalogString())
        names = _field_names(json.loads(self.java.dataType().json())) if "struct<" in type_ else ()
        return type_ if all(map(PLAIN_NAME.fullmatch, names)) else ddl(self.data_type)

    @cached_property
    def data_type(self) -> DataType:
        """The data type as PySpark's object, with the nullability of nested fields."""
        return StructType.fromJson(
            {
                "type": "struct",
                "fields": [
                    {"name": "c", "type": json.loads(self.java.dataType().json()), "nullable": True, "metadata": {}},
                ],
            }
        )[0].dataType

    @property
    def nullable(self) -> bool:
        """Whether the value can be null."""
        return bool(self.java.nullable())

    @property
    def deterministic(self) -> bool:
        """Whether the same input always gives the same value."""
        return bool(self.java.deterministic())

    @property
    def foldable(self) -> bool:
        """Whether the value is a constant."""
        return bool(self.java.foldable())

    @property
    def name(self) -> str:
        """The name of an alias or column; otherwise the SQL text (see `sql`)."""
        return str(self.java.name()) if self.kind in ("Alias", "AttributeReference") else self.sql()

    def label(self, numbers: Mapping[int, int]) -> str:
        """Return the `name`; that of a column is quoted where necessary, and numbered if several have it."""
        return str(self.java.name()) if self.kind == "Alias" else self.sql(numbers)

    def sql(self, numbers: Mapping[int, int] = _NO_NUMBERS) -> str:
        """Return the expression as SQL; its columns are without the names of tables, views and aliases.

        These names may change from start to start: some jobs generate them. Names of structs stay before their fields.

        Args:
            numbers: identity of a column → the number to append to its name, as in `price#2`; see
                `Node.column_numbers`.
        """
        return str(self._renamed(numbers, {}).java.sql())

    def _renamed(self, numbers: Mapping[int, int], variables: Mapping[int, int]) -> Expression:
        """Return the expression over columns without qualifiers, and with numbers; itself if nothing changes.

        `variables` has the number of each variable that is bound here (`x -> x + 1`), by its identity.
        """
        if self.kind == "Literal" and self.type == "timestamp" and self.java.value() is not None:
            # Spark's SQL depends on the session's time zone.
            return self._shown_as(f"TIMESTAMP '{np.datetime64(self.java.value(), 'us')}Z'")
        if self.kind == "NamedLambdaVariable":  # Spark's SQL has no name
            return self._shown_as(f"x{variables.get(self.expr_id, 0)}")
        if self.kind == "LambdaFunction":
            own = (variable.expr_id for variable in self.children[1:])
            variables = {**variables, **{variable: place for place, variable in enumerate(own, len(variables) + 1)}}
        if self.kind == "AttributeReference":
            number = numbers.get(self.expr_id) if numbers else None
            if number is None and self.java.qualifier().isEmpty():
                return self
            column = Expression(self.java.withQualifier(scala_seq(self._client, [])))
            return column if number is None else self._shown_as(f"{column.java.sql()}#{number}")
        # Spark replaces `nullif`, `between` and others by expressions, which are their children. Their SQL is made from
        # their parameters, which are no children: a copy with other children would keep the qualifiers.
        parameters = self.get("parameters") if len(self.children) == 1 else None
        operands = self.children if parameters is None else [Expression(operand) for operand in items(parameters)]
        renamed = [operand._renamed(numbers, variables) for operand in operands]
        if all(new is old for new, old in zip(renamed, operands, strict=True)):
            return self
        if parameters is None:
            return Expression(self.java.withNewChildren(scala_seq(self._client, [operand.java for operand in renamed])))
        return self._shown_as(
            str(self.java.makeSQLString(scala_seq(self._client, [str(operand.java.sql()) for operand in renamed])))
        )

    def _shown_as(self, sql: str) -> Expression:
        """Return a placeholder of the same type with this SQL; Spark makes such placeholders to name columns."""
        name = "org.apache.spark.sql.catalyst.expressions.PrettyAttribute"
        return Expression(JavaClass(name, self._client)(sql, self.java.dataType()))

    @property
    def _client(self) -> Any:
        return self.java._gateway_client

    @cached_property
    def expr_id(self) -> int:
        """The identity of a named expression within the session."""
        return int(self.java.exprId().id())

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The metadata that Spark gives to the field of a named expression; empty for kinds that have none."""
        named = self.kind in ("AttributeReference", "Alias", "GetStructField")
        return dict(json.loads(self.java.metadata().json())) if named else {}

    @cached_property
    def canonical(self) -> Any:
        """A JVM object that equals that of every expression with the same meaning over the same attributes."""
        return self.java.canonicalized()

    @cached_property
    def semantic_hash(self) -> int:
        """A hash of `canonical`; it separates most expressions without asking the JVM about each pair."""
        return int(self.canonical.hashCode())

    def semantic_equals(self, other: Expression) -> bool:
        """Whether both compute the same value from the same attributes."""
        # The hashes are compared first: each is fetched once, while `equals` asks the JVM about each pair.
        return self.semantic_hash == other.semantic_hash and bool(self.canonical.equals(other.canonical))

    @property
    def constant(self) -> Any:
        """The JVM value of a constant expression."""
        return self.java.eval(None)

    @property
    def constant_bytes(self) -> bytes:
        """The bytes of a constant text or binary value; empty for a null."""
        value = self.constant
        if value is None:
            return b""
        return bytes(value) if isinstance(value, bytes | bytearray) else bytes(value.getBytes())

    @property
    def constant_or_none(self) -> Any:
        """The JVM value of a constant expression; None if it has no value before the query runs."""
        try:
            return None if self._reads_clock else self.constant
        except (Py4JJavaError, PySparkException):  # an expression that fails
            return None

    @property
    def evaluates(self) -> bool:
        """Whether a constant expression has a value before the query runs."""
        try:
            self.java.eval(None)
        except (Py4JJavaError, PySparkException):
            return False
        return not self._reads_clock

    @property
    def _reads_clock(self) -> bool:
        return any(part.kind in CLOCKS for part in self.walk())

    @property
    def interval(self) -> Interval | None:
        """The length of a constant time interval; None for other expressions."""
        if not self.type.startswith("interval") or "year" in self.type or "month" in self.type:
            return None
        value = None if self._reads_clock else self.constant
        if value is None:
            return None
        if isinstance(value, int):
            days, rest = divmod(abs(value), _DAY_MICROS)
            sign = 1 if value >= 0 else -1
            return Interval(0, sign * days, sign * rest)
        return Interval(*(get_field(value, part) for part in Interval._fields))

    @property
    def conjuncts(self) -> list[Expression]:
        """The conditions that a condition connects by `AND`; the expression itself if there is no `AND`."""
        return [part for child in self.children for part in child.conjuncts] if self.kind == "And" else [self]

    def walk(self) -> Iterator[Expression]:
        """Yield this expression and all descendants, top down."""
        yield self
        for child in self.children:
            yield from child.walk()

    def get(self, method: str) -> Any:
        """Return a field of the JVM object as a Python value, with options unwrapped; None if empty or missing."""
        try:
            value = getattr(self.java, method)()
        except Py4JError:  # versions of Spark differ in their fields
            return None
        name = getattr(getattr(value, "getClass", lambda: None)(), "getName", lambda: "")()
        if name == "scala.None$":
            return None
        if name == "scala.Some":
            value = value.get()
        return value

    def expression(self, method: str) -> Expression | None:
        """Return a field of the JVM object that is an expression."""
        value = self.get(method)
        return None if value is None else Expression(value)


class Node(_Tree):
    """A node of an analysed logical plan."""

    @cached_property
    def children(self) -> list[Node]:
        """The nodes below."""
        return [Node(child) for child in items(self.java.children())]

    @cached_property
    def output(self) -> list[Expression]:
        """The columns that the node produces."""
        return [Expression(attribute) for attribute in items(self.java.output())]

    @cached_property
    def column_numbers(self) -> Mapping[int, int]:
        """The number of each column that has the name of an earlier one in a join below, by its identity; from 2.

        Only this number distinguishes such columns in SQL (`Expression.sql`). Their order, by the sides of the joins,
        stays when views and aliases are renamed. It does not depend on which of them are read: Spark keeps the columns
        of a condition in its join, whatever it prunes above.
        """
        numbers: dict[int, int] = {}
        for join in reversed([node for node in self.walk() if node.kind == "Join"]):  # a join of joins counts last
            numbers |= join._numbers_of_output()
        return {column: number for column, number in numbers.items() if number > 1}

    def _numbers_of_output(self) -> dict[int, int]:
        """Return the number of each column among those of its name, by its identity, where there are several."""
        # One call for all names: a table may have hundreds of columns.
        names = [field["name"] for field in json.loads(self.java.schema().json())["fields"]]
        counts, used = Counter(names), Counter[str]()
        numbers: dict[int, int] = {}
        for position, name in enumerate(names):
            if counts[name] > 1:
                column = Expression(self.java.output().apply(position)).expr_id
                if column not in numbers:  # a column may stand in the output twice
                    used[name] += 1
                    numbers[column] = used[name]
        return numbers

    @property
    def streaming(self) -> bool:
        """Whether a stream is below."""
        return bool(self.java.isStreaming())

    @property
    def joins_streams(self) -> bool:
        """Whether this is a join of two streams."""
        return self.kind == "Join" and all(child.streaming for child in self.children)

    @property
    def expressions(self) -> list[Expression]:
        """The node's own expressions."""
        return [Expression(expression) for expression in items(self.java.expressions())]

    def expression(self, method: str) -> Expression:
        """Return a field of the JVM object that is an expression."""
        return Expression(getattr(self.java, method)())

    def list(self, method: str) -> list[Expression]:
        """Return a field of the JVM object that is a sequence of expressions."""
        return [Expression(expression) for expression in items(getattr(self.java, method)())]

    def computed(self, method: str = "projectList") -> dict[int, Expression]:
        """Return what the node computes, without columns that it passes on, by the identity of the result."""
        return {result.expr_id: result.children[0] for result in self.list(method) if result.kind == "Alias"}

    def position(self, expr_id: int) -> int | None:
        """Return the position of a column in the output; None if it is not there."""
        return next((place for place, column in enumerate(self.output) if column.expr_id == expr_id), None)

    def rows(self, method: str) -> Sequence[Sequence[Expression]]:
        """Return a field of the JVM object that is a sequence of sequences of expressions."""
        return [[Expression(expression) for expression in items(row)] for row in items(getattr(self.java, method)())]

    @property
    def source(self) -> str:
        """The format of a streaming source (`parquet`, `kafka`, …); empty for other nodes."""
        if self.kind == "StreamingRelation":
            return str(self.java.dataSource().className())
        return str(self.java.sourceName()) if self.kind.startswith("StreamingRelation") else ""

    @property
    def source_options(self) -> dict[str, str]:
        """The options of a version 1 source, with names in lower case; empty for other nodes."""
        if self.kind != "StreamingRelation":
            return {}
        pairs = items(self.java.dataSource().options().toSeq())
        return {str(pair._1()).lower(): str(pair._2()) for pair in pairs}

    @property
    def relation_options(self) -> dict[str, str]:
        """The options of a source of either version, with names as given."""
        if self.kind == "StreamingRelationV2":
            entries = self.java.extraOptions().asCaseSensitiveMap()
            return {str(name): str(entries[name]) for name in entries}
        return self.source_options

    @property
    def join_type(self) -> str:
        """The type of a join: `Inner`, `LeftOuter`, …"""
        return str(self.java.joinType().toString())

    def walk(self) -> Iterator[Node]:
        """Yield this node and all descendants, top down (subqueries excluded)."""
        yield self
        for child in self.children:
            yield from child.walk()
