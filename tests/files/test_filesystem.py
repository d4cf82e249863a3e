import errno
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import numpy as np
import pytest

from millpond.errors import MillpondError, SettingError, StateDamagedError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem, MissingFileError
from millpond.files.backends.local import LocalFiles
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.faults import Faults, FaultyFiles
from millpond.files.locations.hedged import HedgedFiles
from millpond.files.locations.opening import join_url, on_disk, open_filesystem
from tests.files.uploads import PIECE, upload
from tests.servers.s3 import asked, pointed_at, s3
from tests.servers.seaweedfs import BUCKET

SEAWEEDFS = pytest.mark.xdist_group("seaweedfs")
HDFS = pytest.mark.xdist_group("hdfs")


@pytest.fixture(scope="module")
def bucket():
    with s3() as url:
        yield url


@pytest.fixture
def real_bucket(seaweedfs):
    with pointed_at(seaweedfs):
        yield f"s3://{BUCKET}"


@pytest.fixture
def real_hdfs(hdfs):
    return f"{hdfs.url}/a place"


@pytest.fixture(
    params=[
        "memory",
        "file",
        "path",
        "faults",
        "counted",
        "hedged",
        "bucket",
        pytest.param("real_bucket", marks=SEAWEEDFS),
        pytest.param("real_hdfs", marks=HDFS),
    ]
)
def files(request, tmp_path):
    if "bucket" in request.param or "hdfs" in request.param:
        return open_filesystem(f"{request.getfixturevalue(request.param)}/{uuid.uuid4().hex}/below")
    if request.param == "counted":
        return CountedFiles(open_filesystem(f"memory:{uuid.uuid4().hex}"))
    if request.param == "hedged":
        return HedgedFiles(open_filesystem(f"memory:{uuid.uuid4().hex}"))
    url = {
        "memory": f"memory:{uuid.uuid4().hex}/below",
        "file": f"file:{tmp_path}/new folder/x",
        "path": str(tmp_path / "a=b" / "c"),
        "faults": f"faults+file://{tmp_path}/f?latency_ms=0.1",
    }[request.param]
    return open_filesystem(url)


def test_pieces_become_one_object(files):
    assert isinstance(files, FileSystem)
    files.put("a/b", [b"ab", bytearray(b"cd"), np.arange(3, dtype=np.uint64), memoryview(b"xyz")[1:], b""])
    assert files.get("a/b") == b"abcd" + np.arange(3, dtype="<u8").tobytes() + b"yz"
    assert files.size("a/b") == 30
    assert bytes(memoryview(files.get_range("a/b", 2, 3))) == b"cd\0"
    assert [bytes(memoryview(piece)) for piece in files.get_ranges("a/b", [(28, 2), (0, 1)])] == [b"yz", b"a"]
    files.put("empty", [])
    assert files.get("empty") == b""


@pytest.mark.parametrize("size", [0, 100_000, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 16 << 20, 19 << 20])
def test_an_upload_is_one_object(files, size):
    data = random.Random(size).randbytes(size)
    upload(files, "a/b", data)
    assert files.get("a/b") == data
    with files.upload("a/b") as write:
        write(np.arange(3, dtype=np.uint64))
        write(np.empty((0, 3)))
        assert files.get("a/b") == data, "nothing is there before it is whole"
    assert files.get("a/b") == np.arange(3, dtype="<u8").tobytes()
    assert [info.name for info in files.list("")] == ["a/b"]


@pytest.mark.parametrize("size", [0, 100_000, 8 << 20, 19 << 20])
def test_an_upload_that_is_broken_off_leaves_nothing(files, size):
    files.put("a/old", [b"old"])
    for name in ("a/new", "a/old"):
        with pytest.raises(ZeroDivisionError):
            upload(files, name, bytes(size), broken_off=True)
    assert [info.name for info in files.list("")] == ["a/old"]
    assert files.get("a/old") == b"old"


def test_put_if_absent(files):
    files.put("x", [b"1"], create=True)
    with pytest.raises(AlreadyExistsError) as error:
        files.put("x", [b"2"], create=True)
    assert error.value.file == files.locate("x")
    assert files.get("x") == b"1"
    files.put("x", [b"3"])
    assert files.get("x") == b"3"


