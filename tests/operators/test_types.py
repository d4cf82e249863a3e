import pyarrow as pa
import pytest

from millpond.errors import UsageError
from millpond.spec.types import DataType, leaves, parse_type


@pytest.mark.parametrize(
    ("ddl", "arrow"),
    [
        ("tinyint", pa.int8()),
        ("BIGINT", pa.int64()),
        ("integer", pa.int32()),
        ("real", pa.float32()),
        ("decimal", pa.decimal128(10, 0)),
        ("dec(5)", pa.decimal128(5, 0)),
        ("numeric( 38 , 18 )", pa.decimal128(38, 18)),
        ("varchar(10)", pa.string()),
        ("string collate UTF8_BINARY", pa.string()),
        ("binary", pa.binary()),
        ("boolean", pa.bool_()),
        ("date", pa.date32()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestamp_ntz", pa.timestamp("us")),
        ("array<map<string,int>>", pa.list_(pa.field("element", pa.map_(pa.string(), pa.int32())))),
        ("struct<a:int>", pa.struct([("a", pa.int32())])),
        ("struct<>", pa.struct([])),
        (
            "struct<`a ``b`:int, c string NOT NULL COMMENT 'it\\'s', d int COMMENT \"it's\">",
            pa.struct([("a `b", pa.int32()), ("c", pa.string()), ("d", pa.int32())]),
        ),
    ],
)
def test_arrow_types(ddl: str, arrow: pa.DataType) -> None:
    assert parse_type(ddl).arrow == arrow


@pytest.mark.parametrize(
    "ddl", ["", "decimal(39,0)", "decimal(3,4)", "struct<a:int", "array<>", "int)", "decimal(a)", "`x`"]
)
def test_malformed(ddl: str) -> None:
    with pytest.raises(UsageError, match="Not a type"):
        parse_type(ddl)


def test_types_without_arrow_form_are_named() -> None:
    assert parse_type("interval day to second").name == "interval day to second"
    with pytest.raises(UsageError, match="variant"):
        _ = parse_type("variant").arrow


def test_machine_forms() -> None:
    assert [parse_type(t).machine for t in ("date", "float", "decimal(18,2)", "decimal(19,2)", "string")] == [
        "int",
        "float",
        "int",
        "wide",
        "bytes",
    ]
    assert parse_type("array<int>").machine is None
    assert not parse_type("string collate UNICODE").atomic


def test_leaves_of_structs() -> None:
    flat = list(leaves(parse_type("struct<a:int,b:struct<c:string>>")))
    assert [leaf.name for leaf in flat] == ["boolean", "int", "boolean", "string"]
    assert list(leaves(DataType("date"))) == [DataType("date")]
