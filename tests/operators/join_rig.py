"""Joins over real tables, batch after batch, with restarts from what they sealed; and Spark's semantics row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from millpond.files.formats.segment import decode_rows
from millpond.files.refs import TableManifest
from millpond.layout import TableSchema, Words
from millpond.operators.joins.operator import JoinOperator
from millpond.operators.protocol import TableKind, Times
from millpond.spec.kinds.join import JoinSide, JoinSpec
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.ordered.table import OrderedTable
from millpond.stores.table_resources import TableResources
from tests.operators.rig import as_rows, hash_of
from tests.stores.shelf import Shelf

Row = dict[str, Any]


class Immediate(Executor):
    """Does what is submitted at once, in the same thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class JoinRig:
    """Runs a join as a slot would; state goes through deltas and, with a shelf, through files."""

    def __init__(self, spec: JoinSpec, folder: Path | None = None, budget: int = 64 << 20) -> None:
        self.spec = spec
        self.version = 0
        self.shelf = None if folder is None else Shelf(folder)
        self._budget = budget
        self._deltas: list[dict[str, bytes]] = []
        self._manifests: dict[str, TableManifest] = {}
        self._open()

    def _open(self) -> None:
        budget = MemoryBudget(self._budget)

        def make(
            name: str, schema: TableSchema, initial: Words, *, kind: TableKind, drop_matched: bool
        ) -> OrderedTable:
            manifest = self._manifests.get(name, TableManifest())
            if self.shelf is None:
                table = OrderedTable(schema, TableResources(budget, Immediate()), drop_matched=drop_matched)
                table.expired = table.until = manifest.expired
            else:
                table = open_table(self.shelf, schema, manifest, budget, drop_matched=drop_matched)
            for delta in self._deltas[manifest.flushed :]:
                for rows in decode_rows(delta[name], table.layout, name):
                    table.load(rows)
            return table

        self.operator = JoinOperator(self.spec, make)

    def restart(self) -> None:
        """Forget everything that is in memory and open the last version."""
        self.close()
        self._open()

    def batch(
        self, pieces: Sequence[pa.RecordBatch], late: int = 0, closed: int = 0, hints: Sequence[pa.RecordBatch] = ()
    ) -> list[tuple[Any, ...]]:
        """Run one batch, of which hints come before it and while it is under way; its output."""
        operator = self.operator
        for hint in hints:
            operator.prefetch_keys(hint, self.version)
        operator.begin(self.version, Times(late, closed, 0))
        for piece in pieces:
            for hint in hints:
                operator.prefetch_keys(hint, self.version)
            operator.process(piece)
        sealed = operator.finish()
        self._deltas.append({name: b"".join(bytes(p) for p in delta.pieces) for name, delta in sealed.items()})
        self._manifests = {name: table.manifest() for name, table in operator.tables.items()}
        self.version += 1
        out = [row for batch in operator.output() for row in as_rows(pa.Table.from_batches([batch]))]
        again = [row for batch in operator.output() for row in as_rows(pa.Table.from_batches([batch]))]
        assert str(out) == str(again)
        return out

    def close(self) -> None:
        for table in self.operator.tables.values():
            table.close()


def open_table(
    shelf: Shelf, schema: TableSchema, manifest: TableManifest, budget: MemoryBudget, *, drop_matched: bool
) -> OrderedTable:
    """A table on the files of a shelf."""

    class Store:
        def open_all(self, refs: Any, layout: Any, range_: Any) -> list[Any]:
            return [shelf.written[ref.name] for ref in refs]

        write, drop = staticmethod(shelf.write), staticmethod(shelf.drop)

    return OrderedTable.open(
        schema, manifest, Store(), TableResources(budget, Immediate(), readers=Immediate()), drop_matched=drop_matched
    )


