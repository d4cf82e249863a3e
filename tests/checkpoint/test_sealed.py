import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from millpond.checkpoint.manifest import PartitionManifest, seal
from millpond.checkpoint.sealed import SealedFiles
from millpond.files.refs import TableManifest
from tests.checkpoint.rig import Slot, begin, memory


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
    assert not (tmp_path / dead.name).exists()


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
    assert not (tmp_path / dead.name).exists()


def test_living_slots_are_left_alone(tmp_path):
    files = memory()
    generation, _ = begin(files)
    living = Slot(files, generation.number, tmp_path)
    living.seal(living.open(0, 0), b"one")
    assert Slot(files, generation.number, tmp_path).sealed.adopt(generation.number) == []
    with pytest.raises(RuntimeError, match="twice"):
        SealedFiles(str(tmp_path), living.name)


def test_half_written_and_foreign_files_are_ignored(tmp_path):
    files = memory()
    generation, _ = begin(files)
    dead = Slot(files, generation.number, tmp_path)
    for partition, damage in ((0, "cut"), (1, "flip")):
        dead.seal(dead.open(partition, 0), b"some state", submit=False)
        (path,) = (tmp_path / dead.name).glob(f"*-0-{partition}-*.sealed")
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
    (path,) = (tmp_path / dead.name).glob("*.sealed")
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
    (path,) = (tmp_path / dead.name).glob("000000000001-*")
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
    assert not list((tmp_path / "slot").glob("*.sealed"))
    assert b"".join(bytes(p) for p in sealed.pieces["main"]) == b"state"


def test_killed_process_lets_go_of_its_lock(tmp_path):
    program = textwrap.dedent(f"""
        import sys
        from millpond.checkpoint.manifest import PartitionManifest, seal
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
