"""Real servers."""

from collections.abc import Iterator

import pytest

from tests.servers import postgres, redis
from tests.servers.process import Unavailable


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.RedisServer]:
    """A real Redis. Who uses it is in the group `lookup`: one server, not one a worker."""
    try:
        redis.redis_server()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with redis.running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresServer]:
    """A real PostgreSQL, in the same group."""
    try:
        postgres.programs()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with postgres.running() as server:
        yield server
