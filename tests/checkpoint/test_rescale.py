"""Other partitions at a start: what each takes of the old ones."""

from itertools import pairwise

import pytest

from millpond.checkpoint.formats.manifest import DeltaRef, PartitionManifest, TableState
from millpond.checkpoint.generation import BaseVersion, Generation, Tip, claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.rescale import inherited, rescaled
from millpond.errors import StateDamagedError
from millpond.files.refs import RunRef, TableManifest
from millpond.key_groups import split_key_groups
from millpond.layout import HashRange
from millpond.time_slices import disjoint
from tests.checkpoint.rig import Slot, begin, memory

GROUPS = 64
SHIFT = 58


def of(partitions: int) -> Generation:
    return Generation(7, "test", GROUPS, split_key_groups(partitions, GROUPS), 0.0)


def state(partition: int, partitions: int, table: TableState) -> PartitionManifest:
    return PartitionManifest(
        0, partition, 5, id=f"{partition}/{partitions}", lineage=partition + 1, tables={"main": table}
    )


def take(held: list[TableState], partition: int, partitions: int) -> PartitionManifest:
    """The manifest of one of `partitions` partitions, of a state that `len(held)` partitions hold."""
    manifests = [state(number, len(held), table) for number, table in enumerate(held)]
    tips = tuple(Tip(0, at, manifest.id, manifest.lineage, str(at), 1) for at, manifest in enumerate(manifests))
    base = BaseVersion(5, tips, split_key_groups(len(held), GROUPS))
    return inherited(of(partitions), base, 0, partition, 5, lambda tip: manifests[tip.partition])


def interval(first: int, stop: int) -> tuple[int, int]:
    return first << SHIFT, (stop << SHIFT) - 1


def delta(name: str, version: int, **others: object) -> DeltaRef:
    return DeltaRef(name, 0, 10, version, 1, **{"rows": 4, **others})  # type: ignore[arg-type]


def test_as_many_partitions_take_what_they_had():
    table = TableState(TableManifest((RunRef("a", 1, 1, 0, 1 << 63),), 3, 10), (delta("c", 4),))
    found = take([table, table], 1, 2)
    assert found == state(1, 2, table)


def test_a_part_of_a_partition_reads_its_files_by_a_window():
    inside = RunRef("inside", 9, 9, 1 << SHIFT, 2 << SHIFT)
    across = RunRef("across", 9, 9, 1 << SHIFT, 40 << SHIFT)
    outside = RunRef("outside", 9, 9, 40 << SHIFT, 41 << SHIFT)
    pending = RunRef("pending", 9, 9, 1 << SHIFT, 2 << SHIFT, pending=True)
    table = TableState(TableManifest((inside, across, outside, pending), 3, 100), (delta("c", 4),))
    found = take([table], 0, 4).tables["main"]
    assert [(run.name, run.visible) for run in found.runs.runs] == [("inside", None), ("across", interval(0, 16))]
    assert (found.runs.flushed, found.runs.keys) == (3, 25)
    assert found.deltas == (delta("c", 4, visible=interval(0, 16)),)


def test_parts_of_several_partitions_stand_one_after_another():
    left = TableState(TableManifest((RunRef("a", 9, 9, 0, 31 << SHIFT),), 4, 60), (delta("c5", 5),))
    right = TableState(TableManifest((), 2, 30), tuple(delta(f"d{version}", version) for version in (3, 4, 5)))
    found = take([left, right], 0, 1)
    table = found.tables["main"]
    assert [run.visible for run in table.runs.runs] == [None]
    assert [each.commit for each in table.deltas] == ["c5", "d3", "d4", "d5"]
    assert [each.visible for each in table.deltas] == [interval(0, 32)] + 3 * [interval(32, 64)]
    assert (table.runs.flushed, table.runs.keys) == (2, 90)  # a later flush covers the deltas of both
    assert found.id == take([left, right], 0, 1).id != take([left, right], 1, 3).id
    assert found.lineage


