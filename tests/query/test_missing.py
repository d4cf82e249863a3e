"""Messages of a start on a checkpoint with missing files, by plain files."""

from __future__ import annotations

import json

import pytest

from millpond.checkpoint.state_schema import QUERY_FILE, OperatorSchema, StateSchema
from millpond.errors import MillpondError, StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.query.checkpoints.ownership import Ownership
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.schema.missing_state import missing_state_error
from tests.checkpoint.rig import memory

QUERY = StateSchema(1 << 15, (OperatorSchema("aggregate by k", {}, {}), OperatorSchema("deduplicate by s", {}, {})))
BOTH = "'aggregate by k', 'deduplicate by s'"


def ledger_of(files: FileSystem, planned: int = 3, committed: int = 3) -> QueryLogs:
    for log, batches in (("offsets", planned), ("commits", committed)):
        for batch in range(batches):
            files.put(f"{log}/{batch}", [b"v1\n{}"])
    return QueryLogs(files)


def error(files: FileSystem, state: FileSystem | None = None, left: int | None = 0) -> MillpondError:
    state = state or open_filesystem(join_url(files.url, "millpond"))
    return missing_state_error(state, ledger_of(files), files, QUERY, left)


def test_state_that_is_gone() -> None:
    files = memory()
    files.put("state/0/_metadata/metadata", [b"v1"])  # what Spark notes of its watching operator is no state
    found = error(files)
    assert isinstance(found, StateDamagedError)
    assert found.message == (
        f"Spark has committed 3 batches ({files.url}), and the state of {BOTH} that they made is gone: there is "
        f"nothing at {files.url}/millpond."
    )
    assert "Put that folder back as it was after batch 2" in found.action
    assert (found.version, found.file) == (3, f"{files.url}/millpond")


@pytest.mark.parametrize(("left", "own"), [(0, True), (1, False), (None, True)])
def test_state_of_sparks_own(left: int | None, own: bool) -> None:
    """Where one operator stays on Spark, its state says nothing of the others."""
    files = memory()
    files.put("state/0/0/left-keyToNumValues/1.delta", [b"x"])
    found = error(files, left=left)
    assert isinstance(found, StateIncompatibleError if own else StateDamagedError)
    assert ("Spark's own state store" in found.message) == own


@pytest.mark.parametrize("name", ["commits/000000000001-000000000000001-a.0", "generations/000000000000001.base.json"])
def test_a_missing_query_file_is_named(name: str) -> None:
    files = memory()
    files.put(f"millpond/{name}", [b"x"])
    found = error(files)
    assert isinstance(found, StateDamagedError)
    assert f"the file {QUERY_FILE}, which says what the state of {BOTH} looks like, is gone" in found.message
    assert found.file == f"{files.url}/millpond/{QUERY_FILE}"


def test_state_elsewhere() -> None:
    files, there, here = memory(), memory(), memory()
    Ownership(files.url, files, there.url, open_filesystem(join_url(there.url, "millpond"))).note(1)
    elsewhere = open_filesystem(join_url(there.url, "millpond"))
    for state in (elsewhere, here, None):
        found = error(files, state)
        assert isinstance(found, StateDamagedError)
        assert f"is gone: there is nothing at {there.url}/millpond" in found.message
        assert "spark.millpond.state.location to the folder above it" in found.action
    elsewhere.put(QUERY_FILE, [b"{}"])
    for state in (here, None):
        found = error(files, state)
        assert isinstance(found, StateIncompatibleError)
        assert f"the last run had it at {there.url}" in found.message


def test_state_in_the_checkpoint_and_a_setting_that_names_another_place() -> None:
    files = memory()
    files.put(f"millpond/{QUERY_FILE}", [b"{}"])
    found = error(files, memory())
    assert isinstance(found, StateIncompatibleError)
    assert "Unset spark.millpond.state.location" in found.action


def test_the_id_is_not_chosen_anew() -> None:
    files = memory()
    QueryLogs(files).check_id()
    query_logs = ledger_of(files, 1, 0)
    with pytest.raises(
        StateDamagedError, match=r"\[STREAMING_CHECKPOINT_MISSING_METADATA_FILE\].* up to 0, and"
    ) as found:
        query_logs.check_id()
    assert found.value.file == f"{files.url}/metadata"
    files.put("metadata", [json.dumps({"id": "x"}).encode()])
    query_logs.check_id()


@pytest.mark.parametrize(
    ("planned", "committed", "why"),
    [
        (0, 0, None),
        (1, 0, None),
        (3, 3, None),
        (3, 2, None),
        (0, 2, "empty or gone"),
        (1, 2, "has batches up to 0 only"),
    ],
)
def test_commits_without_offsets(planned: int, committed: int, why: str | None) -> None:
    query_logs = ledger_of(memory(), planned, committed)
    if why is None:
        query_logs.check_offsets()
        return
    with pytest.raises(StateDamagedError, match=f"commits/ has batches up to 1, and offsets/ .*{why}"):
        query_logs.check_offsets()