def hints_for(spec: JoinSpec, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Prefetch hints for some rows of the slot stage's input."""
    return rows.select([0, *(1 + column for column in spec.hint_columns)])


Condition = Callable[[Row, Row], bool | None]


@dataclass
class Oracle:
    """Spark's stream-stream join (StreamingSymmetricHashJoinExec), row by row.

    Rows are dicts with `k` (key tuple), `t` (time in microseconds or None), `late` (the same), `able`, and the values.
    """

    spec: JoinSpec
    matches: Condition
    state: dict[str, list[list[Any]]] = field(default_factory=lambda: {"left": [], "right": []})

    def batch(
        self, left: Sequence[Row], right: Sequence[Row], late: int, closed: int
    ) -> list[tuple[Row | None, Row | None]]:
        kind, out = self.spec.kind, []
        sides = {"left": (left, self.spec.left), "right": (right, self.spec.right)}
        for name in ("right", "left") if self.spec.right_first else ("left", "right"):
            rows, side = sides[name]
            other = self.state["right" if name == "left" else "left"]
            for row in rows:
                if side.late != "none" and row["late"] is not None and row["late"] <= late * 1000:
                    continue
                if not row["able"]:
                    if side.keeps:
                        out.append((row, None) if name == "left" else (None, row))
                    continue
                partners = []
                for entry in other:
                    if kind == "left_semi" and name == "right" and entry[1]:
                        continue
                    pair = (row, entry[0]) if name == "left" else (entry[0], row)
                    if self._equal(*pair) and self.matches(*pair):
                        entry[1] = True
                        partners.append(pair)
                if kind == "left_semi":
                    if name == "left":
                        out += [(row, None)] if partners else []
                    else:
                        out += [(pair[0], None) for pair in partners]
                else:
                    out += partners
                going = (
                    self.spec.right_first
                    and name == "right"
                    and side.expiry_ms is not None
                    and row["t"] is not None
                    and row["t"] <= (closed + side.expiry_ms) * 1000
                )
                if not going and not (kind == "left_semi" and name == "left" and partners):
                    self.state[name].append([row, bool(partners)])
        for name in ("left", "right"):
            _, side = sides[name]
            if side.expiry_ms is None:
                continue
            until = (closed + side.expiry_ms) * 1000
            gone = [entry for entry in self.state[name] if entry[0]["t"] is not None and entry[0]["t"] <= until]
            self.state[name] = [entry for entry in self.state[name] if entry not in gone]
            if side.keeps:
                out += [(e[0], None) if name == "left" else (None, e[0]) for e in gone if not e[1]]
        return out

    def _equal(self, left: Row, right: Row) -> bool:
        pairs = zip(left["k"], right["k"], self.spec.null_safe, strict=True)
        return all((a is None and b is None and safe) or (a is not None and a == b) for a, b, safe in pairs)


def side(
    values: str, *, keeps: bool = False, late: str = "time", expiry_ms: int | None = 0, filtered: bool = False, of: str
) -> JoinSide:
    """A side whose output is its key, its time and its values."""
    stored = tuple(Field(*part.strip().split(" ", 1)) for part in values.split(";") if part.strip())
    columns = (Field(f"{of}_k0", "string"), Field(f"{of}_k1", "int"), Field(f"{of}_t", "timestamp"), *stored)
    places = (-1, -2, -(1 << 16), *range(len(stored)))
    return JoinSide(columns, places, stored, keeps, late, expiry_ms, None, filtered)


def record_batch(spec: JoinSpec, left: Sequence[Row], right: Sequence[Row], bits: int = 64) -> pa.RecordBatch:
    """The pipe's input for rows of both sides, in turns."""
    rows = [("left", row) for row in left] + [("right", row) for row in right]
    rows = rows[::2] + rows[1::2]
    columns: dict[str, list[Any]] = {f.name: [] for f in spec.input_fields}
    hashes = []
    for name, row in rows:
        hashes.append(hash_of(row["k"], bits))
        given = {"__right": name == "right", "__time": row["t"], "__late": row["late"], "__able": row["able"]}
        given |= {f.name: part for f, part in zip(spec.keys, row["k"], strict=True)}
        mine = spec.left if name == "left" else spec.right
        given |= {f.name: row[f.name] for f in mine.values}
        for field_name, values in columns.items():
            values.append(given.get(field_name))
    arrays = [pa.array(hashes, pa.int64())]
    arrays += [pa.array(columns[f.name], parse_type(f.type).arrow) for f in spec.input_fields]
    return pa.RecordBatch.from_arrays(arrays, names=["__hash", *(f.name for f in spec.input_fields)])
