"""Plans between operators where rows change: expressions of every kind, and operators that take up their values."""

from __future__ import annotations

STABLE = [
    "n",
    "n + v",
    "n * 2 - 1",
    "v / n",
    "try_divide(v, n - 1)",
    "cast(n as string)",
    "upper(g)",
    "concat_ws('-', g, k)",
    "substr(md5(g), 1, n)",
    "g rlike 'a|b'",
    "g like '%c%'",
    "coalesce(g, 'x')",
    "nullif(n, 2)",
    "n between 2 and 3",
    "n in (1, 3, 5)",
    "case when n > 2 then 'many' when v is null then 'none' end",
    "hour(last)",
    "cast(last as date)",
    "cast(last as string)",
    "date_format(last, 'yyyy-MM-dd HH')",
    "date_trunc('day', last)",
    "last < timestamp'2023-11-15 08:00:00'",
    "last > date'2023-11-15'",
    "to_date('2023-11-15') < last",
    "unix_timestamp(last) % 7",
    "from_unixtime(n * 100000)",
    "datediff(last, date'2023-11-01') + n",
    "make_date(2020, cast(n as int), 1)",
    "size(array(n, v))",
    "array(n, k)[0]",
    "transform(array(n), x -> x + 1)[0]",
    "aggregate(sequence(1, n), 0L, (a, b) -> a + b)",
    "exists(array(n, k), x -> x > 3)",
    "element_at(map('a', n), 'a')",
    "struct(n, g).n",
    "to_json(struct(n, g))",
    "from_json(to_json(named_struct('a', n)), 'a int').a",
    "get_json_object(to_json(named_struct('a', n)), '$.a')",
    "cast(concat(cast(n as string), '0') as int)",
    "round(v / 3, 1)",
    "typeof(n)",
    "bigger(n)",
    "n > least_size",
    "n > (select max(id) from range(3))",
    "k in (select id from range(6))",
    "exists (select 1 from values (1), (3) as t(a) where a = n)",
]
"""Looks at nothing but the row. `bigger` is a function of the user, `least_size` a variable of the session."""

UNSTABLE = {
    "the clock": [
        "now()",
        "current_timestamp()",
        "current_date",
        "curdate()",
        "localtimestamp()",
        "unix_timestamp()",
        "current_time()",
        "last > current_timestamp() - interval 20 seconds",
        "datediff(current_date(), last)",
        "date_format(now(), 'HH:mm:ss')",
        "cast('now' as timestamp)",
        "to_date('today')",
        "to_timestamp(' Tomorrow')",
        "last > 'yesterday'",
        "last > '09:00'",
    ],
    "the session": [
        "current_user()",
        "user()",
        "session_user()",
        "current_catalog()",
        "current_database()",
        "current_schema()",
        "current_timezone()",
        "version()",
    ],
    "chance and place": [
        "rand()",
        "rand(3)",
        "randn(3)",
        "uuid()",
        "uniform(0, 10, 3)",
        "randstr(3, 1)",
        "shuffle(array(n, k))[0]",
        "base64(aes_encrypt(g, '0000111122223333'))",
        "monotonically_increasing_id()",
        "spark_partition_id()",
        "input_file_name()",
        "input_file_block_start()",
        "java_method('java.util.UUID', 'randomUUID')",
        "reflect('java.lang.System', 'nanoTime')",
        "any_number(n)",
    ],
    "tables": [
        "n > (select max(a) from files)",
        "k in (select a from files)",
        "exists (select 1 from files where a = n)",
        "n > (select min(a) from rows)",
        "n > (select count(*) from range(3) where id < unix_timestamp())",
    ],
}
"""May give something else for the same row later. `any_number` is a function of the user that says so of itself."""

LOWER = {
    "an aggregate": "select k, g, count(*) n, sum(v) v, max(t) last from {events} group by k, g",
    "the first rows": "select k, g, cast(rn as bigint) n, v, t last from (select *, row_number() over"
    " (partition by k order by v desc, t) rn from {events}) where rn <= 3",
}
"""Queries whose rows change, with the same columns; each row has another (k, g, n)."""

UPPER: dict[str, tuple[str, list[str]]] = {
    "an aggregate": ("select g, count(*) c, count(x) d, sum(n) s from {below} group by g", ["g"]),
    "an aggregate without keys": ("select count(*) c, sum(n) filter (where x is not null) s from {below}", []),
    "an aggregate by it": ("select x, count(*) c, sum(n) s from {below} group by x", ["x"]),
    "distinct rows": ("select distinct g, x from {below}", ["g", "x"]),
    "the first rows": (
        "select * from (select g, k, n, x, row_number() over (partition by k order by n desc, g, x) rn from {below})"
        " where rn <= 2",
        ["k", "rn"],
    ),
    "results over rows": (
        "select k, g, n, x, sum(n) over (partition by g order by k, n rows between 2 preceding and current row) a"
        " from {below}",
        ["k", "g", "n"],
    ),
    "two aggregates": (
        "select c, count(*) m from (select x, count(*) c from {below} group by x having c > 0) group by c",
        ["c"],
    ),
}
"""What takes up rows with an expression's value as `x`, and the key of its images."""

PLACES = {
    "a column": "(select k, g, n, {x} as x from ({lower}))",
    "a condition": "(select k, g, n, v as x from ({lower}) where pmod(hash({x}), 3) > 0)",
    "a condition above columns": "(select * from (select k, g, n, {x} as x from ({lower})) where pmod(hash(x), 3) > 0)",
}
"""Where an expression stands."""

SETTINGS = {
    "spark.sql.session.timeZone": ("UTC", "Asia/Tokyo"),
    "spark.sql.ansi.enabled": ("true", "false"),
    "spark.sql.caseSensitive": ("false", "true"),
    "spark.sql.legacy.sizeOfNull": ("false", "true"),
    "spark.sql.shuffle.partitions": ("2", "5"),
}
"""Settings as they are at the first start and at another; the last of them changes no expression."""


def query(lower: str, place: str, x: str, upper: str) -> tuple[str, list[str]]:
    """The SQL of a combination, over `{events}`, and the key of its images."""
    text, keys = UPPER[upper]
    below = PLACES[place].replace("{x}", x).replace("{lower}", LOWER[lower])
    return text.replace("{below}", below), keys