def test_many_pieces(files):
    pieces = [bytes([i % 256]) * (i % 700) for i in range(3000)]
    files.put("many", pieces)
    assert files.get("many") == b"".join(pieces)


def test_listing_takes_any_prefix(files):
    for name in ("c/1", "c/10", "c/2", "d/e/f", "cd"):
        files.put(name, [name.encode()])
    assert [info.name for info in files.list("")] == ["c/1", "c/10", "c/2", "cd", "d/e/f"]
    assert [info.name for info in files.list("c/1")] == ["c/1", "c/10"]
    assert [info.name for info in files.list("c/", after="c/1")] == ["c/10", "c/2"]
    assert [info.name for info in files.list("c")] == ["c/1", "c/10", "c/2", "cd"]
    assert [info.name for info in files.list("", after="c/2")] == ["cd", "d/e/f"]
    assert files.list("nothing/") == []
    (info,) = files.list("d/e/")
    assert info.size == 5
    assert abs(info.modified - time.time()) < 60


def test_delete(files):
    files.put("a/x", [b"1"])
    files.delete("a/x")
    files.delete("a/x")
    assert not files.exists("a/x")


def test_missing_file_is_named(files):
    for act in (files.get, files.size, lambda name: files.get_range(name, 0, 1)):
        with pytest.raises(MissingFileError) as error:
            act("not/there")
        assert error.value.file == files.locate("not/there")
    assert isinstance(error.value, StateDamagedError)


@pytest.mark.parametrize("span", [(3, 9), (5, 1), (9, 2)])
def test_range_behind_the_end_is_damage(files, span):
    files.put("short", [b"12345"])
    with pytest.raises(StateDamagedError, match="short"):
        files.get_range("short", *span)


def test_one_of_many_writers_wins(files):
    won, barrier = [], threading.Barrier(8)

    def write(number):
        barrier.wait()
        try:
            files.put("contended", [b"%d" % number], create=True)
        except AlreadyExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % number for number in won] == [files.get("contended")]


@pytest.mark.parametrize(
    ("place", "rounds"),
    [
        ("tmp_path", 100),
        pytest.param("real_bucket", 1000, marks=SEAWEEDFS),
        pytest.param("real_hdfs", 60, marks=HDFS),
    ],
)
def test_one_of_many_processes_wins(place, rounds, request):
    url = f"{request.getfixturevalue(place)}/{uuid.uuid4().hex}"
    program = textwrap.dedent(f"""
        import sys
        from millpond.files.locations.opening import open_filesystem
        files = open_filesystem({url!r})
        print("ready", flush=True)
        sys.stdin.readline()
        for n in range({rounds}):
            try:
                files.put(f"x/{{n}}", [sys.argv[1].encode() * 1000], create=True)
                print(n, flush=True)
            except FileExistsError:
                pass
    """)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    won = [{int(line) for line in process.communicate()[0].split()} for process in processes]
    assert won[0] | won[1] == set(range(rounds))
    assert not won[0] & won[1]
    files = open_filesystem(url)
    for number in range(rounds):
        assert files.get(f"x/{number}") == str(int(number in won[1])).encode() * 1000


def test_file_and_folder_are_synced_before_the_put_returns(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    files = LocalFiles(str(tmp_path / "state"))
    files.put("a/b/c", [b"x"], create=True)
    state = str(tmp_path / "state")
    (data,) = [path for path in synced if "/staging/" in path]
    assert synced.index(data) < synced.index(f"{state}/a/b"), "the name appears only for bytes that are safe"
    assert {str(tmp_path), state, f"{state}/a"} <= set(synced), "new folders are safe too"
    synced.clear()
    files.put("a/b/d", [b"x"], sync=False)
    assert synced == []


def test_failed_put_leaves_nothing(tmp_path, monkeypatch):
    files = LocalFiles(str(tmp_path))
    files.put("x", [b"old"])
    monkeypatch.setattr(os, "writev", lambda handle, pieces: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(MillpondError, match=r"No space left.*Free some space") as error:
        files.put("x", [b"new"])
    assert error.value.file == f"file:{tmp_path}/x"
    monkeypatch.undo()
    assert files.get("x") == b"old"
    assert [info.name for info in files.list("")] == ["x"]


def test_short_writes_go_on(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda handle, pieces: real(handle, [pieces[0][:3]]))
    files = LocalFiles(str(tmp_path))
    files.put("x", [b"abcdefgh", b"", b"ij"])
    assert files.get("x") == b"abcdefghij"


def test_failed_upload_leaves_nothing(tmp_path, monkeypatch):
    files = LocalFiles(str(tmp_path))
    real, written = os.writev, []

    def writev(handle, pieces):
        written.append(pieces)
        if len(written) > 1:
            raise OSError(28, "No space left")
        return real(handle, pieces)

    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(MillpondError, match=r"No space left.*Free some space"):
        upload(files, "x", bytes(2 * PIECE))
    assert list((tmp_path / "staging").iterdir()) == []
    assert not files.exists("x")


def test_an_upload_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    real, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), real(handle)))
    monkeypatch.setattr(os, "replace", lambda src, dst: (done.append(dst), replace(src, dst)))
    with LocalFiles(str(tmp_path)).upload("a/b") as write:
        write(b"x")
    path = str(tmp_path / "a" / "b")
    (data,) = [each for each in done if "/staging/" in each]
    assert done.index(data) < done.index(path) < len(done) - 1 - done[::-1].index(str(tmp_path / "a"))


