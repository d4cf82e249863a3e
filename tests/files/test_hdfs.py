"""HDFS: a put-if-absent whose answers are lost, other faults, standby namenodes, Hadoop's configuration, errors."""

import getpass
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from millpond.errors import SettingError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, MissingFileError
from millpond.files.backends.hadoop_conf import find_cluster
from millpond.files.backends.hdfs import HdfsFiles
from millpond.files.backends.local import STAGING
from millpond.files.locations.opening import on_disk, open_filesystem
from tests.servers.hdfs import behind_proxies, configured, webhdfs
from tests.servers.process import free_ports
from tests.servers.proxy import KINDS

HDFS = pytest.mark.xdist_group("hdfs")
FAULTS = [kind for kind in KINDS if kind != "conflict"]
SHARES = dict.fromkeys(FAULTS, 0.2) | {"hang": 0.1}  # of requests, of which a put is three
SHORT_RETRY = {"retry_config": {"max_retries": 0}}


@HDFS
@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_overcome(kind, hdfs, tmp_path):
    """Put-if-absent, too: the winner learns that it has won, even if answers are lost."""
    impatient = configured(tmp_path, {"dfs.webhdfs.socket.read-timeout": "1s"} if kind == "hang" else {})
    with impatient, behind_proxies(hdfs, 3, {kind: SHARES[kind]}) as proxies:
        files = open_filesystem(f"{webhdfs(proxies[0].endpoint)}/one fault/{kind}")
        names = [f"created/{number}" for number in range(3)]
        contents = [random.Random(number).randbytes(200_000) for number in range(3)]
        for number, (name, data) in enumerate(zip(names, contents, strict=True)):
            files.put(name, [data], create=True)
            with pytest.raises(AlreadyExistsError):
                files.put(name, [b"another's"], create=True)
            assert files.get(name) == data
            assert files.size(name) == len(data)
            ranges = [(100_000, 50_000), (0, 10), (199_999, 1)]
            assert [bytes(part) for part in files.get_ranges(name, ranges)] == [data[o : o + n] for o, n in ranges]
            assert [info.name for info in files.list("created/")] == names[: number + 1]
            files.put("replaced", [data[:10], data[10:]])
            assert files.get("replaced") == data
            files.delete("replaced")
            assert not files.exists("replaced")
    assert sum(proxy.happened[kind] for proxy in proxies) > 5


def at_renames(proxy, *happens):
    """Give the first renames, one after another, a fault (its name), or do something before one."""
    todo = list(happens)

    def draw(method, target):
        kind = todo.pop(0) if todo and "op=RENAME" in target else ""
        return (kind() if callable(kind) else kind), 0.0

    proxy.draw = draw
    return todo


@HDFS
@pytest.mark.parametrize("lost", [1, 3])
def test_a_put_if_absent_whose_answer_is_lost_has_won(hdfs, lost):
    direct = open_filesystem(f"{hdfs.url}/won/{lost}")
    with behind_proxies(hdfs, 1, {}) as (proxy, _):
        files = open_filesystem(f"{webhdfs(proxy.endpoint)}/won/{lost}")
        left = at_renames(proxy, *["lost"] * lost)
        files.put("claim", [b"fir", b"st"], create=True)
        assert not left
        with pytest.raises(AlreadyExistsError):
            files.put("claim", [b"second"], create=True)
    assert direct.get("claim") == b"first"
    assert direct.list(f"{STAGING}/") == []


@HDFS
def test_a_put_if_absent_whose_refusal_is_lost_has_not_won(hdfs):
    direct = open_filesystem(f"{hdfs.url}/refused")
    direct.put("claim", [b"another's"], create=True)
    with behind_proxies(hdfs, 1, {}) as (proxy, _):
        files = open_filesystem(f"{webhdfs(proxy.endpoint)}/refused")
        left = at_renames(proxy, "lost", "lost")
        with pytest.raises(AlreadyExistsError) as error:
            files.put("claim", [b"mine"], create=True)
        assert not left
        assert error.value.file == files.locate("claim")
    assert direct.get("claim") == b"another's"
    assert direct.list(f"{STAGING}/") == []


