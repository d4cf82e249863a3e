"""A lookup join of each row with a table outside Spark (`millpond.enrich`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import msgspec

from millpond.metrics import LOOKUP_METRICS
from millpond.spec.operators import Field
from millpond.spec.protocol import AccessPattern, ChangelogError, KindFacts, Spec
from millpond.spec.traits import Trait, columns_trait

ERROR = Field("_error", "struct<kind:string,message:string>")
"""Column with the reason why a row could not be enriched."""

LOOKUP_MAY_CHANGE = "enrich (a row that is taken back may find something else by then)"


class EnrichSpec(Spec, frozen=True, tag="enrich"):
    """A lookup join: each row with the looked-up columns of its key.

    Attributes:
        columns: the input columns.
        keys: positions of the key columns.
        named: the table's names for the key columns.
        found: the looked-up columns.
        how: whether rows whose key is missing from the table are emitted (`left`) or dropped (`inner`).
        on_error: the treatment of rows that could not be enriched. The batch fails (`fail`); or the row has nulls
            (`null`), with `side` also the column `ERROR`.
        most: the maximum number of cached keys.
        ttl_ms: the lifetime of a cached key in milliseconds; negative means for ever.
        timeout_ms: the time-out of one request.
        retries: the number of retries of a request.
        concurrency: the maximum number of concurrent requests.
        request: the maximum number of keys per request.
        table: the pickled table description.
        name: the table's name.
        updating: whether input rows, and so output rows, may change later.
    """

    facts: ClassVar[KindFacts] = KindFacts(
        emits_input_rows=False, supports_complete=True, beyond_spark=False, reads_updates_as_rows=True, stateful=False
    )

    columns: tuple[Field, ...]
    keys: tuple[int, ...]
    named: tuple[str, ...] = ()
    found: tuple[Field, ...] = ()
    how: Literal["left", "inner"] = "left"
    on_error: Literal["fail", "null", "side"] = "fail"
    most: int = 0
    ttl_ms: int = 0
    timeout_ms: int = 0
    retries: int = 0
    concurrency: int = 1
    request: int = 1
    table: bytes = b""
    name: str = ""
    updating: bool = False

    def __repr__(self) -> str:
        """Leave the table out: its description may contain a password."""
        return f"EnrichSpec({self.key_fields}, {self.found}, {self.name!r})"

    @property
    def traits(self) -> Mapping[str, Trait]:
        """The key columns."""
        return {"keys": columns_trait("looks up by", self.key_fields)}

    @property
    def compatibility_spec(self) -> Self:
        """The key. The rest is read again at each start, and may contain passwords that must not be stored."""
        return type(self)(self.key_fields, tuple(range(len(self.keys))))

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The key columns."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The input columns after `__hash`."""
        return self.columns

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The input columns, then the looked-up columns."""
        return (*self.columns, *self.found, *((ERROR,) if self.on_error == "side" else ()))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key; the operator keeps no state."""
        return self.key_fields

    @property
    def hint_columns(self) -> tuple[int, ...]:
        """The key columns: the table outside needs their values, since it does not know hashes."""
        return self.keys

    @property
    def emits_updates(self) -> bool:
        """Whether input rows may change: each row is emitted by itself."""
        return self.updating

    def over_updates(self) -> Self:
        """Return the spec over rows that change."""
        return msgspec.structs.replace(self, updating=True)

    def consume_changelog(self) -> Self:
        """Refuse: a retracted row may look up another value than it did at first."""
        raise ChangelogError(LOOKUP_MAY_CHANGE)

    def produce_changelog(self) -> Self:
        """Return the same spec, or refuse if input rows change: a retracted row may look up another value.

        Raises:
            ChangelogError: input rows may change.
        """
        # The old image of an update would be looked up again, and may find other values than it was emitted with.
        if self.updating:
            raise ChangelogError(LOOKUP_MAY_CHANGE)
        return self

    @property
    def access_pattern(self) -> AccessPattern:
        """A cache in front of the table."""
        living = "" if self.ttl_ms < 0 else f", for {self.ttl_ms} ms"
        return AccessPattern("cache", f"each key is looked up in {self.name}, and kept in memory{living}")

    @property
    def functions(self) -> tuple[str, ...]:
        """The looked-up columns."""
        return tuple(f"{field.name}: {field.type}" for field in self.found)

    @property
    def extra_metrics(self) -> tuple[str, ...]:
        """Additional metrics that slots report for the operator."""
        return LOOKUP_METRICS
