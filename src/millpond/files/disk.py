"""Error texts for failures of a local disk: the system's reason, and the remedy."""

from __future__ import annotations

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT)
NO_FILES = (errno.EMFILE, errno.ENFILE)
REFUSED = (errno.EACCES, errno.EPERM)
PERMANENT = (errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
"""Permanent failures: no file can be written under such a name."""


def remedy(error: OSError, place: str, or_else: str = "") -> str:
    """Return the remedy for an error of a local disk.

    Args:
        error: the system's error.
        place: the folder that was used.
        or_else: how to choose another folder, as the clause after "or"; empty if the folder cannot be chosen.

    Returns:
        One sentence, for the `action` of an error.
    """
    if error.errno in FULL:
        what = f"Free some space on the disk of {place}"
    elif error.errno in NO_FILES:
        return "Raise the limit of open files (ulimit -n) for Spark's processes."
    elif error.errno in REFUSED:
        what = f"Give user {os.getuid()} the right to read and write below {place}"
    elif error.errno in PERMANENT:
        what = f"Make {place} a folder that can be written, on a disk that is not read-only"
    else:
        what = f"See whether the disk of {place} works, and try again"
    return f"{what}{', or ' if or_else else ''}{or_else}."


def reason(error: OSError) -> str:
    """Return the system's reason for an error of a local disk."""
    return error.strerror or str(error)
