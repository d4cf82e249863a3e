"""Redis and PostgreSQL, real ones: their values come as they are, and errors are reported."""

import datetime as dt
import socket
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from millpond.errors import UsageError
from millpond.lookup import Found, LookupTable, PostgresTable, RedisTable
from millpond.lookup import postgres as postgres_module
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.servers.wire import wire

pytestmark = pytest.mark.xdist_group("lookup")

SCHEMA = pa.schema(
    [
        *(("b", pa.bool_()), ("i", pa.int32()), ("l", pa.int64()), ("f", pa.float64()), ("s", pa.string())),
        *(("d", pa.decimal128(10, 2)), ("day", pa.date32()), ("at", pa.timestamp("us", "UTC")), ("raw", pa.binary())),
    ]
)
NOON = dt.datetime(2026, 5, 4, 12, 0, 0, 250000, tzinfo=dt.UTC)
ROW = {
    "b": True,
    "i": -5,
    "l": 1 << 40,
    "f": 1.5,
    "s": "Ölpfütze",
    "d": Decimal("12.30"),
    "day": dt.date(2026, 5, 4),
    "at": NOON,
    "raw": b"\x01\x02",
}


def in_order(found: Found) -> dict[int, dict[str, Any]]:
    return dict(zip(found.at, found.rows.to_pylist(), strict=True))


