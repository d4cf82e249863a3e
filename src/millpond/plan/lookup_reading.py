"""Read lookup joins, to run them as operators."""

from __future__ import annotations

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.lookups import lookup_spec
from millpond.plan.catalyst.nodes import Node
from millpond.plan.reading.aggregate import check_key
from millpond.plan.reading.reading import InputColumn, Reading
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.operators import Field


class LookupReading(Reading):
    """The reading of a lookup join."""


def read_lookup(catalyst: Catalyst, node: Node) -> tuple[LookupReading, EnrichSpec] | None:
    """Read a lookup join; None if the node is another.

    Raises:
        Unsupported: it stays on Spark.
    """
    spec = lookup_spec(catalyst, node)
    # The function only has a name like that of a lookup join.
    if spec is None:
        return None
    reading = LookupReading()
    for column, attribute in zip(spec.columns, node.children[0].output, strict=True):
        reading.raw.append(attribute)
        reading.inputs.append(InputColumn(Field(column.name, attribute.type), (len(reading.raw) - 1,), "{0}"))
    for position in spec.keys:
        check_key(reading.raw[position])
    reading.set_hash([spec.columns[position].name for position in spec.keys])
    return reading, spec