@HDFS
def test_a_put_if_absent_that_another_overtakes_between_two_tries_has_not_won(hdfs):
    direct = open_filesystem(f"{hdfs.url}/overtaken")

    def another():
        direct.put("claim", [b"another's"], create=True)
        return "reset"

    with behind_proxies(hdfs, 1, {}) as (proxy, _):
        files = open_filesystem(f"{webhdfs(proxy.endpoint)}/overtaken")
        left = at_renames(proxy, another)
        with pytest.raises(AlreadyExistsError):
            files.put("claim", [b"mine"], create=True)
        assert not left
    assert direct.get("claim") == b"another's"


@HDFS
def test_what_was_written_aside_and_is_gone_is_not_taken_for_a_name_that_was_won(hdfs):
    direct = open_filesystem(f"{hdfs.url}/emptied")

    def empty():
        for info in direct.list(f"{STAGING}/"):
            direct.delete(info.name)
        direct.put("claim", [b"another's"], create=True)
        return "reset"

    with behind_proxies(hdfs, 1, {}) as (proxy, _):
        files = open_filesystem(f"{webhdfs(proxy.endpoint)}/emptied")
        at_renames(proxy, empty)
        with pytest.raises(TransientError, match="outcome unknown"):
            files.put("claim", [b"mine"], create=True)


@HDFS
def test_of_many_writers_one_wins_and_knows_it_though_answers_are_lost(hdfs):
    names, won = [f"x/{number}" for number in range(6)], []
    with behind_proxies(hdfs, 7, {"lost": 0.12, "reset": 0.04, "cut": 0.04}) as proxies:
        url = f"{webhdfs(proxies[0].endpoint)}/contended"
        barrier = threading.Barrier(4, timeout=60)

        def write(writer):
            files = open_filesystem(url)
            for name in names:
                barrier.wait()
                try:
                    files.put(name, [b"%d" % writer * 1000], create=True)
                except AlreadyExistsError:
                    continue
                won.append((name, b"%d" % writer * 1000))

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    files = open_filesystem(f"{hdfs.url}/contended")
    assert sorted(won) == [(name, files.get(name)) for name in names]
    assert proxies[0].happened["lost"]


@HDFS
def test_a_writer_that_is_killed_leaves_no_object_and_what_it_left_is_found(hdfs):
    url = f"{hdfs.url}/killed"
    program = textwrap.dedent(f"""
        import os
        from millpond.files.backends.hdfs import HdfsFiles
        HdfsFiles._move = lambda *_, **__: os._exit(9)
        HdfsFiles({url!r}).put("claim", [b"x"], create=True)
    """)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    files = open_filesystem(url)
    assert not files.exists("claim")
    assert files.list("c") == []
    (left,) = files.list(f"{STAGING}/")
    assert abs(left.modified - time.time()) < 60
    files.put("claim", [b"y"], create=True)


@HDFS
def test_an_upload_that_breaks_off_leaves_nothing(hdfs):
    direct = open_filesystem(f"{hdfs.url}/broken off")
    direct.put("x", [b"old"])
    with behind_proxies(hdfs, 1, {}) as (namenode, datanode):
        files = open_filesystem(f"{webhdfs(namenode.endpoint)}/broken off", retry_config={"max_retries": 1})
        datanode.shares["reset"] = 1.0
        with pytest.raises(TransientError, match="HDFS failed") as error:
            files.put("x", [bytes(1 << 20)])
        assert error.value.file == files.locate("x")
    assert direct.get("x") == b"old"
    assert direct.list(f"{STAGING}/") == []


@HDFS
def test_requests_of_a_put_and_of_near_ranges(hdfs):
    with behind_proxies(hdfs, 1, {}) as (namenode, datanode):
        files = open_filesystem(f"{webhdfs(namenode.endpoint)}/requests")
        files.put("a/x", [b"first"])
        namenode.asked.clear()
        files.put("a/y", [bytes(3 << 20)])
        assert [asked.partition("op=")[2].partition("&")[0] for asked in namenode.asked] == ["CREATE", "RENAME"]
        assert any("SYNC_BLOCK" in asked for asked in namenode.asked), "blocks are synced"
        namenode.asked.clear()
        files.put("a/y", [bytes(3 << 20)], sync=False)
        assert not any("SYNC_BLOCK" in asked for asked in namenode.asked)
        datanode.asked.clear()
        files.get_ranges("a/y", [(0, 10), (5, 0), (1 << 20, 10), (3_000_000, 10)])
        assert datanode.asked.total() == 2
        assert files.get_range("a/y", 7, 0) == b""
        assert datanode.asked.total() == 2