@pytest.mark.parametrize("early", [True, False])
def test_a_name_that_is_taken_would_survive_a_power_cut(tmp_path, monkeypatch, early):
    """The put that took it may not have synced the folder yet, and the same bytes count as written."""
    files = LocalFiles(str(tmp_path))
    files.put("a/b", [b"x"], sync=False)
    done, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), real(handle)))
    if not early:
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(AlreadyExistsError, match="a/b"):
        files.put("a/b", [b"x"], create=True)
    assert done[-1] == str(tmp_path / "a")


@pytest.mark.parametrize(
    ("number", "kind", "helps"),
    [
        (errno.ENOSPC, TransientError, "Free some space on the disk of {}."),
        (errno.EDQUOT, TransientError, "Free some space on the disk of {}."),
        (errno.EACCES, SettingError, "the right to read and write below {}."),
        (errno.EROFS, SettingError, "Make {} a folder that can be written, on a disk that is not read-only."),
        (errno.EMFILE, TransientError, "Raise the limit of open files (ulimit -n) for Spark's processes."),
        (errno.EIO, TransientError, "See whether the disk of {} works, and try again."),
    ],
)
def test_a_disk_that_fails_is_named_with_its_reason(tmp_path, monkeypatch, number, kind, helps):
    """Settings that may lead there are not guessed: checkpoints and the host's own folders are such files, too."""
    files = LocalFiles(str(tmp_path))
    failed = OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "writev", lambda *_: (_ for _ in ()).throw(failed))
    with pytest.raises(kind) as error:
        files.put("x", [b"new"])
    assert os.strerror(number) in error.value.message
    assert error.value.file == f"file:{tmp_path}/x"
    assert error.value.action.endswith(helps.format(tmp_path))


@pytest.mark.parametrize("place", ["file/below", "/proc/nowhere/x"])
def test_a_place_that_can_hold_nothing_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("no folder")
    files = open_filesystem(str(tmp_path / place))
    with pytest.raises(SettingError, match=rf"Nothing can be kept here.*Make {tmp_path / place} a folder"):
        files.put("a", [b"x"])


def test_memory_keeps_contents_not_buffers():
    files, data = open_filesystem("memory:kept"), bytearray(b"before")
    files.put("a", [data])
    data[:] = b"behind"
    assert files.get("a") == b"before"


def test_memory_is_shared_by_name():
    name = uuid.uuid4().hex
    open_filesystem(f"memory:{name}/state").put("x", [b"1"])
    assert open_filesystem(f"memory://{name}").get("state/x") == b"1"
    assert not open_filesystem("memory:another").exists("x")


@pytest.mark.parametrize("url", ["foo://bucket/x", "file://other/x", "faults+file:/x?latency=3", "faults+file:/x?fail"])
def test_malformed_locations_are_refused(url):
    with pytest.raises(SettingError) as error:
        open_filesystem(url)
    assert error.value.action


@pytest.mark.parametrize("place", ["bucket", pytest.param("real_bucket", marks=SEAWEEDFS)])
def test_a_bucket_that_is_not_there(place, request):
    bucket = request.getfixturevalue(place)
    files = open_filesystem(f"{bucket}-2/state")
    for action in (lambda: files.put("x", [b"1"]), lambda: files.put("x", [b"1"], create=True), lambda: files.list("")):
        with pytest.raises(SettingError, match="no such bucket") as error:
            action()
        assert error.value.file == f"{bucket}-2/state"
    with pytest.raises(MissingFileError):
        files.get("x")


