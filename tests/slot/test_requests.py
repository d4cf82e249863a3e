"""A slot's requests to an object store, as its server sees them, and as the metrics report them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from millpond.checkpoint.committer import Committer
from millpond.metrics import REQUEST_PRICES
from millpond.query.progress.reader import ProgressReader
from millpond.slot.partition import resources
from tests.servers.proxy import faulty
from tests.servers.s3 import asked, pointed_at, s3
from tests.slot.test_damage import Counts

FIRST = 3
"""Batches until a slot knows which partitions it has."""
BATCHES = 10


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3() as url:
        yield url


def test_a_batch_is_one_put_and_no_list_and_no_get(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "Committer", partial(Committer, hold=60.0))  # a busy machine may take its second
    application = Counts(tmp_path, bucket)
    try:
        application.start()
        application.go(FIRST)
        assert application.server is not None
        application.server._query(application.task.key).drain(10)
        with asked() as seen:
            application.go(BATCHES)
            application.server._query(application.task.key).drain(10)
    finally:
        application.close()
    kinds = Counter(kind for kind, _ in seen)
    assert kinds == {"puts": BATCHES - FIRST, "heads": 2 * (BATCHES - FIRST)}, seen
    assert len({path for kind, path in seen if kind == "puts"}) == BATCHES - FIRST
    told = ProgressReader(f"{bucket}{tmp_path}").read().batches
    assert [batch.batch for batch in told] == list(range(BATCHES))
    total = Counter[str]()
    for batch in told[FIRST + 1 :]:
        total += Counter(batch.requests)
        assert batch.requests.keys() == REQUEST_PRICES.keys()
    # A batch reports the requests before it was sealed: those of the last commit or two are not reported yet.
    assert BATCHES - FIRST - 2 <= total["puts"] <= BATCHES - FIRST
    assert total["heads"] <= 2 * total["puts"] + 2
    assert not total["lists"]
    assert not total["gets"]


def test_a_store_that_refuses_connections_for_a_while_ends_no_batch(bucket: str, tmp_path: Path) -> None:
    with faulty(os.environ["AWS_ENDPOINT_URL"], 1, {}) as proxy, pointed_at(proxy.endpoint):
        Counts(tmp_path, bucket).through(2)
        application = Counts(tmp_path, bucket)
        try:
            application.start()
            proxy.shares["reset"] = 1.0
            threading.Timer(8.0, proxy.shares.clear).start()
            application.go(4)
        finally:
            application.close()
    assert proxy.happened["reset"]


def test_nothing_is_told_of_state_on_a_disk(tmp_path: Path) -> None:
    Counts(tmp_path).through(2)
    assert [batch.requests for batch in ProgressReader(str(tmp_path)).read().batches] == [{}, {}]