class TestRedis:
    @pytest.fixture
    def client(self, redis_server: RedisServer) -> Iterator[Any]:
        import redis

        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
            yield client

    def test_types_come_from_text(self, redis_server: RedisServer, client: Any) -> None:
        said = {"b": "true", "at": NOON.isoformat(), "day": "2026-05-04"}
        client.hset("x:1", mapping={name: said.get(name, ROW[name]) for name in ("i", "l", "f", "s", "raw")})
        client.hset("x:1", mapping={**said, "d": "12.30"})
        client.hset("x:2", mapping={"i": "7"})
        table = RedisTable(redis_server.url, "x:{id}")
        connection = table.connect(SCHEMA, 5)
        found = connection.fetch(pa.record_batch({"id": pa.array([3, 2, 1])}))
        assert in_order(found) == {2: ROW, 1: dict.fromkeys(ROW) | {"i": 7}}
        assert not found.unreadable
        connection.close()

    def test_keys_of_several_columns_and_names_of_its_own(self, redis_server: RedisServer, client: Any) -> None:
        client.hset("x:1/ä:true", mapping={"Name": "one"})
        table = RedisTable(redis_server.url, "x:{id}/{kind}:{flag}", fields={"name": "Name"})
        connection = table.connect(pa.schema([("name", pa.string())]), 5)
        keys = pa.record_batch({"kind": ["ä", "a"], "id": [1, 1], "flag": [True, True]})
        assert in_order(connection.fetch(keys)) == {0: {"name": "one"}}
        connection.close()

    def test_keys_of_bytes(self, redis_server: RedisServer, client: Any) -> None:
        client.hset(b"x:\xff/1", mapping={"name": "one"})
        connection = RedisTable(redis_server.url, "x:{raw}/{id}").connect(pa.schema([("name", pa.string())]), 5)
        keys = pa.record_batch({"raw": [b"\xfe", b"\xff"], "id": [1, 1]})
        assert in_order(connection.fetch(keys)) == {1: {"name": "one"}}
        with pytest.raises(UsageError, match="column that the key does not have"):
            connection.fetch(pa.record_batch({"raw": [b"a"]}))
        connection.close()

    def test_bytes_stand_for_themselves(self, redis_server: RedisServer, client: Any) -> None:
        client.hset(b"x:\xff\x00\r\n", mapping={"name": "one"})
        connection = RedisTable(redis_server.url, "x:{id}").connect(pa.schema([("name", pa.string())]), 5)
        keys = pa.record_batch({"id": pa.array([b"", b"\xff\x00\r\n"], pa.binary())})
        assert in_order(connection.fetch(keys)) == {1: {"name": "one"}}
        connection.close()

    def test_many_keys_of_all_lengths(self, redis_server: RedisServer, client: Any) -> None:
        """Each finds its own hash, whatever is in it; a connection is good for the next ones."""
        texts = ["ü" * (number % 300) + f"\r\n${number}" for number in range(2000)]
        with client.pipeline(transaction=False) as pipeline:
            for number, text in enumerate(texts):
                if number % 3:
                    pipeline.hset(f"x:{text}", mapping={"name": text[::-1], "n": number})
            pipeline.execute()
        connection = RedisTable(redis_server.url, "x:{id}").connect(
            pa.schema([("n", pa.int64()), ("none", pa.int64()), ("name", pa.string())]), 5
        )
        for start in (0, 1000):
            found = in_order(connection.fetch(pa.record_batch({"id": texts[start : start + 1000]})))
            numbers = range(start, start + 1000)
            assert found == {
                number - start: {"n": number, "none": None, "name": texts[number][::-1]}
                for number in numbers
                if number % 3
            }
        connection.close()

    def test_what_cannot_be_read_is_told_by_key(self, redis_server: RedisServer, client: Any) -> None:
        client.hset("x:1", mapping={"i": "abc", "l": "1"})
        client.set("x:2", "text")
        client.hset("x:3", mapping={"i": "1", "l": b"\xff"})
        client.hset("x:4", mapping={"i": "4", "l": "4"})
        columns = pa.schema([("i", pa.int32()), ("l", pa.int64())])
        connection = RedisTable(redis_server.url, "x:{id}").connect(columns, 5)
        found = connection.fetch(pa.record_batch({"id": [1, 2, 3, 4]}))
        assert in_order(found)[3] == {"i": 4, "l": 4}
        assert set(found.unreadable) == {0, 1, 2}
        assert "i is 'abc'" in found.unreadable[0]
        assert "no hash" in found.unreadable[1]
        connection.close()

    def test_a_type_that_it_does_not_have(self, redis_server: RedisServer, client: Any) -> None:
        columns = pa.schema([("parts", pa.list_(pa.struct([("a", pa.decimal128(3, 1)), ("b", pa.int64())])))])
        with pytest.raises(UsageError, match=r"converted to array<struct<a:decimal\(3,1\),b:bigint>> \(column parts\)"):
            RedisTable(redis_server.url, "x:{id}").connect(columns, 5)

    @pytest.mark.parametrize("key", ["x:{id", "x:{}", "x:{id!r}", "x:{id:>4}"])
    def test_a_pattern_that_is_none(self, key: str) -> None:
        with pytest.raises(UsageError, match="no pattern of keys"):
            RedisTable("redis://localhost", key)

    @pytest.mark.parametrize(
        "url",
        [
            *(
                "redis://:se#cret@host:6379",
                "redis://:7#cret@host",
                "redis://:se/cret@host",
                "redis://:7/cret@host",
                "host",
            ),
            *("redis://joe:7?cret@host", "redis:/joe:cret@host", "redis://joe:cret@host/prod", "redis://host/1/2"),
        ],
    )
    def test_a_url_that_is_none(self, url: str) -> None:
        """It is reported before anything runs, and without what may be a part of the password."""
        with pytest.raises(UsageError, match="cannot be read") as raised:
            RedisTable(url, "x:{id}")
        assert "cret" not in str(raised.value)
        assert "'se'" not in str(raised.value)

    @pytest.mark.parametrize("option", ["socket_timeou=1", "socket_timeout=cret", "protocol=7"])
    def test_an_option_that_is_none(self, option: str) -> None:
        with pytest.raises(UsageError, match="has an option that redis-py does not take") as raised:
            RedisTable(f"redis://joe:secret@host/0?{option}", "x:{id}")
        assert "cret" not in str(raised.value)

    def test_options_are_taken(self, redis_server: RedisServer, client: Any) -> None:
        client.hset("x:1", mapping={"i": "5"})
        table = RedisTable(f"{redis_server.url}?health_check_interval=5&client_name=me", "x:{id}")
        connection = table.connect(pa.schema([("i", pa.int32())]), 5)
        assert in_order(connection.fetch(pa.record_batch({"id": [1]}))) == {0: {"i": 5}}
        connection.close()

    def test_decimals_in_keys_have_no_exponent(self, redis_server: RedisServer, client: Any) -> None:
        client.hset("x:0.00000000", mapping={"name": "zero"})
        client.hset("x:0.00000001", mapping={"name": "least"})
        connection = RedisTable(redis_server.url, "x:{id}").connect(pa.schema([("name", pa.string())]), 5)
        keys = pa.record_batch({"id": pa.array([Decimal("1E-8"), Decimal(0)], pa.decimal128(20, 8))})
        assert in_order(connection.fetch(keys)) == {0: {"name": "least"}, 1: {"name": "zero"}}
        connection.close()

    def test_a_number_too_large_for_single_precision(self, redis_server: RedisServer, client: Any) -> None:
        client.hset("x:1", mapping={"f": "1e300"})
        client.hset("x:2", mapping={"f": "inf"})
        connection = RedisTable(redis_server.url, "x:{id}").connect(pa.schema([("f", pa.float32())]), 5)
        found = connection.fetch(pa.record_batch({"id": [1, 2]}))
        assert set(found.unreadable) == {0}
        assert in_order(found)[1] == {"f": float("inf")}
        connection.close()

    def test_keys_that_the_user_may_not_read(self, redis_server: RedisServer, client: Any) -> None:
        """No other try helps: with `on_error="null"` all rows would come out empty."""
        client.execute_command("ACL", "SETUSER", "reader", "on", ">reader", "~other:*", "+@all")
        table = RedisTable(redis_server.url.replace("//", "//reader:reader@"), "x:{id}")
        connection = table.connect(pa.schema([("name", pa.string())]), 5)
        with pytest.raises(UsageError, match=r"refuses the request.*permission"):
            connection.fetch(pa.record_batch({"id": [1]}))
        connection.close()
        client.execute_command("ACL", "DELUSER", "reader")

    def test_a_database_that_there_is_not(self, redis_server: RedisServer, client: Any) -> None:
        with pytest.raises(UsageError, match="refuses the request"):
            RedisTable(redis_server.url.removesuffix("0") + "99", "x:{id}").connect(SCHEMA, 5)

    def test_passwords_are_not_shown(self) -> None:
        table = RedisTable("redis://user:secret@example.org:77/3", "x:{id}")
        assert "secret" not in repr(table) + table.name
        assert table.name == "Redis example.org:77, hashes x:{id}"
        assert isinstance(table, LookupTable)

    def test_a_user_who_is_refused(self, redis_server: RedisServer, client: Any) -> None:
        url = redis_server.url.replace("//", "//nobody:wrong@")
        with pytest.raises(UsageError, match="refuses the request"):
            RedisTable(url, "x:{id}").connect(pa.schema([("name", pa.string())]), 5)

    def test_no_answer_in_time(self, redis_server: RedisServer, client: Any) -> None:
        with wire(redis_server.port) as slow:
            slow.cut = True
            table = RedisTable(f"redis://127.0.0.1:{slow.port}", "x:{id}")
            started = time.monotonic()
            with pytest.raises(Exception, match=r"(?i)time"):
                table.connect(pa.schema([("name", pa.string())]), 0.3).fetch(pa.record_batch({"id": [1]}))
            assert time.monotonic() - started < 5

    def test_answers_that_come_in_drops(
        self, redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The time-out is that of the whole request, not of each of its answers."""
        connection: Any = RedisTable(redis_server.url, "x:{id}").connect(pa.schema([("name", pa.string())]), 0.3)
        read = connection._client.connection.read_response
        monkeypatch.setattr(
            connection._client.connection, "read_response", lambda **more: time.sleep(0.05) or read(**more)
        )
        with pytest.raises(TimeoutError, match="of 500 answers"):
            connection.fetch(pa.record_batch({"id": list(range(500))}))
        connection.close()


class TestPostgres:
    @pytest.fixture
    def client(self, postgres_server: PostgresServer) -> Iterator[Any]:
        import psycopg

        with psycopg.connect(postgres_server.conninfo, autocommit=True) as client:
            client.execute("DROP SCHEMA public CASCADE")
            client.execute("CREATE SCHEMA public")
            yield client

    def test_types_come_as_they_are(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute(
            "CREATE TABLE things (id bigint PRIMARY KEY, b bool, i int, l bigint, f double precision, s text, "
            "d numeric(10,2), day date, at timestamptz, raw bytea)"
        )
        client.execute("INSERT INTO things VALUES (1, %s, %s, %s, %s, %s, %s, %s, %s, %s)", list(ROW.values()))
        client.execute("INSERT INTO things VALUES (2)")
        connection = PostgresTable(postgres_server.conninfo, "things").connect(SCHEMA, 5)
        found = connection.fetch(pa.record_batch({"id": pa.array([2, 1, 3], pa.int32())}))
        assert in_order(found) == {1: ROW, 0: dict.fromkeys(ROW)}
        assert found.rows.schema == SCHEMA
        assert not in_order(connection.fetch(pa.record_batch({"id": [7]})))
        connection.close()

    def test_keys_of_several_columns_and_of_other_types(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute('CREATE SCHEMA "My"')
        client.execute('CREATE TABLE "My"."Things" (id uuid, "Kind" varchar(10), name int, PRIMARY KEY (id, "Kind"))')
        ids = [f"00000000-0000-0000-0000-00000000000{number}" for number in range(3)]
        for number, one in enumerate(ids[:2]):
            client.execute('INSERT INTO "My"."Things" VALUES (%s, %s, %s)', [one, "a", number])
        table = PostgresTable(postgres_server.conninfo, "My.Things")
        connection = table.connect(pa.schema([("name", pa.int64())]), 5)
        keys = pa.record_batch({"Kind": ["b", "a", "a", "a"], "id": [ids[0], ids[2], ids[1], ids[0]]})
        assert in_order(connection.fetch(keys)) == {2: {"name": 1}, 3: {"name": 0}}
        connection.close()

    @pytest.mark.parametrize(
        ("kind", "has", "keys", "found"),
        [
            ("char(4)", ["abc", "a"], ["abc", "a", "ab"], [0, 1]),
            ("short", ["abc"], ["abc", "abcd"], [0]),
            ("name", ["n" * 63], ["n" * 63, "n" * 64], [0]),
            ('"char"', ["a"], ["a", "ab"], [0]),
            ("int", [2, 3], pa.array([Decimal("1.5"), Decimal("2.0")], pa.decimal128(10, 1)), [1]),
            ("smallint", [2], [2, 65538, 1 << 40], [0]),
            ("bigint", [2], pa.array([2, 3], pa.int8()), [0]),
            ("numeric(10,2)", [Decimal("1.50")], pa.array([Decimal("1.501"), Decimal("1.500")]), [1]),
            ("timestamptz", [NOON], pa.array([NOON], pa.timestamp("us", "UTC")), [0]),
            ("date", [NOON.date()], pa.array([NOON.date()]), [0]),
        ],
    )
    def test_a_row_is_found_by_its_own_key_only(
        self, postgres_server: PostgresServer, client: Any, kind: str, has: list[Any], keys: Any, found: list[int]
    ) -> None:
        """No key is cut or rounded to another one."""
        client.execute("CREATE DOMAIN short AS varchar(3)")
        client.execute(f"CREATE TABLE things (id {kind} PRIMARY KEY, name text)")
        for one in has:
            client.execute("INSERT INTO things VALUES (%s, 'x')", [one])
        connection = PostgresTable(postgres_server.conninfo, "things").connect(pa.schema([("name", pa.string())]), 5)
        assert sorted(connection.fetch(pa.record_batch({"id": keys})).at) == found
        connection.close()

    @pytest.mark.parametrize(
        ("kind", "dtype", "said"),
        [
            ("timestamp", pa.timestamp("us", "UTC"), r"(Ask for|Make a) timestamp_ntz"),
            ("timestamptz", pa.timestamp("us"), r"(Ask for|Make a) timestamp\b"),
            ("timestamptz", pa.timestamp("us"), r"which does not go with timestamp_ntz\."),
            ("timestamp", pa.timestamp("us", "UTC"), r"which does not go with timestamp\."),
            ("timestamptz", pa.date32(), r"(Ask for|Make a) timestamp\b"),
            ("date", pa.timestamp("us"), r"(Ask for|Make a) date"),
            ("bigint", pa.timestamp("us", "UTC"), "as bigint, which does not go with"),
            ("int", pa.date32(), "as integer, which does not go with"),
            ("text", pa.date32(), "as text, which does not go with"),
            ("bytea", pa.string(), "as bytea, which does not go with"),
        ],
    )
    def test_no_zone_is_assumed(
        self, postgres_server: PostgresServer, client: Any, kind: str, dtype: pa.DataType, said: str
    ) -> None:
        client.execute(f"CREATE TABLE things (id int PRIMARY KEY, at {kind})")
        table = PostgresTable(postgres_server.conninfo, "things")
        with pytest.raises(UsageError, match=said):
            table.connect(pa.schema([("at", dtype)]), 5).fetch(pa.record_batch({"id": [1]}))
        with pytest.raises(UsageError, match=said):
            table.connect(pa.schema([("id", pa.int32())]), 5).fetch(pa.record_batch({"at": pa.nulls(1, dtype)}))

    def test_no_times_are_made_of_an_array_of_numbers(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, at bigint[])")
        table = PostgresTable(postgres_server.conninfo, "things")
        with pytest.raises(UsageError, match=r"as bigint\[\], which does not go with"):
            table.connect(pa.schema([("at", pa.list_(pa.timestamp("us")))]), 5).fetch(pa.record_batch({"id": [1]}))

    @pytest.mark.parametrize(
        ("kind", "has", "keys", "bad"),
        [
            ("uuid", f"{0:08}-0000-0000-0000-{1:012}", [f"{0:08}-0000-0000-0000-{1:012}", "junk"], {1}),
            ("int", 1, ["x", "y", "1", "z"], {0, 1, 3}),
            ("date", dt.date(2026, 1, 1), pa.array([3_000_000, 20_454], pa.date32()), {0}),
            ("text", "a", ["b\0", "a"], set()),
            ("text", "a", pa.array([b"\xff", b"a"]).view(pa.string()), set()),
        ],
    )
    def test_a_key_that_the_column_cannot_have_fails_alone(
        self, postgres_server: PostgresServer, client: Any, kind: str, has: Any, keys: Any, bad: set[int]
    ) -> None:
        """Or is not there, where no table could have it."""
        client.execute(f"CREATE TABLE things (id {kind} PRIMARY KEY, name text)")
        client.execute("INSERT INTO things VALUES (%s, 'x')", [has])
        connection = PostgresTable(postgres_server.conninfo, "things").connect(pa.schema([("name", pa.string())]), 5)
        found = connection.fetch(pa.record_batch({"id": keys}))
        assert set(found.unreadable) == bad
        assert list(in_order(found).values()) == [{"name": "x"}]
        connection.close()

    def test_a_time_that_python_has_not_fails_its_own_key(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, day date)")
        client.execute("INSERT INTO things SELECT n, '2026-01-01' FROM generate_series(0, 9) n")
        client.execute("UPDATE things SET day = 'infinity' WHERE id IN (2, 7)")
        connection = PostgresTable(postgres_server.conninfo, "things").connect(pa.schema([("day", pa.date32())]), 5)
        found = connection.fetch(pa.record_batch({"id": list(range(10))}))
        assert set(found.unreadable) == {2, 7}
        assert "infinity" in found.unreadable[2]
        assert in_order(found) == {n: {"day": dt.date(2026, 1, 1)} for n in range(10) if n not in (2, 7)}
        connection.close()

    def test_a_column_that_gets_another_type(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, n int)")
        client.execute("INSERT INTO things VALUES (1, 5)")
        connection = PostgresTable(postgres_server.conninfo, "things").connect(pa.schema([("n", pa.int64())]), 5)
        keys = pa.record_batch({"id": [1]})
        for _ in range(8):  # psycopg prepares a statement when it comes again and again
            connection.fetch(keys)
        client.execute("ALTER TABLE things ALTER COLUMN n TYPE bigint")
        client.execute("UPDATE things SET n = 5000000000")
        assert in_order(connection.fetch(keys)) == {0: {"n": 5_000_000_000}}
        connection.close()

    def test_options_of_the_users_stay(self, postgres_server: PostgresServer, client: Any) -> None:
        """A search path says which of two tables is meant."""
        client.execute("CREATE TABLE things (id int PRIMARY KEY, name text)")
        client.execute("INSERT INTO things VALUES (1, 'public')")
        client.execute("DROP SCHEMA IF EXISTS other CASCADE")
        client.execute("CREATE SCHEMA other CREATE TABLE things (id int PRIMARY KEY, name text)")
        client.execute("INSERT INTO other.things VALUES (1, 'other')")
        table = PostgresTable(f"{postgres_server.conninfo} options='-c search_path=other'", "things")
        connection = table.connect(pa.schema([("name", pa.string())]), 5)
        assert in_order(connection.fetch(pa.record_batch({"id": [1]}))) == {0: {"name": "other"}}
        connection.close()

    @pytest.mark.parametrize(("kind", "keys"), [("real", [16777217]), ("float8", [1]), ("bool", [2])])
    def test_what_is_no_key(self, postgres_server: PostgresServer, client: Any, kind: str, keys: list[int]) -> None:
        client.execute(f"CREATE TABLE things (id {kind} PRIMARY KEY, name text)")
        connection = PostgresTable(postgres_server.conninfo, "things").connect(pa.schema([("name", pa.string())]), 5)
        with pytest.raises(UsageError, match="does not go with bigint"):
            connection.fetch(pa.record_batch({"id": keys}))
        connection.close()

    def test_a_number_that_is_no_integer_is_not_made_one(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, n numeric, x float8)")
        client.execute("INSERT INTO things VALUES (1, 1.5, 1.5), (2, 2.0, 2.0), (3, NULL, NULL)")
        columns = pa.schema([("n", pa.int32()), ("x", pa.int64())])
        connection = PostgresTable(postgres_server.conninfo, "things").connect(columns, 5)
        found = connection.fetch(pa.record_batch({"id": [1, 2, 3]}))
        assert set(found.unreadable) == {0}
        assert in_order(found)[1] == {"n": 2, "x": 2}
        connection.close()

    def test_the_index_is_used(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, name text)")
        client.execute("INSERT INTO things SELECT n, 'x' FROM generate_series(1, 100000) n")
        client.execute("ANALYZE things")
        connection: Any = PostgresTable(postgres_server.conninfo, "things").connect(
            pa.schema([("name", pa.string())]), 5
        )
        keys = list(range(0, 100_000, 200))
        assert len(connection.fetch(pa.record_batch({"id": keys})).at) == 499
        plan = connection._query("EXPLAIN " + connection._statement.as_string(), [keys, keys])
        assert not any("Seq Scan" in line for (line,) in plan), plan

    def test_what_cannot_be_read_is_told_by_key(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, n bigint)")
        client.execute("INSERT INTO things VALUES (1, 5000000000), (2, 5)")
        connection = PostgresTable(postgres_server.conninfo, "things").connect(pa.schema([("n", pa.int32())]), 5)
        found = connection.fetch(pa.record_batch({"id": [1, 2]}))
        assert "n is 5000000000" in found.unreadable[0]
        assert in_order(found)[1] == {"n": 5}

    @pytest.mark.parametrize(
        ("conninfo", "table", "column", "said"),
        [
            ("", "nothing", "n", "nothing"),
            ("", "things", "m", "no column m"),
            (" dbname=elsewhere", "things", "n", "elsewhere"),
        ],
    )
    def test_what_has_to_change_is_told(
        self, postgres_server: PostgresServer, client: Any, conninfo: str, table: str, column: str, said: str
    ) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, n bigint)")
        asked = PostgresTable(postgres_server.conninfo + conninfo, table)
        with pytest.raises(UsageError, match=said):
            asked.connect(pa.schema([(column, pa.int64())]), 5).fetch(pa.record_batch({"id": [1]}))

    @pytest.mark.parametrize(
        "conninfo",
        [
            *("jdbc:postgresql://joe:secret@h/db", "jdbc:postgresql://h/db?user=joe&password=secret"),
            *("postgres//joe:secret@h/db", "postgresql:/joe:secret@h/db", "joe:secret@h"),
            *(
                "host=h password=top secret",
                "host=h password='secret",
                "host=h password=a secret=b",
                "host=h nonsense=1",
            ),
            *("postgresql://joe:top@secret@127.0.0.1/db", "postgresql://joe:top%secret@h", "postgresql://joe:secret"),
            *("postgresql://joe:12/secret@h/db", "postgresql://joe:12?secret@h", "postgresql://h?password=top@secret"),
            *("postgresql://joe:secret@h:port/db", "postgresql://joe:secret@h/db?sslmod=x"),
            *("host=joe:secret@h", "host=h port=secret", "dbname=postgresql://joe:secret@h/db", None),
        ],
    )
    def test_how_to_connect_cannot_be_read(self, conninfo: Any) -> None:
        """It is reported before anything runs, and without what may be a part of the password."""
        with pytest.raises(UsageError, match="cannot be read") as raised:
            PostgresTable(conninfo, "things")
        assert "secret" not in str(raised.value)
        assert raised.value.__context__ is None  # it would be shown, too
        assert ("Drop `jdbc:`" in str(raised.value)) == str(conninfo).startswith("jdbc:")

    @pytest.mark.parametrize(
        ("conninfo", "place"),
        [
            ("postgresql://joe:top#se:cret@h1:1,h2:2/db?connect_timeout=3", "h1,h2:1,2"),
            ("postgres://joe:top%40%2Fsecret@[::1]/db", "::1:5432"),
            ("postgresql://%2Ftmp/db", "/tmp:5432"),
            ("postgresql:///db?host=/var/run/it&password=secret", "/var/run/it:5432"),
            ("user=joe@server password='top secret' hostaddr=10.0.0.1 port=77", "10.0.0.1:77"),
            ("", "localhost:5432"),
        ],
    )
    def test_names_have_the_place(self, conninfo: str, place: str) -> None:
        assert PostgresTable(conninfo, "things").name == f"PostgreSQL {place}, table things"

    def test_nobody_has_the_client(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a query is made psycopg may be missing: the name has no place, and what is no URL is refused still."""
        monkeypatch.setitem(sys.modules, "psycopg.conninfo", None)
        assert PostgresTable("postgresql://joe:secret@h/db", "things").name == "PostgreSQL things"
        with pytest.raises(UsageError, match="cannot be read"):
            PostgresTable("postgresql://joe:top@secret@h/db", "things")

    def test_what_the_client_says_has_no_password(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import psycopg

        def connect(conninfo: str, **more: Any) -> None:
            try:
                raise OSError("top/secret is no name")
            except OSError as error:
                raise psycopg.OperationalError("cannot connect with top/secret") from error

        monkeypatch.setattr(psycopg.Connection, "connect", connect)
        with pytest.raises(psycopg.OperationalError, match=r"cannot connect with …") as raised:
            PostgresTable("postgresql://joe:top%2Fsecret@127.0.0.1/db", "things").connect(SCHEMA, 5)
        assert "secret" not in str(raised.value) + str(raised.value.__cause__)

    def test_passwords_are_not_shown(self) -> None:
        table = PostgresTable("postgresql://user:secret@example.org/db", "things")
        assert "secret" not in repr(table) + table.name
        assert table.name == "PostgreSQL example.org:5432, table things"
        assert isinstance(table, LookupTable)

    def test_no_answer_in_time(self, postgres_server: PostgresServer, client: Any) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, n bigint)")
        with wire(postgres_server.port) as slow:
            conninfo = postgres_server.conninfo.replace(f"port={postgres_server.port}", f"port={slow.port}")
            connection = PostgresTable(conninfo, "things").connect(pa.schema([("n", pa.int64())]), 0.5)
            slow.cut = True
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                connection.fetch(pa.record_batch({"id": [1]}))
            assert time.monotonic() - started < 5
            connection.close()

    def test_a_server_that_does_not_answer_leaves_time_for_the_next(
        self, postgres_server: PostgresServer, client: Any
    ) -> None:
        client.execute("CREATE TABLE things (id int PRIMARY KEY, n bigint)")
        with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog accepts connections
            port = silent.getsockname()[1]
            before, after = "host=127.0.0.1 port=", f"host=127.0.0.1,127.0.0.1 port={port},"
            conninfo = postgres_server.conninfo.replace(before, after)
            started = time.monotonic()
            PostgresTable(conninfo, "things").connect(SCHEMA, 5).close()
            assert time.monotonic() - started < 5

    @pytest.mark.parametrize(
        ("timeout", "seconds", "shares"),
        [
            (12, [4, 4, 4], [4, 4, 4]),
            (12, [0, 0, 12], [4, 6, 12]),  # two refuse at once
            (1, [0.7, 0.7, 0.7], [2, 2, 2]),  # libpq's minimum
            (12, [13, 2, 2], [4, 2, 2]),  # the first exceeds its time
        ],
    )
    def test_addresses_share_the_time(
        self, monkeypatch: pytest.MonkeyPatch, timeout: float, seconds: list[float], shares: list[int]
    ) -> None:
        import psycopg

        now = 0.0
        asked: list[tuple[str, int]] = []

        def connect(conninfo: str, *, connect_timeout: int, **more: Any) -> None:
            nonlocal now
            now += seconds[len(asked)]
            asked.append((conninfo.split()[0], connect_timeout))
            if len(asked) == 1:
                raise psycopg.OperationalError("FATAL: password authentication failed")
            raise psycopg.errors.ConnectionTimeout("too late")

        monkeypatch.setattr(postgres_module, "time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(psycopg.Connection, "connect", connect)
        with pytest.raises(psycopg.errors.ConnectionTimeout, match="too late"):
            PostgresTable("host=127.0.0.1,127.0.0.2,127.0.0.3", "things").connect(SCHEMA, timeout)
        assert asked == [(f"host=127.0.0.{number}", share) for number, share in enumerate(shares, 1)]

    @pytest.mark.parametrize(
        ("hosts", "down", "retried"),
        [
            ("host=primary,replica hostaddr=127.0.0.1,127.0.0.2", "127.0.0.1", True),  # the primary may come back
            ("host=primary,replica hostaddr=127.0.0.1,127.0.0.2", "127.0.0.2", True),
            ("host=primary,replica hostaddr=127.0.0.1,127.0.0.2", None, False),
            ("hostaddr=127.0.0.1,127.0.0.2", "127.0.0.1", True),
            ("host=server,server hostaddr=127.0.0.1,127.0.0.2", "127.0.0.1", False),  # one host, of two addresses
            ("host=server,server hostaddr=127.0.0.1,127.0.0.2", "127.0.0.2", False),
        ],
    )
    def test_a_host_that_refuses_does_not_keep_one_that_is_down_from_retries(
        self, monkeypatch: pytest.MonkeyPatch, hosts: str, down: str | None, retried: bool
    ) -> None:
        import psycopg

        def connect(conninfo: str, **more: Any) -> None:
            if down is not None and f"hostaddr={down}" in conninfo:
                raise psycopg.OperationalError("connection refused")
            raise psycopg.OperationalError("FATAL: password authentication failed")

        monkeypatch.setattr(psycopg.Connection, "connect", connect)
        # A `UsageError` is not retried.
        error, message = (psycopg.OperationalError, "connection refused") if retried else (UsageError, "password")
        with pytest.raises(error, match=message):
            PostgresTable(hosts, "things").connect(SCHEMA, 5)

    def test_a_lock_that_is_held(self, postgres_server: PostgresServer, client: Any) -> None:
        import psycopg

        client.execute("CREATE TABLE things (id int PRIMARY KEY, n bigint)")
        table = PostgresTable(postgres_server.conninfo, "things")
        connection = table.connect(pa.schema([("n", pa.int64())]), 0.5)
        with psycopg.connect(postgres_server.conninfo) as other:
            other.execute("LOCK TABLE things")
            with pytest.raises(TimeoutError):
                connection.fetch(pa.record_batch({"id": [1]}))
            other.rollback()
        connection.close()
