"""The backend for HDFS, over WebHDFS (HTTP): every namenode serves it, and slots need no JVM.

An object is written to a staging file and renamed into place, so readers never see a partial object. Put-if-absent is
a rename without overwriting, which the namenode does atomically. If the answer to a rename is lost, the staging file
shows the outcome: the file has either its old or its new name, never both.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from queue import Full, Queue
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import urllib3

from millpond.errors import MillpondError, SettingError, TransientError
from millpond.files.backends.byte_ranges import group_ranges
from millpond.files.backends.filesystem import (
    AlreadyExistsError,
    Buffer,
    FileInfo,
    MissingFileError,
    Write,
    exists_error,
    missing_error,
    truncated_error,
    views,
)
from millpond.files.backends.hadoop_conf import find_cluster, kerberos_error
from millpond.files.backends.local import STAGING
from millpond.files.backends.retry import with_retries
from millpond.files.backends.uploads import upload_in_parts

MAX_QUEUED_PARTS = 2
"""Parts of one object that are queued to be sent."""

_MAX_TRIES = 10
_RETRY_SECONDS = 120.0  # seconds after which a failure is not retried; a failover of namenodes takes less
_CONNECTIONS = 128  # connections kept to one host; as many as there are reader threads
_EXCLUDE_SECONDS = 60.0  # of a failed datanode; the namenode takes minutes to declare it dead
_NOT_ACTIVE = frozenset({"StandbyException", "ObserverRetryOnActiveException"})
"""Exceptions of a namenode that is not active."""

_PERMANENT = frozenset(
    {
        "IllegalArgumentException",
        "InvalidPathException",
        "ParentNotDirectoryException",
        "PathComponentTooLongException",
        "UnsupportedOperationException",
    }
)
"""Exceptions that are permanent: the location cannot hold the file."""

T = TypeVar("T")
Listing = list[FileInfo]
Listed = list[str]


class HdfsFiles:
    """Objects as files below a folder of HDFS, which is created on the first write. Thread-safe.

    Args:
        url: `webhdfs://host:port/path` (one namenode's web server, or several with commas), `swebhdfs:` with TLS, or
            `hdfs:` if the configuration in `HADOOP_CONF_DIR` has the HTTP address.
        retry_config: `max_retries` and `retry_timeout`, as obstore takes them; by default some two minutes.

    Raises:
        SettingError: the address of the namenode or the user is unknown.
    """

    def __init__(self, url: str, retry_config: dict[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        self._cluster = find_cluster(url)
        self._active = 0
        self._folders: set[str] = set()  # folders known to exist
        self._excluded_until: dict[str, float] = {}  # excluded datanodes, and until when
        config = retry_config or {}
        self._tries = config.get("max_retries", _MAX_TRIES - 1) + 1
        self._retry_seconds = config.get("retry_timeout", timedelta(seconds=_RETRY_SECONDS)).total_seconds()
        cluster = self._cluster
        timeout = urllib3.Timeout(connect=cluster.connect_timeout, read=cluster.read_timeout)
        self._http = urllib3.PoolManager(num_pools=64, maxsize=_CONNECTIONS, timeout=timeout, retries=False)

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`; with `sync`, datanodes have synced the blocks before it returns."""
        pieces = views(data)
        staging_files: list[str] = []
        try:
            staged = self._with_retries(lambda: self._stage(pieces, sync, staging_files, name))
            self._publish(staged, name, pieces if create else None)
            staging_files.remove(staged)
        finally:
            self._discard(staging_files)

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`; a large object goes to a staging file in one request, which cannot be repeated."""
        return upload_in_parts(lambda data: self.put(name, [data]), lambda: _Stream(self, name))

    def get(self, name: str) -> bytes:
        """See `FileSystem.get`."""
        return self._with_retries(lambda: self._try("GET", "OPEN", name))

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`."""
        pieces: list[Buffer] = [b""] * len(ranges)
        for group in group_ranges(ranges):
            begin, end = ranges[group[0]][0], max(sum(ranges[i]) for i in group)
            if begin == end:
                continue
            whole = memoryview(self._open(name, begin, end - begin))
            for i in group:
                offset, length = ranges[i]
                if len(whole) < offset + length - begin:
                    raise truncated_error(self.locate(name), offset + length)
                pieces[i] = whole[offset - begin : offset - begin + length]
        return pieces

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        status = self._with_retries(lambda: self._status(name))
        if status is None:
            raise missing_error(self.locate(name))
        return int(status["length"])

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        return self._with_retries(lambda: self._status(name)) is not None

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`."""
        infos: Listing = []
        folder, _, name_prefix = prefix.rpartition("/")
        self._walk(folder, name_prefix, after, infos)
        return sorted(infos)

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        self._with_retries(lambda: self._try("DELETE", "DELETE", name, recursive="false"))

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`."""
        return f"{self.url}/{name}"

    def _stage(self, pieces: Iterable[Buffer], sync: bool, staging_files: Listed, name: str) -> str:
        """Write a staging file. Each try has a new name, because an earlier try may still be in flight."""
        staged = f"{STAGING}/{uuid.uuid4().hex}"
        staging_files.append(staged)
        flags = "CREATE,SYNC_BLOCK" if sync else "CREATE"
        self._try("PUT", "CREATE", staged, pieces, label=name, overwrite="false", createparent="true", createflag=flags)
        return staged

    def _publish(self, staged: str, name: str, created: Sequence[memoryview] | None) -> None:
        """Rename a staging file to its name.

        Args:
            staged: the staging file.
            name: name of the object.
            created: contents of the object for put-if-absent; None to overwrite.
        """
        moved = self._move(staged, name, "OVERWRITE" if created is None else "NONE")
        if moved or created is None:
            return
        # An earlier try has renamed the file, unless another process has emptied the staging folder.
        with suppress(MissingFileError):
            if self.get(name) == b"".join(created):
                return
        raise TransientError(
            "PUT outcome unknown: its staging file is missing.",
            action="Try again.",
            file=self.locate(name),
        )

    def _move(self, src: str, dst: str, option: str) -> bool:
        """Rename a file; return False if an earlier try whose answer was lost has renamed it.

        After such a try, the source is missing. Without one, a missing source is an error.
        """
        maybe_moved = False

        def move() -> bool:
            nonlocal maybe_moved
            self._make_folder(dst.rpartition("/")[0])
            target = self._path(dst)
            try:
                self._try("PUT", "RENAME", src, label=dst, destination=target, renameoptions=option)
            except TransientError:
                maybe_moved = True
                raise
            except (AlreadyExistsError, MissingFileError) as error:
                if self._status(src) is None:
                    if maybe_moved:
                        return False
                    raise
                if isinstance(error, AlreadyExistsError):
                    raise
                self._folders.clear()
                raise TransientError("A folder is gone.", action="Try again.", file=self.locate(dst)) from error
            return True

        return self._with_retries(move)

    def _make_folder(self, folder: str) -> None:
        if folder in self._folders:
            return
        try:
            self._try("PUT", "MKDIRS", folder)
        except AlreadyExistsError as error:
            raise self._permanent_error(folder, "a file has the name of a folder") from error
        self._folders.add(folder)

    def _discard(self, names: Iterable[str]) -> None:
        """Delete unneeded staging files. Best effort: garbage collection removes leftovers."""
        with suppress(MillpondError):
            for name in names:
                self._try("DELETE", "DELETE", name)

    def _open(self, name: str, offset: int, length: int) -> bytes:
        return self._with_retries(lambda: self._try("GET", "OPEN", name, offset=offset, length=length))

    def _status(self, name: str) -> dict[str, Any] | None:
        """Return the namenode's status of a file; None if it does not exist or is a folder."""
        try:
            status = self._get_json("GETFILESTATUS", name)["FileStatus"]
        except MissingFileError:
            return None
        return status if status["type"] == "FILE" else None

    def _walk(self, folder: str, prefix: str, after: str, infos: Listing) -> None:
        try:
            answer = self._with_retries(lambda: self._get_json("LISTSTATUS", folder))
        except MissingFileError:
            return
        for status in answer["FileStatuses"]["FileStatus"]:
            entry = status["pathSuffix"]
            if not entry or not entry.startswith(prefix):  # listing a file gives the file itself, with an empty suffix
                continue
            name = f"{folder}/{entry}" if folder else entry
            if status["type"] == "DIRECTORY":
                if name + "/" < after and not after.startswith(name + "/"):
                    continue  # all names in the folder sort before `after`
                self._walk(name, "", after, infos)
            elif name > after:
                infos.append(FileInfo(name, status["length"], status["modificationTime"] / 1e3))

    def _with_retries(self, action: Callable[[], T]) -> T:
        return with_retries(action, tries=self._tries, within=self._retry_seconds)

    def _path(self, name: str) -> str:
        return f"{self._cluster.path}/{name}".rstrip("/") or "/"

    def _get_json(self, operation: str, name: str) -> dict[str, Any]:
        answer = self._try("GET", operation, name)
        try:
            document: dict[str, Any] = json.loads(answer)
        except ValueError as error:  # the answer was cut off
            raise self._transient_error(name, "its answer breaks off") from error
        return document

    def _try(
        self,
        method: str,
        operation: str,
        name: str,
        data: Iterable[Buffer] | None = None,
        label: str | None = None,
        **parameters: Any,
    ) -> bytes:
        """Try an operation once: a request to a namenode, and one to a datanode if the namenode redirects.

        Args:
            method: HTTP method.
            operation: WebHDFS operation.
            name: name of the object or folder.
            data: the bytes that the datanode writes.
            label: name for messages; None for `name`.
            parameters: query parameters of the operation.

        Returns:
            The body of the answer.
        """
        label = name if label is None else label
        number = self._active
        excluded = self._excluded_addresses() if operation in ("CREATE", "OPEN") else ""
        if excluded:
            parameters["excludedatanodes"] = excluded
        query = urlencode({"op": operation, "user.name": self._cluster.user, **parameters})
        url = f"{self._cluster.namenodes[number]}/webhdfs/v1{quote(self._path(name))}?{query}"
        try:
            answer = self._send(method, url, label)
        except TransientError:
            self._switch_namenode(number)
            raise
        if answer.status == 307 and "location" in answer.headers:
            answer = self._send_to_datanode(method, answer.headers["location"], label, data)
        elif excluded and answer.status >= 300:
            self._excluded_until.clear()  # perhaps no other datanode has the block or has room
            del parameters["excludedatanodes"]
            return self._try(method, operation, name, data, label, **parameters)
        elif data is not None and answer.status < 300:
            raise self._no_webhdfs(answer)
        if answer.status < 300:
            return answer.data
        kind, message = _remote_exception(answer)
        if kind in _NOT_ACTIVE:
            self._switch_namenode(number)
        raise self._failure(answer, kind, message, label)

    def _send_to_datanode(
        self, method: str, url: str, name: str, data: Iterable[Buffer] | None
    ) -> urllib3.BaseHTTPResponse:
        """Send a request to a datanode; if it fails, exclude the datanode for `_EXCLUDE_SECONDS` seconds."""
        try:
            return self._send(method, url, name, data)
        except TransientError:
            with suppress(OSError, ValueError):  # namenodes redirect to host names, but exclude by address
                address = socket.gethostbyname(urllib3.util.parse_url(url).host or "")
                self._excluded_until[address] = time.monotonic() + _EXCLUDE_SECONDS
            raise

    def _excluded_addresses(self) -> str:
        now = time.monotonic()
        return ",".join(sorted(address for address, until in self._excluded_until.copy().items() if until > now))

    def _switch_namenode(self, number: int) -> None:
        """Switch to the next namenode, unless another thread has switched already."""
        if self._active == number:
            self._active = (number + 1) % len(self._cluster.namenodes)

    def _send(self, method: str, url: str, name: str, data: Iterable[Buffer] | None = None) -> urllib3.BaseHTTPResponse:
        headers = {}
        if isinstance(data, Sequence):  # an iterator is sent with chunked encoding
            headers["Content-Length"] = str(sum(memoryview(piece).nbytes for piece in data))
        body: Any = data  # urllib3 sends the pieces one after another, without joining them
        try:
            return self._http.request(method, url, body=body, headers=headers, redirect=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            why = str(error.args[-1] if error.args else error)  # the reason follows urllib3's name of the connection
            raise self._transient_error(name, f"{_host(url)}: {why.partition('): ')[2] or why}") from error

    def _failure(self, answer: urllib3.BaseHTTPResponse, kind: str, message: str, name: str) -> MillpondError:
        """Return the error for an unsuccessful answer; `kind` is the class of Java's exception."""
        url = self.locate(name)
        if kind == "FileNotFoundException":
            return missing_error(url)
        if kind == "FileAlreadyExistsException":
            return exists_error(url)
        if answer.status == 401 and answer.headers.get("www-authenticate", "").startswith("Negotiate"):
            return kerberos_error(self.url)
        if kind.endswith(("AccessControlException", "AuthorizationException", "SecurityException")):
            return SettingError(
                f"HDFS refuses access: {message}.",
                action="Check the rights of the user that HADOOP_USER_NAME names, or who runs Spark.",
                file=url,
            )
        if kind in _PERMANENT:
            return self._permanent_error(name, message)
        if "out of the range" in message:
            return truncated_error(url)
        if kind.endswith("QuotaExceededException"):
            return self._transient_error(name, message, "Free some space, or have the quota raised.")
        if not kind and answer.status < 500 and answer.status != 429:
            return self._no_webhdfs(answer)
        return self._transient_error(name, message or f"it answers {answer.status}")

    def _transient_error(self, name: str, why: str, action: str = "") -> TransientError:
        action = action or "Try again; if it goes on, check the location and whether its namenode and datanodes run."
        return TransientError(f"HDFS failed: {why}.", action=action, file=self.locate(name))

    def _permanent_error(self, name: str, why: str) -> SettingError:
        return SettingError(
            f"Nothing can be kept here: {why}.",
            action=f"See that {self.url} is, or can become, a folder on HDFS.",
            file=self.locate(name),
        )

    def _no_webhdfs(self, answer: urllib3.BaseHTTPResponse) -> SettingError:
        # This must not look like a missing file, or an existing checkpoint would be taken for a new one.
        return SettingError(
            f"What answers here is no WebHDFS ({answer.status}).",
            action="The port has to be that of the namenode's web pages, mostly 9870, and dfs.webhdfs.enabled not off.",
            file=self.url,
        )


class _Stream:
    """An upload to a staging file: a thread sends one streaming request (see `uploads.Parts`)."""

    def __init__(self, files: HdfsFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._staging_files: Listed = []
        self._waiting: Queue[bytes | None] = Queue(MAX_QUEUED_PARTS)
        self._aborted = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="millpond-upload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._files._stage(self._pieces(), True, self._staging_files, self._name)
        except BaseException as error:
            self._failure = error

    def _pieces(self) -> Iterator[bytes]:
        while (piece := self._waiting.get()) is not None:
            yield piece
        if self._aborted:
            raise OSError("given up")  # breaks the connection, so the staging file does not count as complete

    def send(self, data: bytes) -> None:
        """See `Parts.send`."""
        self._put(data)
        if self._failure is not None:
            raise self._failure

    def _put(self, data: bytes | None) -> None:
        while self._thread.is_alive():
            with suppress(Full):
                self._waiting.put(data, timeout=0.1)
                return

    def complete(self) -> None:
        """See `Parts.complete`."""
        self._put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._files._publish(self._staging_files[-1], self._name, None)

    def abort(self) -> None:
        """See `Parts.abort`."""
        self._aborted = True
        self._put(None)
        self._thread.join()
        self._files._discard(self._staging_files)


def _remote_exception(answer: urllib3.BaseHTTPResponse) -> tuple[str, str]:
    """Return the class of Java's exception in an answer and the first line of its message; empty if there is none."""
    try:
        exception = json.loads(answer.data)["RemoteException"]
        return str(exception["exception"]), str(exception["message"]).partition("\n")[0].rstrip(".")
    except (ValueError, KeyError, TypeError):
        return "", ""


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]
