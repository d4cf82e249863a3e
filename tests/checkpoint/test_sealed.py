import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from millpond.checkpoint.formats.manifest import PartitionManifest, seal
from millpond.checkpoint.sealed import SealedFiles
from millpond.files.refs import TableManifest
from tests.checkpoint.rig import Slot, begin, memory
from tests.support.interleave import Interleaved, schedules


def test_new_slot_uploads_what_a_dead_one_sealed(tmp_path):
    files = memory()
    generation, _ = begin(files)
    dead = Slot(files, generation.number, tmp_path)
    first = dead.seal(dead.open(0, 0), b"one")
    dead.settle()
    second = dead.seal(first.manifest, b"two")
    dead.seal(second.manifest, b"three")
    dead.die()
    new = Slot(files, generation.number, tmp_path)
    adopted = new.sealed.adopt(generation.number)
    assert [s.manifest.version for s in adopted] == [2, 3]
    for sealed in adopted:
        new.committer.submit(sealed, adopted=True)
    new.settle()
    assert new.read(new.open(0, 3)) == [b"one", b"two", b"three"]
    assert not list(tmp_path.glob(f"{dead.name}*"))


def test_what_was_put_already_is_not_put_again(tmp_path):
    files = memory()
    generation, _ = begin(files)
    dead = Slot(files, generation.number, tmp_path)
    sealed = dead.seal(dead.open(0, 0), b"one")
    dead.checkpoint.put_commit(dead.name, 0, [(sealed, dead.open(0, 0))])  # and then it died
    dead.die()
    new = Slot(files, generation.number, tmp_path)
    for one in new.sealed.adopt(generation.number):
        new.committer.submit(one, adopted=True)
    new.settle()
    assert len(files.list("commits/")) == 1
    assert not list(tmp_path.glob(f"{dead.name}*"))


def test_living_slots_are_left_alone(tmp_path):
    files = memory()
    generation, _ = begin(files)
    living = Slot(files, generation.number, tmp_path)
    living.seal(living.open(0, 0), b"one")
    assert Slot(files, generation.number, tmp_path).sealed.adopt(generation.number) == []
    assert SealedFiles(str(tmp_path), living.name).adopt(generation.number) == []


LEFT = PartitionManifest(0, 0, 0)


def leave(directory, slot):
    """A slot that seals one version, and ends before it is durable."""
    files = SealedFiles(str(directory), slot)
    files.write(seal(LEFT, {"main": (TableManifest(), [b"state"])}, input_checksum=1, input_rows=1), 1)
    files.close()


def use(directory, slot, generation=1, times=1):
    """Start a slot that takes over what it finds, makes it durable and releases it; `times` over."""
    found = []
    for _ in range(times):
        files = SealedFiles(str(directory), slot)
        for sealed in files.adopt(generation):
            found.append(sealed.manifest.version)
            files.remove(sealed)
        files.close()
    return found


@pytest.mark.parametrize("left", [(), ("a",), ("a", "dead")], ids=["nothing", "its own", "its own and another's"])
def test_slots_that_start_and_let_go_at_once_do_not_meet(tmp_path, monkeypatch, left):
    """Whichever step of one falls between which of the other's, both start, and what was left is taken over once."""
    world = Interleaved(monkeypatch)
    for number, schedule in enumerate(schedules(16 + 25 * len(left))):
        directory = tmp_path / str(number)
        for slot in left:
            leave(directory, slot)
        found = world.run(schedule, [lambda d=directory: use(d, "a"), lambda d=directory: use(d, "b")])
        assert [*found[0], *found[1], *use(directory, "c")] == [1] * len(left), schedule
        assert not list(directory.iterdir()), schedule


def test_a_slot_that_starts_again_does_not_meet_one_that_takes_over(tmp_path, monkeypatch):
    """A second start in the same application: the slot's processes live on, and what was not drained lies there."""
    world = Interleaved(monkeypatch)
    for number, schedule in enumerate(schedules(40)):
        directory = tmp_path / str(number)
        leave(directory, "a")
        again = [lambda d=directory: use(d, "a", 2, 2), lambda d=directory: use(d, "b", 2, 2)]
        assert world.run(schedule, again) == [[], []], schedule
        assert use(directory, "c") == [], "an older generation's is of no use"
        assert not list(directory.iterdir()), schedule


def test_what_a_newer_generation_has_sealed_is_left_to_it(tmp_path):
    """A task that Spark has given up may open an old generation again."""
    files = SealedFiles(str(tmp_path), "newer")
    files.write(seal(LEFT, {"main": (TableManifest(), [b"state"])}, input_checksum=1, input_rows=1), 2)
    files.close()
    old = SealedFiles(str(tmp_path), "old")
    assert old.adopt(1) == []
    assert use(tmp_path, "new", 2) == [1]
    old.close()