@HDFS
def test_a_datanode_that_fails_is_avoided_unless_there_is_no_other(hdfs):
    open_filesystem(f"{hdfs.url}/avoided").put("x", [b"1"])
    with behind_proxies(hdfs, 1, {}) as (namenode, datanode):
        files = open_filesystem(f"{webhdfs(namenode.endpoint)}/avoided")
        happens = ["reset"]
        datanode.draw = lambda *_: (happens.pop() if happens else "", 0.0)
        assert files.get("x") == b"1"
        assert ["excludedatanodes=127.0.0.1" in asked for asked in namenode.asked.elements()] == [False, False, True]
        assert not happens


@HDFS
def test_a_list_whose_answer_breaks_off_is_asked_for_again(hdfs):
    open_filesystem(f"{hdfs.url}/list").put("x", [b"1"])
    with behind_proxies(hdfs, 1, {"cut": 0.5}) as (proxy, _):
        files = open_filesystem(f"{webhdfs(proxy.endpoint)}/list")
        for _ in range(8):
            assert [info.name for info in files.list("")] == ["x"]
    assert proxy.happened["cut"]


@HDFS
def test_names_of_any_letters(hdfs):
    files = open_filesystem(f"{hdfs.url}/größe %41 a+b#c?d")
    names = ["a=b/ü&x", "a=b/x y+z%20", "a-b", "é"]
    for name in names:
        files.put(name, [name.encode()], create=True)
    assert [info.name for info in files.list("")] == sorted(names)
    assert [files.get(name).decode() for name in names] == names
    assert [info.name for info in files.list("a=b/x")] == ["a=b/x y+z%20"]


@HDFS
def test_folders_are_no_objects(hdfs):
    files = open_filesystem(f"{hdfs.url}/folders")
    files.put("a/b", [b"x"])
    assert not files.exists("a")
    with pytest.raises(MissingFileError):
        files.get("a")
    assert files.list("a/b/") == []
    with pytest.raises(SettingError, match="Nothing can be kept here"):
        files.put("a/b/c", [b"x"], create=True)
    with pytest.raises(TransientError, match="directories"):
        open_filesystem(files.url, **SHORT_RETRY).put("a", [b"x"], create=True)
    assert [info.name for info in files.list("")] == ["a/b"], "nothing was moved into the folder"


@HDFS
def test_a_folder_that_goes_is_made_again(hdfs):
    files = open_filesystem(f"{hdfs.url}/again")
    files.put("a/x", [b"1"])
    HdfsFiles(hdfs.url)._try("DELETE", "DELETE", "again", recursive="true")
    files.put("a/x", [b"2"], create=True)
    assert files.get("a/x") == b"2"


@HDFS
def test_who_may_not_write_is_told_so(hdfs, monkeypatch):
    open_filesystem(f"{hdfs.url}/of the superuser").put("x", [b"1"])
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    files = open_filesystem(f"{hdfs.url}/of the superuser")
    with pytest.raises(SettingError, match=r"refuses access.*somebody.*HADOOP_USER_NAME") as error:
        files.put("y", [b"2"], create=True)
    assert error.value.file == f"{hdfs.url}/of the superuser/y"
    assert files.get("x") == b"1"


@HDFS
@pytest.mark.parametrize("form", ["hdfs://{rpc}/by hdfs", "hdfs:///by hdfs", "hdfs:/by hdfs"])
def test_hdfs_urls_by_hadoops_configuration(hdfs, monkeypatch, form):
    monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.conf))
    open_filesystem(form.format(rpc=hdfs.rpc)).put("x", [form.encode()])
    assert open_filesystem(f"{hdfs.url}/by hdfs").get("x") == form.encode()