class NoRole(BaseHTTPRequestHandler):
    """A metadata service of a machine without a role."""

    def do_PUT(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoRole)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        (["AWS_ALLOW_HTTP"], "no TLS, .*Set AWS_ALLOW_HTTP=true"),
        (["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "no credentials .*AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_the_environment_lacks_is_said(metadata, monkeypatch, lacking, message):
    with pointed_at("http://127.0.0.1:9", AWS_METADATA_ENDPOINT=metadata):
        for name in lacking:
            monkeypatch.delenv(name)
        files = open_filesystem("s3://bucket/x")
        for ask in (lambda: files.get("a"), lambda: files.list("a"), lambda: files.put("a", [b"x"], create=True)):
            with pytest.raises(SettingError, match=message):
                ask()


def test_requests_are_counted_as_the_store_counts_them(bucket):
    files = CountedFiles(open_filesystem(f"{bucket}/{uuid.uuid4().hex}"))
    with asked() as seen:
        files.put("a", [b"one", b"two"])
        files.put("b", [b"one", b"two"], create=True)
        files.put("large", [bytes(12 << 20), bytes(5 << 20)])
        with files.upload("short") as write:
            write(b"one")
        with files.upload("long") as write:
            write(bytes(8 << 20))
            assert files.counts()["puts"] == 1 + 1 + 5 + 1, "it may still be one request"
            write(bytes(9))
            assert files.counts()["puts"] == 1 + 1 + 5 + 1 + 2, "begun, a part"
        assert len(files.get("large")) == 17 << 20
        files.get_range("large", 5, 7)
        files.get_ranges("large", [(9 << 20, 10), (0, 10), (4 << 20, 10), (1 << 20, 10), (3 << 20, 10)])
        files.get_ranges("large", [(0, 10), ((1 << 20) + 11, 10)])
        files.size("large")
        assert not files.exists("c")
        files.list("")
        files.delete("a")
        with pytest.raises(MissingFileError):
            files.get("a")
    counts = files.counts()
    assert {kind: counts[kind] for kind in ("puts", "gets", "lists", "heads", "deletes")} == Counter(k for k, _ in seen)
    assert counts["puts"] == 1 + 1 + 5 + 1 + 4  # three parts between a beginning and an end, or two
    assert counts["put_bytes"] == 12 + (17 << 20) + 3 + (8 << 20) + 9
    assert counts["gets"] == 1 + 1 + 3 + 2 + 1
    joined = (1 << 20) + 10, (1 << 20) + 10, 10
    assert counts["get_bytes"] == (17 << 20) + 7 + sum(joined) + 20


def test_long_lists_are_counted_by_their_pages():
    files = CountedFiles(open_filesystem(f"memory:{uuid.uuid4().hex}"))
    for number in range(1001):
        files.inner.put(str(number), [b"x"])
    assert len(files.list("")) == 1001
    assert files.counts()["lists"] == 2


def test_who_is_on_a_disk():
    assert on_disk("/a:b/c")
    assert on_disk("a/b")
    assert on_disk("file:///a")
    assert not any(map(on_disk, ("memory:a", "s3://b/c", "faults+/a", "faults+file:/a")))


def test_remote_schemes_pass_through():
    files = open_filesystem("s3://bucket/some/prefix", region="us-east-1", skip_signature=True)
    assert files.locate("commits/x") == "s3://bucket/some/prefix/commits/x"


@pytest.mark.parametrize("url", ["viewfs:/state", "faults+ofs://service/volume"])
def test_what_only_hadoop_reads_is_refused(url):
    with pytest.raises(SettingError, match="only Hadoop reads"):
        open_filesystem(url)


def test_join_url():
    assert join_url("s3://b/p/", "millpond") == "s3://b/p/millpond"
    assert join_url("/a/b?c", "x") == "/a/b?c/x"
    assert join_url("faults+file:/p?fail=0.5", "millpond") == "faults+file:/p/millpond?fail=0.5"
    assert join_url("memory:q", "millpond") == "memory:q/millpond"


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "az", "abfs"])
@pytest.mark.parametrize("path", ["run 1", "run%201", "d%2Fe", "100%", "run#1", "run?1", "a+b", "ü/x"])
def test_the_path_of_a_location_is_taken_to_the_letter(scheme, path):
    """As Hadoop's `Path` takes it, by which Spark's part of a checkpoint is written."""
    config = {"az": {"account_name": "account"}, "abfs": {"account_name": "account"}}.get(scheme, {})
    files = open_filesystem(f"{scheme}://bucket/{path}", config=config | {"skip_signature": "true"})
    assert files.store.prefix == path  # type: ignore[attr-defined]
    assert open_filesystem(join_url(files.url, "below"), config=config).store.prefix == f"{path}/below"  # type: ignore[attr-defined]
    assert files.locate("x") == f"{scheme}://bucket/{path}/x"


