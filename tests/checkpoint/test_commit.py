import random

import pytest

from millpond.checkpoint.formats.commit import commit_name, encode_commit, read_header
from millpond.checkpoint.formats.manifest import DeltaRef, PartitionManifest, TableState, seal
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.refs import RunRef, TableManifest
from tests.checkpoint.rig import memory

RUN = RunRef("files/a.run", rows=5, bytes=100, first=1, last=2**64 - 1)
PARENT = PartitionManifest(
    0,
    1,
    4,
    id="p",
    tables={"main": TableState(TableManifest(), tuple(DeltaRef(f"commits/{v}", 9, 7, v, 1) for v in (2, 3, 4)))},
)


def put(pieces=(b"abc", b"", b"defg"), flushed=0):
    files = memory()
    sealed = seal(PARENT, {"main": (TableManifest((RUN,), flushed), pieces)}, input_checksum=2**64 - 1, input_rows=3)
    name = commit_name(5, 1, "slot", 0)
    files.put(name, encode_commit(1, "slot", [(sealed, PARENT)])[0], create=True)
    return files, name


def test_header_names_own_and_earlier_deltas():
    files, name = put(flushed=2)
    (manifest,) = read_header(files, name).manifests
    assert (manifest.version, manifest.parent, manifest.input_checksum) == (5, "p", 2**64 - 1)
    table = manifest.tables["main"]
    assert table.runs.runs == (RUN,)
    assert [delta.version for delta in table.deltas] == [3, 4, 5]  # version 2 is covered by the run
    own = table.deltas[-1]
    assert own.commit == name
    assert bytes(memoryview(files.get_range(name, own.offset, own.length))) == b"abcdefg"


def test_empty_delta_leaves_no_reference():
    files, name = put(pieces=())
    assert [d.version for d in read_header(files, name).manifests[0].tables["main"].deltas] == [2, 3, 4]


def test_long_header_takes_a_second_read():
    files = memory()
    runs = tuple(RunRef(f"files/{n}" * 20, 1, 1, 0, 1) for n in range(2000))
    sealed = seal(PARENT, {"main": (TableManifest(runs, 0), [b"x"])}, input_checksum=1, input_rows=1)
    files.put("commits/c", encode_commit(1, "s", [(sealed, PARENT)])[0])
    assert read_header(files, "commits/c").manifests[0].tables["main"].runs.runs == runs


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_or_flip_is_noticed(seed):
    files, name = put()
    data = bytearray(files.get(name))
    choice = random.Random(seed)
    end = len(data) - 7  # where the deltas begin; they have their own checksums
    if seed % 2:
        data = data[: choice.randrange(len(data))]
    else:
        data[choice.randrange(end)] ^= 1 << choice.randrange(8)
    files.put(name, [bytes(data)])
    with pytest.raises((StateDamagedError, StateIncompatibleError)) as error:
        read_header(files, name)
    assert error.value.file == files.locate(name)


def test_bytes_behind_the_end_are_noticed():
    files, name = put()
    files.put(name, [files.get(name), b"x"])
    with pytest.raises(StateDamagedError):
        read_header(files, name)


def test_newer_format_is_refused_by_name():
    files, name = put()
    data = bytearray(files.get(name))
    data[8] = 200
    files.put(name, [bytes(data)])
    with pytest.raises(StateIncompatibleError, match="format 200"):
        read_header(files, name)
