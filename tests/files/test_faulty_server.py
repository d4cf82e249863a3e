"""The file layer on a real S3 server, through a proxy that injects one kind of fault at a time."""

import random
import urllib.request
from contextlib import suppress
from datetime import timedelta

import pytest
from obstore.store import S3Store

from millpond.checkpoint.generation import claim
from millpond.errors import SettingError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError
from millpond.files.backends.objects import ObjectFiles
from millpond.files.backends.retry import with_retries
from millpond.files.locations.opening import open_filesystem
from tests.files.uploads import upload
from tests.servers.proxy import KINDS, faulty
from tests.servers.s3 import pointed_at
from tests.servers.seaweedfs import BUCKET

pytestmark = pytest.mark.xdist_group("seaweedfs")

OBJECTS = 4
# A hang takes its time; a conflict befalls few requests.
SHARES = dict.fromkeys(KINDS, 0.3) | {"hang": 0.1, "conflict": 0.4}


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_is_overcome(kind, seaweedfs):
    patience = {"AWS_TIMEOUT": "1s"} if kind == "hang" else {}
    with faulty(seaweedfs, 11, {kind: SHARES[kind]}) as proxy, pointed_at(proxy.endpoint, **patience):
        files = open_filesystem(f"s3://{BUCKET}/one fault/{kind}")
        names = [f"created/{number}" for number in range(OBJECTS)]
        contents = [random.Random(number).randbytes(200_000) for number in range(OBJECTS)]
        for number, (name, data) in enumerate(zip(names, contents, strict=True)):
            create(files, name, data)
            assert files.get(name) == data
            assert files.size(name) == len(data)
            ranges = [(100_000, 50_000), (0, 10), (199_999, 1)]
            parts = files.get_ranges(name, ranges)
            assert [bytes(memoryview(part)) for part in parts] == [data[o : o + n] for o, n in ranges]
            assert [info.name for info in files.list("created/")] == names[: number + 1]
            files.put("replaced", [data[:10], data[10:]])
            assert files.get("replaced") == data
            files.delete("replaced")
            assert not files.exists("replaced")
    assert proxy.happened[kind]


def create(files, name, data):
    """Put-if-absent is tried once: whether a failed one took effect, the next one shows."""
    try:
        files.put(name, [data], create=True)
    except TransientError:
        with suppress(AlreadyExistsError):
            with_retries(lambda: files.put(name, [data], create=True))


def test_a_put_if_absent_whose_answer_is_lost_has_won(seaweedfs):
    with faulty(seaweedfs, 1, {"lost": 1.0}) as proxy, pointed_at(proxy.endpoint):
        files = open_filesystem(f"s3://{BUCKET}/lost")
        with pytest.raises(TransientError):
            files.put("claim", [b"first"], create=True)
        proxy.shares["lost"] = 0.0
        with pytest.raises(AlreadyExistsError):
            files.put("claim", [b"second"], create=True)
        assert files.get("claim") == b"first"


def test_a_name_in_a_message_does_not_decide_the_error():
    """Messages have the object's name; the word `range` in it says nothing of a range that is too long."""
    with pointed_at("http://127.0.0.1:9"), pytest.raises(TransientError, match="arranged/orange"):
        open_filesystem(f"s3://{BUCKET}/arranged").get_range("orange", 0, 5)


def test_a_conflict_is_not_taken_for_a_name_that_is_taken(seaweedfs):
    """S3 answers 409 where another request for the name is under way, and has written nothing then."""
    with faulty(seaweedfs, 1, {"conflict": 1.0}) as proxy, pointed_at(proxy.endpoint):
        files = open_filesystem(f"s3://{BUCKET}/conflict")
        with pytest.raises(TransientError, match="busy with another request"):
            files.put("claim", [b"mine"], create=True)
        assert not files.exists("claim")
        proxy.shares["conflict"] = 0.0
        files.put("claim", [b"mine"], create=True)
        proxy.shares["conflict"] = 1.0
        with pytest.raises(AlreadyExistsError):
            files.put("claim", [b"another's"], create=True)