def test_half_written_and_foreign_files_are_ignored(tmp_path):
    files = memory()
    generation, _ = begin(files)
    dead = Slot(files, generation.number, tmp_path)
    for partition, damage in ((0, "cut"), (1, "flip")):
        dead.seal(dead.open(partition, 0), b"some state", submit=False)
        (path,) = Path(dead.sealed.path).glob(f"*-0-{partition}-*.sealed")
        data = bytearray(path.read_bytes())
        if damage == "cut":
            data = data[:-4]
        else:
            data[-4] ^= 8
        path.write_bytes(bytes(data))
    dead.die()
    assert Slot(files, generation.number, tmp_path).sealed.adopt(generation.number) == []
    old = Slot(files, generation.number, tmp_path)
    old.seal(old.open(0, 0), b"of an older run", submit=False)
    old.die()
    assert Slot(files, generation.number, tmp_path).sealed.adopt(generation.number + 1) == []


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_or_flip_is_noticed(tmp_path, seed):
    choice = random.Random(seed)
    files = memory()
    generation, _ = begin(files)
    dead = Slot(files, generation.number, tmp_path)
    dead.seal(dead.open(0, 0), b"some state", submit=False)
    (path,) = Path(dead.sealed.path).glob("*.sealed")
    data = bytearray(path.read_bytes())
    if seed % 2:
        del data[choice.randrange(len(data)) :]
    else:
        data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
    path.write_bytes(data)
    dead.die()
    assert Slot(files, generation.number, tmp_path).sealed.adopt(generation.number) == []


def test_orphan_of_a_lost_parent_is_given_up(tmp_path):
    files = memory()
    generation, _ = begin(files)
    dead = Slot(files, generation.number, tmp_path)
    first = dead.seal(dead.open(0, 0), b"one", submit=False)
    dead.seal(first.manifest, b"two", submit=False)
    dead.die()
    (path,) = Path(dead.sealed.path).glob("000000000001-*")
    path.write_bytes(b"half")
    new = Slot(files, generation.number, tmp_path)
    for sealed in new.sealed.adopt(generation.number):
        new.committer.submit(sealed, adopted=True)
    new.settle()
    assert files.list("commits/") == []


def test_written_pieces_outlive_the_buffers(tmp_path):
    files = SealedFiles(str(tmp_path), "slot")
    buffer = bytearray(b"state")
    tables = {"main": (TableManifest(), [buffer])}
    sealed = files.write(seal(PartitionManifest(0, 0, 0), tables, input_checksum=1, input_rows=1), 1)
    buffer[:] = b"xxxxx"
    assert b"".join(bytes(p) for p in sealed.pieces["main"]) == b"state"
    files.remove(sealed)
    assert not list(tmp_path.rglob("*.sealed"))
    assert b"".join(bytes(p) for p in sealed.pieces["main"]) == b"state"


def test_a_mapped_file_keeps_no_descriptor_open(tmp_path):
    files = SealedFiles(str(tmp_path), "slot")
    tables = {"main": (TableManifest(), [b"state"])}
    held, before = [], len(os.listdir("/proc/self/fd"))
    for version in range(20):
        sealed = seal(PartitionManifest(0, 0, version), tables, input_checksum=1, input_rows=1)
        held.append(files.write(sealed, 1))
    assert len(os.listdir("/proc/self/fd")) == before
    assert {b"".join(bytes(p) for p in sealed.pieces["main"]) for sealed in held} == {b"state"}
    files.close()


def test_killed_process_lets_go_of_its_lock(tmp_path):
    program = textwrap.dedent(f"""
        import sys
        from millpond.checkpoint.formats.manifest import PartitionManifest, seal
        from millpond.checkpoint.sealed import SealedFiles
        from millpond.files.refs import TableManifest
        files = SealedFiles({str(tmp_path)!r}, "victim")
        tables = {{"main": (TableManifest(), [b"state"])}}
        files.write(seal(PartitionManifest(0, 0, 0), tables, input_checksum=1, input_rows=1), 1)
        print("sealed", flush=True)
        sys.stdin.read()
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"sealed\n"
    heir = SealedFiles(str(tmp_path), "heir")
    assert heir.adopt(1) == []
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (sealed,) = heir.adopt(1)
    assert b"".join(bytes(p) for p in sealed.pieces["main"]) == b"state"
    process.stdin.close()
    process.stdout.close()