def test_a_file_that_was_shared_is_read_by_both_windows_when_partitions_meet_again():
    first = TableState(
        TableManifest(
            (RunRef("new", 9, 9, 0, 1 << SHIFT), RunRef("old", 9, 9, 0, 50 << SHIFT, visible=interval(0, 32)))
        )
    )
    second = TableState(TableManifest((RunRef("old", 9, 9, 0, 50 << SHIFT, visible=interval(32, 64)),)))
    runs = take([first, second], 0, 1).tables["main"].runs.runs
    assert [(run.name, run.visible) for run in runs] == [
        ("new", None),
        ("old", interval(0, 32)),
        ("old", interval(32, 64)),
    ]


def test_rows_of_deltas_that_are_covered_stay_covered():
    deltas = tuple(delta(f"c{version}", version) for version in (1, 2, 3))
    found = take([TableState(TableManifest(skip=6), deltas)], 1, 2).tables["main"]
    assert [(each.commit, each.skip) for each in found.deltas] == [("c2", 2), ("c3", 0)]
    assert found.runs.skip == 0
    again = TableState(TableManifest(skip=1), found.deltas)
    assert [(each.commit, each.skip) for each in take([again], 1, 2).tables["main"].deltas] == [("c2", 3), ("c3", 0)]


def test_rows_below_the_lowest_hash_do_not_come_back():
    rows = TableManifest((RunRef("r", 9, 9, 0, 0),), lowest=20 << SHIFT)
    left, right = (take([TableState(rows, (delta("c", 1),))], number, 4).tables["main"] for number in (0, 1))
    assert not left.runs.runs
    assert not left.deltas
    assert right.runs.runs[0].visible == right.deltas[0].visible == interval(20, 32)
    assert right.runs.lowest == 0


def test_rows_that_belong_to_their_group_have_windows_of_its_hash():
    table = TableState(TableManifest((RunRef("d", 9, 9, 1 << SHIFT, 2 << SHIFT),), axis="group"))
    runs = take([table], 3, 4).tables["main"].runs
    assert (runs.runs[0].visible, runs.axis) == (interval(48, 64), "group")


def test_rows_of_no_partition_are_of_use_to_all():
    table = TableState(TableManifest((RunRef("s", 9, 9, 1, 2),), axis="none"), (delta("c", 1),))
    found = take([table, table], 0, 1).tables["main"]
    assert [run.visible for run in found.runs.runs] == [None]
    assert len(found.deltas) == 1


def test_partitions_that_disagree_on_what_has_expired_are_refused():
    with pytest.raises(StateDamagedError, match="do not agree on what of table main has expired"):
        take([TableState(TableManifest(expired=1)), TableState(TableManifest(expired=2))], 0, 1)


def test_tables_of_some_partitions_are_taken_from_those():
    manifests = [
        PartitionManifest(0, 0, 5, id="a", tables={"main@1:1": TableState(TableManifest(keys=4))}),
        PartitionManifest(0, 1, 5, id="b", tables={"main@2:2": TableState(TableManifest(keys=6))}),
    ]
    (found,) = rescaled(of(2), 1, 0, 5, manifests.__getitem__)
    assert found.parents == (0, 1)
    assert {name: table.runs.keys for name, table in found.manifest.tables.items()} == {"main@1:1": 4, "main@2:2": 6}


def test_what_nothing_was_written_to_is_empty():
    base = BaseVersion(0, (), split_key_groups(2, GROUPS))
    assert inherited(of(3), base, 0, 1, 0, lambda tip: pytest.fail("there is none")) == PartitionManifest(0, 1, 0)
    assert inherited(of(3), None, 0, 1, 0, lambda tip: pytest.fail("there is none")) == PartitionManifest(0, 1, 0)


