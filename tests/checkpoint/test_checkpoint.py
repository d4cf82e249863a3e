import threading

import pytest

from millpond.checkpoint.formats import deltas
from millpond.checkpoint.formats.manifest import DeltaRef
from millpond.checkpoint.generation import claim
from millpond.errors import FencedError, StateDamagedError, TransientError
from millpond.files.locations.faults import Faults, FaultyFiles
from tests.checkpoint.rig import Slot, begin, memory


def test_deltas_since_the_flush_come_back_in_order(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot = Slot(files, generation.number, tmp_path)
    manifest = slot.open(0, 0)
    assert manifest.tables == {}
    for version, flushed in ((1, 0), (2, 0), (3, 1), (4, 1)):
        manifest = slot.seal(manifest, b"v%d" % version, flushed=flushed).manifest
        slot.settle()
    other = Slot(files, generation.number, tmp_path)
    assert other.read(other.open(0, 4)) == [b"v2", b"v3", b"v4"]
    assert other.read(other.open(0, 2)) == [b"v1", b"v2"]


def test_open_waits_for_a_commit_on_its_way(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot, other = (Slot(files, generation.number, tmp_path) for _ in range(2))
    slot.seal(slot.open(0, 0), b"x")
    timer = threading.Timer(0.1, slot.settle)
    timer.start()
    assert other.read(other.open(0, 1, wait=10)) == [b"x"]
    timer.join()


def test_open_gives_up_with_the_name_of_what_is_missing(tmp_path):
    files = memory()
    generation, _ = begin(files)
    with pytest.raises(TransientError, match=r"partition 1, version 7.*commits/000000000007-") as error:
        Slot(files, generation.number, tmp_path).open(1, 7, wait=0.01)
    assert "Restart" in error.value.action


def test_fenced_slot_opens_nothing(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot = Slot(files, generation.number, tmp_path)
    claim(files, run="newer", partitions=2)
    with pytest.raises(FencedError):
        slot.open(0, 0)


def test_attempts_with_the_same_input_are_interchangeable(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot, other = (Slot(files, generation.number, tmp_path) for _ in range(2))
    for one in (slot, other):
        one.seal(one.open(0, 0), b"x")
    slot.settle()
    other.settle()
    assert other.read(other.open(0, 1)) == [b"x"]


def test_attempts_with_different_input_are_refused(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot, other = (Slot(files, generation.number, tmp_path) for _ in range(2))
    slot.seal(slot.open(0, 0), b"x")
    other.seal(other.open(0, 0), b"y")
    slot.settle()
    other.settle()
    with pytest.raises(TransientError, match="different input"):
        other.open(0, 1)


def test_attempts_whose_parents_differ_are_refused(tmp_path):
    # The last batch's input is the same, but what it was added to is not.
    files = memory()
    generation, _ = begin(files)
    slot, other = (Slot(files, generation.number, tmp_path) for _ in range(2))
    for one, first in ((slot, b"x"), (other, b"y")):
        one.seal(one.seal(one.open(0, 0), first).manifest, b"z")
    slot.settle()
    other.settle()
    with pytest.raises(TransientError, match="different input"):
        other.open(0, 2)


def test_own_commit_goes_before_the_base(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot = Slot(files, generation.number, tmp_path)
    first = slot.seal(slot.open(0, 0), b"1")
    slot.seal(first.manifest, b"2")
    for partition in (1,):
        slot.seal(slot.seal(slot.open(partition, 0), b"1").manifest, b"2")
    slot.settle()
    # A batch that is planned and durable: the new run may see it again, with other input.
    new = claim(files, run="new", partitions=2, key_groups=64)
    from millpond.checkpoint.recovery import Recovery

    Recovery(files, new, 1).write_base([1, 2])
    again = Slot(files, new.number, tmp_path)
    assert again.read(again.open(0, 2)) == [b"1", b"2"]
    again.seal(again.open(0, 1), b"other")
    again.settle()
    assert again.read(again.open(0, 2)) == [b"1", b"other"]
    assert again.read(again.open(1, 2)) == [b"1", b"2"]


def test_torn_commit_is_not_seen(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot = Slot(files, generation.number, tmp_path)
    slot.seal(slot.open(0, 0), b"x")
    slot.settle()
    (info,) = files.list("commits/")
    data = files.get(info.name)
    files.put(info.name.replace(".0", ".9"), [data[: len(data) // 2]])
    other = Slot(files, generation.number, tmp_path)
    assert other.read(other.open(0, 1)) == [b"x"]


def test_altered_or_missing_delta_is_named(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot = Slot(files, generation.number, tmp_path)
    slot.seal(slot.open(0, 0), b"some bytes")
    slot.settle()
    manifest = slot.open(0, 1)
    (info,) = files.list("commits/")
    data = bytearray(files.get(info.name))
    data[-3] ^= 1
    files.put(info.name, [bytes(data)])
    with pytest.raises(StateDamagedError, match=info.name):
        slot.read(manifest)
    files.delete(info.name)
    with pytest.raises(StateDamagedError, match=info.name):
        slot.read(manifest)


def test_partitions_opened_together_share_listings_and_headers(tmp_path):
    files = memory()
    generation, _ = begin(files, partitions=50)
    slot = Slot(files, generation.number, tmp_path)
    for partition in range(50):
        slot.seal(slot.open(partition, 0), b"x")
    slot.settle()
    generation, _ = begin(files, partitions=50)
    counted = FaultyFiles(files, Faults())
    again = Slot(counted, generation.number, tmp_path)
    for partition in range(50):
        again.open(partition, 1)
    assert counted.requests == {"list": 1, "head": 2, "get": 3}  # commits; fence; claim, base and one header


@pytest.mark.parametrize(("length", "fetched"), [(10, 8), (40, 2), (60, 1), (500, 1)])
def test_deltas_are_fetched_ahead_within_a_bound(monkeypatch, length, fetched):
    """A batch's delta may have gigabytes."""
    monkeypatch.setattr(deltas, "_BYTES_IN_FLIGHT", 100)
    started = []

    def read(files, ref):
        started.append(ref.version)
        return b"%d" % ref.version

    monkeypatch.setattr(deltas, "read_delta", read)
    refs = [DeltaRef("commits/x", 0, length, version, 0) for version in range(12)]
    found = deltas.read_deltas(memory(), refs)
    assert next(found) == b"0"
    assert len(started) <= fetched
    assert [b"0", *found] == [b"%d" % version for version in range(12)]