def test_a_server_that_ignores_the_condition_is_refused(seaweedfs):
    unsigned = {"AWS_SKIP_SIGNATURE": "true"}  # the condition is among what is signed
    with faulty(seaweedfs, 1, {"unconditional": 1.0}) as proxy, pointed_at(proxy.endpoint, **unsigned):
        files = open_filesystem(f"s3://{BUCKET}/unconditional")
        with pytest.raises(SettingError, match="If-None-Match"):
            claim(files, run="run", partitions=1)
        proxy.shares["unconditional"] = 0.0
        assert claim(files, run="run", partitions=1).number == 2


def test_conditional_puts_that_are_disabled_are_refused(seaweedfs):
    with pointed_at(seaweedfs, AWS_CONDITIONAL_PUT="disabled"):
        files = open_filesystem(f"s3://{BUCKET}/disabled")
        with pytest.raises(SettingError, match="cannot do what state needs"):
            claim(files, run="run", partitions=1)


def test_what_is_small_is_put_by_one_request(seaweedfs):
    with faulty(seaweedfs, 1, {}) as proxy, pointed_at(proxy.endpoint):
        files = open_filesystem(f"s3://{BUCKET}/sizes")
        files.put("small", [b"a", b"b"])
        assert proxy.asked == {f"PUT /{BUCKET}/sizes/small": 1}
        large = random.Random(1).randbytes(9 << 20)
        files.put("large", [large[:7], large[7:]])
        assert files.get("large") == large
        assert sum("/large?" in request for request in proxy.asked) == 4, "begun, two parts, put together"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "conflict"])
def test_an_upload_in_parts_overcomes_each_fault(kind, seaweedfs):
    patience = {"AWS_TIMEOUT": "1s"} if kind == "hang" else {}
    data = random.Random(1).randbytes((16 << 20) + 9)
    with faulty(seaweedfs, 5, {kind: SHARES[kind]}) as proxy, pointed_at(proxy.endpoint, **patience):
        files = open_filesystem(f"s3://{BUCKET}/uploads/{kind}")
        for number in range(3):
            with files.upload(f"{number}") as write:
                write(data)
            assert files.get(f"{number}") == data
    assert proxy.happened[kind]


def test_an_upload_whose_last_answer_is_lost_has_succeeded(seaweedfs):
    data = random.Random(1).randbytes(9 << 20)
    with faulty(seaweedfs, 1, {}) as proxy, pointed_at(proxy.endpoint):
        files = open_filesystem(f"s3://{BUCKET}/completed")
        files.put("warm", [b"1"])
        draw = proxy.draw

        def lose(method, target):
            fate = draw(method, target)
            completes = method == "POST" and "uploadId" in target
            return ("lost", 0.0) if completes and sum("uploadId" in asked for asked in proxy.asked) < 99 else fate

        proxy.draw = lose
        with files.upload("x") as write:
            write(data)
        assert files.get("x") == data
        assert proxy.happened["lost"]


@pytest.mark.parametrize("fault", ["its block", "a part", "its end"])
def test_an_upload_that_fails_leaves_no_object_and_no_parts(fault, seaweedfs):
    data = random.Random(1).randbytes(20 << 20)
    with faulty(seaweedfs, 1, {}) as proxy, pointed_at(proxy.endpoint):
        files = ObjectFiles(
            S3Store(BUCKET, retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=5)}), "", "failed"
        )
        draw = proxy.draw

        def refuse(method, target):
            draw(method, target)
            part = method == "PUT" and "partNumber=2" in target
            end = method == "POST" and "uploadId" in target
            return ("slow_down" if {"a part": part, "its end": end}.get(fault) else ""), 0.0

        proxy.draw = refuse
        with pytest.raises(ZeroDivisionError if fault == "its block" else TransientError):
            upload(files, "x", data, broken_off=fault == "its block")
        assert not files.exists("x")
        assert files.list("") == []
        with urllib.request.urlopen(f"{seaweedfs}/{BUCKET}?uploads&prefix=failed/") as listed:
            assert b"<Upload>" not in listed.read()


def test_a_list_whose_answer_breaks_off_is_asked_for_again(seaweedfs):
    with pointed_at(seaweedfs):
        open_filesystem(f"s3://{BUCKET}/list").put("x", [b"1"])
    with faulty(seaweedfs, 1, {"cut": 0.5}) as proxy, pointed_at(proxy.endpoint):
        files = open_filesystem(f"s3://{BUCKET}/list")
        for _ in range(8):
            assert [info.name for info in files.list("")] == ["x"]
    assert proxy.happened["cut"]
