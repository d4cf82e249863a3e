"""Run files in a state location on a local disk: raw, and mapped in place."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.formats.codec import damaged_error
from millpond.files.formats.run import RunWriter, Target
from millpond.files.refs import RunRef
from millpond.files.tiers.mapped import CompressedError, MappedSource
from millpond.layout import RowLayout, Rows

_BUFFER = 1 << 20


class InPlace:
    """Writer and reader of the run files of a location on a local disk."""

    def __init__(self, files: LocalFiles) -> None:
        self._files = files

    def write(self, name: str, pieces: Iterable[Rows], layout: RowLayout) -> tuple[RunRef, MappedSource]:
        """Write a run durably and map it.

        Args:
            name: name of the file.
            pieces: rows in hash order, in chunks.
            layout: layout of the rows.

        Returns:
            The reference to the file, and its blocks.
        """
        with self._files.staged(name) as staged:
            with open(staged, "wb", buffering=_BUFFER) as raw:
                target = Target(raw.write, compress=False)
                writer = RunWriter(layout, [target])
                for piece in pieces:
                    writer.add(piece)
                writer.finish()
            source = MappedSource(staged, layout, checked=True)
            self._files.publish(staged, name)
        source.path = self._files.path_of(name)
        return writer.ref(name, target), source

    def open(self, ref: RunRef, layout: RowLayout) -> MappedSource | None:
        """Map a run; return None if its blocks are compressed, as in a location copied from an object store.

        Raises:
            StateDamagedError: the file is missing, cut short or altered.
        """
        place = self._files.path_of(ref.name)
        if self._files.size(ref.name) != ref.bytes:
            raise damaged_error(place, "it does not have the length that it was written with")
        try:
            source = MappedSource(place, layout)
        except CompressedError:
            return None
        if (source.index.rows, source.index.highest) != (ref.rows, ref.last):
            raise damaged_error(place, "it is not the file that the checkpoint names")
        return source


def in_place(files: FileSystem) -> InPlace | None:
    """Return the `InPlace` of a location whose run files can be mapped in place, else None."""
    return InPlace(files) if isinstance(files, LocalFiles) else None