def test_hash_ranges_of_partitions_cover_the_axis():
    for partitions in (1, 2, 3, 5, 64):
        ranges = [of(partitions).hash_range(number) for number in range(partitions)]
        assert ranges[0].lo == 0
        assert ranges[-1] == HashRange(ranges[-1].lo)
        assert all(left.hi == right.lo for left, right in pairwise(ranges))


def grown(tmp_path):
    """A state of two partitions at version 2."""
    files = memory()
    generation, _ = begin(files, partitions=2)
    slot = Slot(files, generation.number, tmp_path)
    for partition in (0, 1):
        manifest = slot.open(partition, 0)
        for version in (1, 2):
            manifest = slot.seal(manifest, b"%d:%d" % (partition, version)).manifest
        slot.settle()
    return files


def test_a_run_with_other_partitions_goes_on(tmp_path):
    files = grown(tmp_path)
    generation, _ = begin(files, partitions=1)
    slot = Slot(files, generation.number, tmp_path)
    manifest = slot.open(0, 2)
    assert slot.read(manifest) == [b"0:1", b"0:2", b"1:1", b"1:2"]
    slot.seal(manifest, b"0:3")
    slot.settle()
    again, recovery = begin(files, partitions=3)
    assert recovery.newest() == 3
    other = Slot(files, again.number, tmp_path)
    assert other.read(other.open(2, 3)) == [b"1:1", b"1:2", b"0:3"]  # what its range meets


def test_what_other_partitions_had_in_part_does_not_count(tmp_path):
    """Before all of the new partitions have a version, it is the old ones' that counts, if they had it."""
    files = grown(tmp_path)
    generation = claim(files, run="test", partitions=3, key_groups=GROUPS)
    Recovery(files, generation, 1).write_base([1, 2])
    slot = Slot(files, generation.number, tmp_path)
    slot.seal(slot.open(0, 1), b"again")
    slot.settle()
    recovery = Recovery(files)
    assert (recovery.newest(), len(recovery.ranges(2)), len(recovery.ranges(1))) == (2, 2, 2)
    for partition in (1, 2):
        slot.seal(slot.open(partition, 1), b"again")
    slot.settle()
    recovery = Recovery(files)
    assert (recovery.newest(), len(recovery.ranges(2)), len(recovery.ranges(1))) == (2, 3, 2)


def test_attempts_that_contradict_each_other_do_not_count_after_a_rescale_either(tmp_path):
    files = grown(tmp_path)
    generation = claim(files, run="test", partitions=3, key_groups=GROUPS)
    Recovery(files, generation, 1).write_base([1, 2])
    for seen in (1, 2):
        slot = Slot(files, generation.number, tmp_path)
        slot.seal(slot.open(0, 1), b"again", seen=seen)
        slot.settle()
    assert not Recovery(files).durable(2)


def test_slices_of_event_time_that_overlap_become_one():
    names = ["main@0:9", "main@10:19", "main@0:19", "rows@10:19", "main@40:49", "other"]
    assert disjoint(names) == {
        "main@0:9": "main@0:19",
        "main@10:19": "main@0:19",
        "main@0:19": "main@0:19",
        "rows@10:19": "rows@0:19",
        "main@40:49": "main@40:49",
        "other": "other",
    }


def test_partitions_that_cut_event_time_otherwise_are_put_together():
    def table(name: str, keys: int) -> TableState:
        return TableState(TableManifest((RunRef(name, 9, 9, 0, 0),), keys=keys))

    manifests = [
        PartitionManifest(0, 0, 5, id="a", tables={"main@0:9": table("a", 1), "main@10:19": table("b", 2)}),
        PartitionManifest(0, 1, 5, id="b", tables={"main@0:19": table("c", 4), "main@20:29": table("d", 8)}),
    ]
    (found,) = rescaled(of(2), 1, 0, 5, manifests.__getitem__)
    kept = {name: ([run.name for run in one.runs.runs], one.runs.keys) for name, one in found.manifest.tables.items()}
    assert kept == {"main@0:19": (["a", "b", "c"], 7), "main@20:29": (["d"], 8)}