@contextmanager
def answering(status, body, **headers):
    """The address of a server that has one answer to everything, and how often it was asked."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_DELETE = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def remote(kind, message="It is so.\nat org.apache…"):
    return json.dumps({"RemoteException": {"exception": kind, "javaClassName": kind, "message": message}}).encode()


@HDFS
def test_another_namenode_is_asked_where_one_is_down_or_on_standby(hdfs, tmp_path):
    active = hdfs.namenode.removeprefix("http://")
    (down,) = free_ports(1)
    with answering(403, remote("StandbyException")) as (standby, seen):
        files = open_filesystem(f"webhdfs://127.0.0.1:{down},{standby},{active}/available")
        files.put("x", [b"1"], create=True)
        assert files.get("x") == b"1"
        assert len(seen) == 1, "the active one is asked from then on"
        settings = {
            "dfs.ha.namenodes.ns": "one, two",
            "dfs.namenode.http-address.ns.one": standby,
            "dfs.namenode.http-address.ns.two": active,
        }
        with configured(tmp_path, settings):
            for scheme in ("hdfs", "webhdfs"):
                assert open_filesystem(f"{scheme}://ns/available").get("x") == b"1"


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "says"),
    [
        (404, b"<html>Not found</html>", {}, SettingError, "no WebHDFS"),
        (302, b"", {"Location": "http://127.0.0.1:1/login"}, SettingError, "no WebHDFS"),
        (401, b"<html>", {"WWW-Authenticate": "Negotiate"}, SettingError, "Kerberos"),
        (403, remote("AccessControlException", "Permission denied: user=me"), {}, SettingError, "user=me"),
        (400, remote("IllegalArgumentException"), {}, SettingError, "Nothing can be kept"),
        (403, remote("StandbyException"), {}, TransientError, "It is so"),
        (403, remote("SafeModeException"), {}, TransientError, "It is so"),
        (403, remote("DSQuotaExceededException", "The quota is 3"), {}, TransientError, r"quota is 3.*Free some space"),
        (503, b"busy", {}, TransientError, "503"),
        (200, b'{"FileStatus": {"type"', {}, TransientError, "breaks off"),
    ],
)
def test_no_other_answer_is_taken_for_a_file_that_is_missing(status, body, headers, kind, says):
    """A checkpoint would be taken for a new one."""
    with answering(status, body, **headers) as (address, _):
        files = open_filesystem(f"webhdfs://{address}/state", **SHORT_RETRY)
        with pytest.raises(kind, match=says):
            files.exists("x")
        if status != 200:
            with pytest.raises(kind, match=says):
                files.list("x/")
            with pytest.raises(kind, match=says):
                files.put("x", [b"1"], create=True)


def test_a_namenode_that_takes_no_data_is_refused():
    with answering(200, b"{}") as (address, _), pytest.raises(SettingError, match="no WebHDFS"):
        open_filesystem(f"webhdfs://{address}/state", **SHORT_RETRY).put("x", [b"1"])


def test_nobody_there():
    (port,) = free_ports(1)
    files = open_filesystem(f"webhdfs://127.0.0.1:{port}/state", retry_config={"max_retries": 1})
    with pytest.raises(TransientError, match=rf"127\.0\.0\.1:{port}.*refused") as error:
        files.put("x", [b"1"], create=True)
    assert error.value.file == f"webhdfs://127.0.0.1:{port}/state/x"


class TestConfiguration:
    @pytest.fixture(autouse=True)
    def nothing_set(self, monkeypatch):
        monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)

    @pytest.mark.parametrize(
        ("url", "namenodes"),
        [
            ("webhdfs://host/a", ["http://host:9870"]),
            ("webhdfs://host:14000/a", ["http://host:14000"]),
            ("swebhdfs://host/a", ["https://host:9871"]),
            ("webhdfs://one:1,two:2/a", ["http://one:1", "http://two:2"]),
            ("webhdfs://[::1]:1/a", ["http://[::1]:1"]),
        ],
    )
    def test_without_any(self, url, namenodes):
        cluster = find_cluster(url)
        assert list(cluster.namenodes) == namenodes
        assert cluster.path == "/a"
        assert find_cluster(url.removesuffix("a")).path == ""

    @pytest.mark.parametrize("url", ["hdfs://namenode:8020/state", "hdfs:///state", "hdfs:/state"])
    def test_hdfs_urls_need_one(self, url):
        with pytest.raises(SettingError, match="webhdfs://HOST:PORT/PATH"):
            open_filesystem(url)

    @pytest.mark.parametrize(
        "url", ["webhdfs:/state", "webhdfs:///state", "webhdfs://ho st/state", "webhdfs://h:x/state"]
    )
    def test_urls_without_a_namenode_are_refused(self, url):
        with pytest.raises(SettingError, match="names no namenode"):
            open_filesystem(url)

    @pytest.mark.parametrize(
        ("url", "settings", "namenode"),
        [
            ("hdfs://a/x", {"dfs.namenode.rpc-address": "a:8020"}, "http://a:9870"),
            ("hdfs://a:9000/x", {"fs.defaultFS": "hdfs://a:9000/"}, "http://a:9870"),
            ("hdfs://a:9000/x", {"fs.defaultFS": "hdfs://a:9000", "dfs.namenode.http-address": "b:5"}, "http://b:5"),
            ("hdfs://a/x", {"fs.defaultFS": "hdfs://a", "dfs.namenode.http-address": "0.0.0.0:5"}, "http://a:5"),
            ("hdfs://a/x", {"fs.defaultFS": "hdfs://a", "dfs.http.policy": "HTTPS_ONLY"}, "https://a:9871"),
            ("hdfs://ns/x", {"dfs.namenode.http-address.ns": "a:5"}, "http://a:5"),
        ],
    )
    def test_hdfs_urls(self, url, settings, namenode, tmp_path):
        with configured(tmp_path, settings):
            assert find_cluster(url).namenodes == (namenode,)

    def test_another_clusters_configuration_says_nothing(self, tmp_path):
        settings = {"fs.defaultFS": "hdfs://a:8020", "dfs.namenode.http-address": "a:9870"}
        with configured(tmp_path, settings), pytest.raises(SettingError, match="is not known"):
            find_cluster("hdfs://b:8020/state")

    def test_a_nameservice_without_an_address_is_refused(self, tmp_path):
        with (
            configured(tmp_path, {"dfs.ha.namenodes.ns": "one"}),
            pytest.raises(SettingError, match="names no namenode"),
        ):
            find_cluster("hdfs://ns/state")

    def test_kerberos_is_refused_by_name(self, tmp_path):
        with (
            configured(tmp_path, {"hadoop.security.authentication": "kerberos"}),
            pytest.raises(SettingError, match="authenticates by Kerberos"),
        ):
            open_filesystem("webhdfs://namenode/state")

    def test_a_file_that_is_no_configuration(self, tmp_path, monkeypatch):
        (tmp_path / "core-site.xml").write_text("<configuration>")
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
        with pytest.raises(SettingError, match="cannot be read") as error:
            find_cluster("webhdfs://namenode/state")
        assert error.value.file == str(tmp_path / "core-site.xml")

    @pytest.mark.parametrize(
        ("text", "seconds"), [("", 30.0), ("1500", 1.5), ("200ms", 0.2), ("7s", 7.0), ("2m", 120.0)]
    )
    def test_timeouts(self, text, seconds, tmp_path):
        with configured(tmp_path, {"dfs.webhdfs.socket.read-timeout": text}):
            assert find_cluster("webhdfs://namenode/state").read_timeout == seconds

    def test_who_asks(self, monkeypatch):
        monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
        assert find_cluster("webhdfs://namenode/state").user == "somebody"
        monkeypatch.delenv("HADOOP_USER_NAME")
        monkeypatch.setattr(getpass, "getuser", lambda: "runner")
        assert find_cluster("webhdfs://namenode/state").user == "runner"

        def nobody():
            raise KeyError(f"getpwuid(): uid not found: {os.getuid()}")

        monkeypatch.setattr(getpass, "getuser", nobody)
        with pytest.raises(SettingError, match="HADOOP_USER_NAME"):
            find_cluster("webhdfs://namenode/state")


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "urllib3", None)
    monkeypatch.delitem(sys.modules, "millpond.files.backends.hdfs", raising=False)
    with pytest.raises(SettingError, match=r"pip install urllib3.*extra `hdfs`"):
        open_filesystem("webhdfs://namenode/state")


def test_it_is_no_disk():
    assert not any(map(on_disk, ("hdfs://a/b", "hdfs:/b", "webhdfs://a:1/b")))
