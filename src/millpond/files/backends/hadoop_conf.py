"""Hadoop's configuration of an HDFS: HTTP addresses of its namenodes, the user, and time-outs.

`core-site.xml` and `hdfs-site.xml` are read from the folder that `HADOOP_CONF_DIR` names, as by Hadoop's clients. A
`webhdfs:` URL does not need these files.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from millpond.errors import SettingError

SCHEMES = ("hdfs", "webhdfs", "swebhdfs")

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d+))?", re.ASCII)
_RPC_PORT, _HTTP_PORT, _HTTPS_PORT = "8020", "9870", "9871"
_DURATION = re.compile(r"(\d+)(ms|s|m|)")
_UNITS = {"": 0.001, "ms": 0.001, "s": 1.0, "m": 60.0}


@dataclass(frozen=True)
class Cluster:
    """The addresses and client settings of an HDFS.

    Attributes:
        namenodes: URLs of the namenodes' HTTP servers; one namenode is active.
        path: path of the location, absolute, without a trailing slash.
        user: user in whose name requests are made.
        connect_timeout, read_timeout: seconds.
    """

    namenodes: tuple[str, ...]
    path: str
    user: str
    connect_timeout: float
    read_timeout: float


def find_cluster(url: str) -> Cluster:
    """Resolve an `hdfs:`, `webhdfs:` or `swebhdfs:` URL to a cluster and a path.

    Raises:
        SettingError: the HTTP addresses of the namenodes are unknown, or the cluster requires Kerberos.
    """
    conf = _configuration()
    scheme, _, rest = url.partition(":")
    authority, _, path = rest.removeprefix("//").partition("/") if rest.startswith("//") else ("", "", rest)
    if not authority and scheme == "hdfs":
        authority = conf.get("fs.defaultFS", "").removeprefix("hdfs://").rstrip("/")
    if conf.get("hadoop.security.authentication", "simple") == "kerberos":
        raise kerberos_error(url)
    secure = scheme == "swebhdfs" or (scheme == "hdfs" and conf.get("dfs.http.policy") == "HTTPS_ONLY")
    addresses = _addresses(url, scheme, authority, "https" if secure else "http", conf)
    return Cluster(
        tuple(f"{'https' if secure else 'http'}://{address}" for address in addresses),
        "".join(f"/{part}" for part in path.split("/") if part),  # HDFS refuses empty parts
        _user(),
        _seconds(conf, "dfs.webhdfs.socket.connect-timeout", 5.0),
        _seconds(conf, "dfs.webhdfs.socket.read-timeout", 30.0),
    )


def kerberos_error(url: str) -> SettingError:
    """Return the error for a cluster that requires Kerberos authentication."""
    return SettingError(
        "This HDFS authenticates by Kerberos, which Millpond does not support.",
        action="Give a checkpointLocation on file: (also of a mount that all hosts share), s3:, gs: or az:, or an HDFS "
        "with simple authentication.",
        file=url,
    )


def _configuration() -> dict[str, str]:
    folder = os.environ.get("HADOOP_CONF_DIR")
    properties: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml") if folder else ():
        path = Path(folder or "", name)
        try:
            root = ElementTree.parse(path).getroot()
        except FileNotFoundError:
            continue
        except (OSError, ElementTree.ParseError) as error:
            raise SettingError(
                f"Hadoop's configuration cannot be read: {error}.",
                action="HADOOP_CONF_DIR has to name the folder of core-site.xml and hdfs-site.xml.",
                file=str(path),
            ) from error
        for entry in root.iter("property"):
            properties[(entry.findtext("name") or "").strip()] = (entry.findtext("value") or "").strip()
    return properties


def _addresses(url: str, scheme: str, authority: str, protocol: str, conf: Mapping[str, str]) -> list[str]:
    """Return host and port of each namenode's HTTP server."""
    key = f"dfs.namenode.{protocol}-address"
    default = _HTTPS_PORT if protocol == "https" else _HTTP_PORT
    names = _split(conf.get(f"dfs.ha.namenodes.{authority}", ""))
    if names:
        configured = [conf.get(f"{key}.{authority}.{name}", "") for name in names]
    elif scheme != "hdfs":
        configured = _split(authority)
    elif f"{key}.{authority}" in conf:
        configured = [conf[f"{key}.{authority}"]]
    elif conf and _rpc_address(authority) in _own_addresses(conf):
        configured = [conf.get(key, f"0.0.0.0:{default}")]
    else:
        raise SettingError(
            f"Millpond asks HDFS over HTTP, and where the namenode of {url!r} answers that is not known.",
            action="Have HADOOP_CONF_DIR name the folder of its hdfs-site.xml, on the driver and on every executor. A "
            "location webhdfs://HOST:PORT/PATH does without (the port of the namenode's web pages, mostly 9870).",
        )
    addresses = []
    for address in configured:
        match = _HOST.fullmatch(address)
        if match is None:
            raise SettingError(
                f"The location {url!r} names no namenode: {address!r} is no host with a port.",
                action="Write webhdfs://HOST:PORT/PATH, several hosts with commas between them.",
            )
        host, port = match[1], match[2] or default
        if host in ("0.0.0.0", "[::]"):
            host = authority.rpartition(":")[0] or authority
        addresses.append(f"{host}:{port}")
    if not addresses:
        raise SettingError(f"The state location {url!r} names no namenode.", action="Write webhdfs://HOST:PORT/PATH.")
    return addresses


def _own_addresses(conf: Mapping[str, str]) -> set[str]:
    """Return the RPC addresses of the configuration's own namenode, as `hdfs:` URLs name it."""
    names = (conf.get("fs.defaultFS", "").removeprefix("hdfs://").rstrip("/"), conf.get("dfs.namenode.rpc-address", ""))
    return {_rpc_address(name) for name in names if name}


def _rpc_address(authority: str) -> str:
    return authority if ":" in authority else f"{authority}:{_RPC_PORT}"


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _user() -> str:
    name = os.environ.get("HADOOP_USER_NAME")
    if name:
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise SettingError(
            "The user for HDFS is unknown: this process's user has no name.", action="Set HADOOP_USER_NAME."
        ) from error


def _seconds(conf: Mapping[str, str], key: str, default: float) -> float:
    match = _DURATION.fullmatch(conf.get(key, ""))
    return int(match[1]) * _UNITS[match[2]] if match else default
