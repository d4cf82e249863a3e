"""Opening of locations: the backend is chosen by the scheme of the URL."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from millpond.errors import SettingError
from millpond.files.backends.filesystem import FileSystem

_HADOOP = ("viewfs", "ofs", "o3fs")


def open_filesystem(url: str, **options: Any) -> FileSystem:
    """Open the location `url`.

    Args:
        url: a plain path or `file:` URL; `memory:name` (shared within the process); `s3://`, `gs://`, `az://` and other
            schemes of obstore, with a path that is taken literally; `webhdfs://`, `swebhdfs://`, `hdfs://` (see
            `backends/hdfs.py`); or `faults+<any of these>?latency_ms=…` (see `locations/faults.py`).
        options: passed to obstore's `from_url` for remote stores (`config`, `client_options`, `retry_config`). HDFS
            takes only `retry_config`.

    Raises:
        SettingError: the scheme is unknown or the URL malformed.
    """
    # Imported here so that a Spark worker that opens no location does not load the client of object stores.
    from millpond.files.backends.hadoop_conf import SCHEMES
    from millpond.files.backends.local import LocalFiles
    from millpond.files.backends.objects import ObjectFiles, memory_files

    if url.startswith("faults+"):
        from millpond.files.locations.faults import FaultyFiles, parse_faults

        location, faults = parse_faults(url)
        return FaultyFiles(open_filesystem(location, **options), faults)
    scheme, _, rest = url.partition(":")
    if on_disk(url):
        return LocalFiles(_local_path(url, rest) if scheme == "file" else url)
    if scheme == "memory":
        return memory_files(rest.strip("/"))
    if scheme in _HADOOP:
        raise SettingError(
            f"{url!r} lies in a file system that only Hadoop reads, and Millpond keeps state without it.",
            action="Give a checkpointLocation on file: (also of a mount that all hosts share), s3:, gs:, az: or hdfs:.",
        )
    if scheme in SCHEMES:
        return _hdfs(url, options.get("retry_config"))
    return ObjectFiles.from_url(url, **options)


def _hdfs(url: str, retry_config: dict[str, Any] | None) -> FileSystem:
    try:
        from millpond.files.backends.hdfs import HdfsFiles
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{url!r} lies on HDFS, and Millpond needs the package urllib3 for that.",
            action="Install it on every host: pip install urllib3 (or Millpond with its extra `hdfs`).",
        ) from error
    return HdfsFiles(url, retry_config)


def on_disk(url: str) -> bool:
    """Return whether a location is on a local or mounted disk; else each request may be charged for."""
    scheme, colon, _ = url.partition(":")
    return not url.startswith("faults+") and (not colon or "/" in scheme or scheme == "file")


def join_url(url: str, name: str) -> str:
    """Return the URL of `name` below `url`, for all schemes (the query of a `faults+` URL stays at the end)."""
    path, mark, query = url.partition("?") if url.startswith("faults+") else (url, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def same_place(url: str, other: str) -> bool:
    """Return whether two URLs mean the same location.

    `s3`, `s3a` and `s3n` are one scheme, symlinks are followed, and HDFS locations are equal if namenodes and path are.
    """
    return _place(url) == _place(other)


def _place(url: str) -> str:
    from millpond.files.backends.hadoop_conf import SCHEMES, find_cluster

    scheme, colon, rest = url.partition(":")
    if on_disk(url):
        return f"file:{os.path.realpath(_local_path(url, rest) if scheme == 'file' else url)}"
    if scheme == "memory":
        return f"memory:{rest.strip('/')}"
    if scheme in SCHEMES:
        with suppress(SettingError):  # not configured here: the URL's text is all there is to compare
            cluster = find_cluster(url)
            return f"{','.join(sorted(cluster.namenodes)).lower()}{cluster.path}"
    return ("s3" if scheme in ("s3a", "s3n") else scheme) + colon + rest.rstrip("/")


def _local_path(url: str, rest: str) -> str:
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise SettingError(f"{url!r} names another host.", action="Write file:///path or a plain path.")
        return slash + path
    return rest
