"""Whether what lies at one place lies at another, too: as a copy, and not as itself under another name."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from millpond.errors import SettingError, TransientError
from millpond.files.backends.filesystem import FileSystem, open_filesystem
from millpond.files.backends.patience import SOON, patiently


def is_copy(files: FileSystem, folder: str, other: str, same: Callable[[FileSystem], bool], *, gone: str) -> bool:
    """Whether there are two, here and at another place.

    Args:
        files: here. folder: of it, in which an object is put for a moment. other: URL of the other place.
        same: whether what lies at that is what lies here.
        gone: what the user can do if the other place is gone for good.

    Raises:
        TransientError: the other place does not answer, so whether somebody is there is not known.
        StateDamagedError: what lies there is altered.
    """
    probe = f"{folder}probe-{uuid.uuid4().hex}"
    try:
        there = open_filesystem(other, retry_config=SOON)
        if not patiently(lambda: same(there)):
            return False
        files.put(probe, [b""])
        try:
            return not patiently(lambda: there.exists(probe))
        finally:
            files.delete(probe)
    except SettingError:
        return False  # what cannot be reached from here, nobody goes on with from here
    except TransientError as error:
        raise TransientError(
            f"Whether {files.url} is a copy of what lies at {other} is not known: {error.message}",
            action=f"Start the query again. {gone}",
            file=error.file,
        ) from error
