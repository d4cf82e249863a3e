"""Real servers."""

from collections.abc import Iterator

import pytest

from tests import real_postgres, real_redis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real_redis.Server]:
    """A real Redis. Who uses it is in the group `lookup`: one server, not one a worker."""
    try:
        real_redis.redis_server()
    except real_redis.Unavailable as reason:
        pytest.skip(str(reason))
    with real_redis.running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[real_postgres.Server]:
    """A real PostgreSQL, in the same group."""
    try:
        real_postgres.programs()
    except real_postgres.Unavailable as reason:
        pytest.skip(str(reason))
    with real_postgres.running() as server:
        yield server
