"""Detection of copies: whether two locations hold the same data, and are not two names of one location."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from millpond.errors import SettingError, TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.retry import SHORT_RETRY, with_retries
from millpond.files.locations.opening import open_filesystem


def is_copy(files: FileSystem, folder: str, other: str, same: Callable[[FileSystem], bool], *, advice: str) -> bool:
    """Return whether the data exists twice, here and at another location.

    A probe object written here shows whether the other location is this one under another name.

    Args:
        files: this location.
        folder: the folder of this location for the probe object, which exists for a moment.
        other: URL of the other location.
        same: whether the files at the other location are the same data as here.
        advice: the user's next step if the other location no longer exists.

    Raises:
        TransientError: the other location does not answer, so that the result is not known.
        StateDamagedError: the data at the other location is altered.
    """
    probe = f"{folder}probe-{uuid.uuid4().hex}"
    try:
        target = open_filesystem(other, retry_config=SHORT_RETRY)
        if not with_retries(lambda: same(target)):
            return False
        files.put(probe, [b""])
        try:
            return not with_retries(lambda: target.exists(probe))
        finally:
            files.delete(probe)
    except SettingError:
        return False  # a location that cannot be opened from here cannot be used from here
    except TransientError as error:
        raise TransientError(
            f"Whether {files.url} is a copy of what lies at {other} is not known: {error.message}",
            action=f"Start the query again. {advice}",
            file=error.file,
        ) from error
