"""Locks of folders, and the removal of a folder whose lock is held."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from millpond.files.folder_lock import REMOVED, is_lock_of, lock_folder, remove_locked


def test_a_lock_is_held_until_it_is_closed(tmp_path: Path) -> None:
    first = lock_folder(tmp_path, wait=False)
    assert first is not None
    assert lock_folder(tmp_path, wait=False) is None
    os.close(first)
    second = lock_folder(tmp_path, wait=True)
    assert second is not None
    assert is_lock_of(second, tmp_path)
    os.close(second)


@pytest.mark.parametrize("created_again", [False, True])
@pytest.mark.parametrize("create", [False, True])
def test_a_folder_removed_between_open_and_flock_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: bool, created_again: bool
) -> None:
    folder, flock = tmp_path / "folder", fcntl.flock
    folder.mkdir()
    (folder / "lock").touch()

    def flock_late(lock: int, how: int) -> None:
        shutil.rmtree(folder)
        if created_again:
            folder.mkdir()
            (folder / "lock").touch()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with pytest.raises(FileNotFoundError, match="the folder was removed"):
        lock_folder(folder, wait=True, create=create)


def test_a_lock_file_is_created_only_on_request(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path, wait=False, create=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        lock_folder(tmp_path / "none", wait=False)


def test_a_removed_folder_can_be_created_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lock = lock_folder(folder, wait=False)
    assert lock is not None
    (folder / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # as if the process died before it
        remove_locked(folder, tmp_path)
    assert not is_lock_of(lock, folder)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(REMOVED)
    folder.mkdir()
    new = lock_folder(folder, wait=False)
    assert new is not None
    remove_locked(folder, tmp_path)
    assert list(tmp_path.iterdir()) == [left]
    for held in (lock, new):
        os.close(held)
