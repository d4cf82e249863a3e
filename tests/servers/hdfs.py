"""A real HDFS: one namenode and one datanode, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.servers.jars import Artifact, jars
from tests.servers.process import die_with_parent, free_ports, wait_until_up
from tests.servers.proxy import Proxy, faulty

HADOOP = Artifact(
    "org.apache.hadoop",
    "hadoop-client-minicluster",
    "3.5.0",
    "4f725681b8989c2a7d12175a9393b13225ed03009d9ffc8d9cf8d9713d347ba9",
)
"""The jar contains the servers as well."""

_SERVERS = "org.apache.hadoop.hdfs.server"


class Hdfs(NamedTuple):
    """A running HDFS.

    Attributes:
        namenode, datanode: URLs of their web servers.
        conf: folder of its configuration, for `HADOOP_CONF_DIR`.
        rpc: the namenode's address in `hdfs:` URLs.
    """

    namenode: str
    datanode: str
    conf: Path
    rpc: str

    @property
    def url(self) -> str:
        """URL of the root folder, over WebHDFS."""
        return webhdfs(self.namenode)


def webhdfs(endpoint: str) -> str:
    """Return the WebHDFS URL of the root folder, by the URL of a namenode's web server or of a proxy for it."""
    return endpoint.replace("http:", "webhdfs:")


_STARTS = 3
"""Attempts to start, each on other ports: another process may take a free port before a server does."""


@contextmanager
def running(folder: Path) -> Iterator[Hdfs]:
    """Run an empty HDFS; kill it at the end.

    Args:
        folder: an empty folder for its data and its logs.

    Raises:
        Unavailable: its jars cannot be downloaded.
        TimeoutError: it does not come up.
    """
    with ExitStack() as stack:
        for number in range(_STARTS):
            start = folder / str(number)
            start.mkdir()
            try:
                hdfs = stack.enter_context(_started(start))
                break
            except TimeoutError:
                if number == _STARTS - 1:
                    raise
        yield hdfs


@contextmanager
def _started(folder: Path) -> Iterator[Hdfs]:
    classes = os.pathsep.join([str(folder / "conf"), *map(str, jars(HADOOP))])
    rpc, namenode, datanode, transfer, ipc = (f"127.0.0.1:{port}" for port in free_ports(5))
    (folder / "conf").mkdir()
    _write(folder / "conf" / "core-site.xml", {"fs.defaultFS": f"hdfs://{rpc}", "hadoop.tmp.dir": f"{folder}/tmp"})
    settings = {
        "dfs.replication": "1",
        "dfs.namenode.name.dir": f"{folder}/name",
        "dfs.namenode.http-address": namenode,
        "dfs.datanode.data.dir": f"{folder}/data",
        "dfs.datanode.http.address": datanode,
        "dfs.datanode.address": transfer,
        "dfs.datanode.ipc.address": ipc,
        "dfs.datanode.hostname": "127.0.0.1",
    }
    _write(folder / "conf" / "hdfs-site.xml", settings)
    java = ["java", "-Xmx192m", "-cp", classes]
    log = folder / "log.txt"
    servers = []
    with log.open("wb") as out:
        formatted = [*java, f"{_SERVERS}.namenode.NameNode", "-format", "-force"]
        subprocess.run(formatted, cwd=folder, stdout=out, stderr=out, check=True, timeout=60)
        for server in ("namenode.NameNode", "datanode.DataNode"):
            command = [*java, f"{_SERVERS}.{server}"]
            servers.append(subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, preexec_fn=die_with_parent))
    try:
        wait_until_up("HDFS", lambda: _is_up(f"http://{namenode}"), servers, log, timeout=90.0)
        yield Hdfs(f"http://{namenode}", f"http://{datanode}", folder / "conf", rpc)
    finally:
        for process in servers:
            process.kill()
        for process in servers:
            process.wait()


@contextmanager
def behind_proxies(hdfs: Hdfs, seed: int, shares: Mapping[str, float]) -> Iterator[tuple[Proxy, Proxy]]:
    """Run faulty proxies for the namenode and the datanode; the namenode's redirects name the datanode's proxy."""
    with (
        faulty(hdfs.datanode, seed, shares) as datanode,
        faulty(hdfs.namenode, seed, shares, {hdfs.datanode: datanode.endpoint}) as namenode,
    ):
        yield namenode, datanode


@contextmanager
def configured(folder: Path, settings: Mapping[str, str]) -> Iterator[None]:
    """Set `HADOOP_CONF_DIR` to a folder with these settings in its hdfs-site.xml."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "hdfs-site.xml", settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HADOOP_CONF_DIR", str(folder))
        yield


def _write(path: Path, settings: Mapping[str, str]) -> None:
    entries = (f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items())
    path.write_text("<configuration>\n" + "\n".join(entries) + "\n</configuration>\n")


def _is_up(namenode: str) -> bool:
    """Return whether the namenode has left its safe mode and knows a datanode."""
    query = f"{namenode}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
    with urllib.request.urlopen(query, timeout=5) as answer, suppress(ValueError, LookupError):
        (state,) = json.load(answer)["beans"]
        return bool(state["NumLiveDataNodes"] == 1 and state["FSState"] == "Operational")
    return False
