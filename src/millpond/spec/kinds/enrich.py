"""A lookup join of each row with a table outside of Spark (`millpond.enrich`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import msgspec

from millpond.metrics import LOOKUPS
from millpond.spec.operators import Field
from millpond.spec.protocol import AccessPattern, Spec
from millpond.spec.traits import Trait, columns_trait

ERROR = Field("_error", "struct<kind:string,message:string>")
"""The column that says why a row could not be enriched."""

LATER = "enrich (a row that is taken back may find something else by then)"


class EnrichSpec(Spec, frozen=True, tag="enrich"):
    """Rows with what a table has of their key.

    Attributes:
        columns: of the input. keys: positions of those that make up the key.
        named: what these are called in the table.
        found: the columns that are looked up.
        how: whether rows come out whose key the table does not have.
        on_error: what becomes of rows that could not be enriched: the batch fails, they come out with nulls, or so and
            with the column `ERROR`.
        most: how many keys are kept at most. ttl_ms: for how long, in milliseconds; for ever if it is negative.
        timeout_ms: how long one request may take. retries: how often it is made again.
        concurrency: how many of them are on their way at a time. request: how many keys one asks for at most.
        table: the table's description, pickled. name: what the table is called.
        updating: whether rows of the input may change later, and so those that come out.
    """

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
        """Without the table, of whose password it could tell."""
        return f"EnrichSpec({self.key_fields}, {self.found}, {self.name!r})"

    @property
    def traits(self) -> Mapping[str, Trait]:
        """What it looks up by."""
        return {"keys": columns_trait("looks up by", self.key_fields)}

    @property
    def lasting(self) -> Self:
        """Its key: what it looks up, where and how is read anew at each start, and there may be passwords in it."""
        return type(self)(self.key_fields, tuple(range(len(self.keys))))

    @property
    def key_fields(self) -> tuple[Field, ...]:
        """The columns that make up the key."""
        return tuple(self.columns[k] for k in self.keys)

    @property
    def input_fields(self) -> tuple[Field, ...]:
        """The columns of the input, after `__hash`."""
        return self.columns

    @property
    def output_fields(self) -> tuple[Field, ...]:
        """The input's columns, then those that are looked up."""
        return (*self.columns, *self.found, *((ERROR,) if self.on_error == "side" else ()))

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The key; nothing is kept of it."""
        return self.key_fields

    @property
    def announced(self) -> tuple[int, ...]:
        """The key: a table outside does not know it by its hash."""
        return self.keys

    @property
    def keeps_columns(self) -> bool:
        """Rows of the input come out; their types are those of the node's own columns."""
        return False

    @property
    def lag(self) -> int | None:
        """It asks for no times."""
        return None

    def with_lag(self, lag_ms: int) -> Self:
        """The same: watermarks pass it."""
        return self

    @property
    def updates(self) -> bool:
        """If those of the input may: each row comes out by itself."""
        return self.updating

    @property
    def shows_all(self) -> bool:
        """Yes: it keeps nothing, and shows all that comes."""
        return True

    @property
    def beyond_spark(self) -> bool:
        """No: without Millpond, Spark runs it as a function over rows."""
        return False

    @property
    def takes_updates(self) -> bool:
        """Yes, as the rows that they are."""
        return True

    @property
    def stateful(self) -> bool:
        """No: what it keeps can be had again."""
        return False

    def passing(self) -> Self:
        """The same over rows that change."""
        return msgspec.structs.replace(self, updating=True)

    def consuming(self) -> Self | str:
        """What it found for a row may not be there any more when the row is taken back."""
        return LATER

    def emitting(self) -> Self | str:
        """The same where nothing changes; else what was found for a row may not be there any more when it goes."""
        return LATER if self.updating else self

    @property
    def access_pattern(self) -> AccessPattern:
        """A cache in front of the table."""
        living = "" if self.ttl_ms < 0 else f", for {self.ttl_ms} ms"
        return AccessPattern("cache", f"each key is looked up in {self.name}, and kept in memory{living}")

    @property
    def functions(self) -> tuple[str, ...]:
        """The columns that are looked up."""
        return tuple(f"{field.name}: {field.type}" for field in self.found)

    @property
    def figures(self) -> tuple[str, ...]:
        """What slots report of it beside what they report of every operator."""
        return LOOKUPS

    @property
    def unsupported_values(self) -> str | None:
        """Nothing: what the table cannot give was refused before."""
        return None