@pytest.mark.parametrize("name", ["run 1", "run%201", "run#1", "run?1"])
def test_what_other_clients_have_written_is_found(name, bucket):
    url = f"{os.environ['AWS_ENDPOINT_URL']}/{bucket.removeprefix('s3://')}/{quote(f'{name}/offsets/0')}"
    kind = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, b"planned", kind, method="PUT")).close()
    files = open_filesystem(f"{bucket}/{name}")
    assert [info.name for info in files.list("")] == ["offsets/0"]
    assert files.get("offsets/0") == b"planned"


class TestFaults:
    def faulty(self, **faults):
        inner = open_filesystem(f"memory:{uuid.uuid4().hex}")
        return inner, FaultyFiles(inner, Faults(**faults))

    def test_parts_are_sent_again_and_whole_uploads_are_not(self):
        data = random.Random(1).randbytes(20 << 20)
        outcomes = set()
        for seed in range(30):
            inner, files = self.faulty(fail=0.4, retries=30, seed=seed)
            said = ""
            try:
                upload(files, "x", data)
            except TransientError as error:
                said = str(error)
            there = inner.exists("x")
            assert there == (not said or "took effect" in said)
            assert not there or inner.get("x") == data
            outcomes.add((there, bool(said)))
        assert outcomes == {(True, False), (True, True), (False, True)}

    def test_torn_upload_leaves_a_part_or_nothing(self):
        left = set()
        for seed in range(12):
            inner, files = self.faulty(torn=1, seed=seed)
            with pytest.raises(TransientError, match="torn"):
                upload(files, "x", bytes(17 << 20))
            left.add(inner.size("x") if inner.exists("x") else None)
        assert len(left) > 3

    def test_same_seed_same_faults(self):
        def outcomes(seed):
            _, files = self.faulty(fail=0.5, seed=seed)
            found = []
            for number in range(40):
                try:
                    files.put(str(number), [b"x"])
                    found.append("ok")
                except MillpondError as error:
                    found.append(error.message)
            return found

        assert outcomes(1) == outcomes(1) != outcomes(2)
        assert len(set(outcomes(1))) == 3, "before the effect, after it, not at all"

    def test_torn_put_leaves_a_part_or_nothing(self):
        inner, files = self.faulty(torn=1)
        left = []
        for number in range(60):
            with pytest.raises(Exception, match="torn"):
                files.put(str(number), [b"ab", b"cd"], create=True)
            left.append(inner.get(str(number)) if inner.exists(str(number)) else None)
        assert set(left) == {None, b"", b"a", b"ab", b"abc"}

    def test_repeated_put_finds_itself(self):
        inner, files = self.faulty(repeat=1)
        with pytest.raises(AlreadyExistsError):
            files.put("x", [b"1"], create=True)
        assert inner.get("x") == b"1"

    def test_reads_are_retried_and_puts_are_not(self):
        inner, files = self.faulty(fail=0.3, retries=30)
        inner.put("x", [b"1"])
        for _ in range(100):
            assert files.get("x") == b"1"
        assert files.requests["get"] > 110

    def test_time_is_charged(self, monkeypatch):
        slept = []
        monkeypatch.setattr("millpond.files.locations.faults.time.sleep", slept.append)
        _, files = self.faulty(latency_ms=23, bandwidth_mb=100, stall=1, stall_s=7)
        files.put("x", [bytes(10**6)])
        assert slept[0] == 0.023
        assert slept[1] == 7
        assert 0.009 < slept[2] <= 0.01
