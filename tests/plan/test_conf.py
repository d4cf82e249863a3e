from __future__ import annotations

import pytest

from millpond.conf import Settings, read_settings
from millpond.errors import SettingError
from millpond.setting_values import parse_size


def test_defaults() -> None:
    assert read_settings({"spark.app.name": "x"}) == Settings()


def test_reads_every_setting() -> None:
    given = {
        "enabled": "false",
        "state.location": "s3://bucket/state",
        "partitions": "7",
        "slots": "3",
        "slot.memory": "512m",
        "cache.disk": "10g",
        "store.readBatchRatio": "0.5",
        "store.maxSpaceAmplification": "3",
        "commit.mode": "SYNC",
        "compaction": "remote",
        "onUnsupported": "error",
        "explain": "all",
        "batch.rows": "5000",
    }
    settings = read_settings({f"spark.millpond.{name}": value for name, value in given.items()})
    assert settings == Settings(
        enabled=False,
        state_location="s3://bucket/state",
        partitions=7,
        slots=3,
        slot_memory=512 << 20,
        cache_disk=10 << 30,
        read_batch_ratio=0.5,
        max_space_amplification=3.0,
        commit_mode="sync",
        compaction="remote",
        on_unsupported="error",
        explain="all",
        batch_rows=5000,
    )


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("64k", 65536), ("1g", 1 << 30), ("100 MB", 100 << 20), ("2GiB", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot.memory", "much"),
        ("slot.memory", "1k"),
        ("partitions", "0"),
        ("partitions", "40000"),
        ("slots", "-1"),
        ("store.readBatchRatio", "1.5"),
        ("store.readBatchRatio", "nan"),
        ("store.maxSpaceAmplification", "1"),
        ("store.maxSpaceAmplification", "much"),
        ("commit.mode", "later"),
        ("enabled", "yes"),
        ("compaction", "off"),
        ("slots", "null"),
        ("metrics.host", " "),
        ("state.location", " "),
        ("state.location", "memory:here"),
    ],
)
def test_a_malformed_value_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingError, match="but has to be") as caught:
        read_settings({f"spark.millpond.{name}": value})
    assert f"spark.millpond.{name} is {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("spark.millpond.slot.memry", "slot.memory"),
        ("spark.Millpond.slots", "slots"),
        ("spark.millpond.onunsupported", "onUnsupported"),
        ("spark.millpond.stateLocation", "state.location"),
        ("spark.millpond.commitMode", "commit.mode"),
        ("spark.millpond.store.reedBatchRatio", "store.readBatchRatio"),
        ("spark.milpond.slots", "slots"),
        ("millpond.commit.mode", "commit.mode"),
    ],
)
def test_an_unknown_name_is_told_what_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_settings({name: "1g"})
    assert str(caught.value).startswith(f"[SETTING] {name} is not a setting of Millpond. Did you mean spark.millpond.")
    assert f"spark.millpond.{meant}" in str(caught.value).split("?")[0]
    assert "Known settings, all below spark.millpond.: async.inFlight, batch.rows, cache.admission, cache.disk," in str(
        caught.value
    )


def test_a_name_like_no_other_lists_the_known() -> None:
    with pytest.raises(SettingError, match=r"xyzzy is not a setting of Millpond\. Known settings, all below "):
        read_settings({"spark.millpond.xyzzy": "1"})
