"""The NEXMark generator: distributions, and that any range of events is the same however it is made."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import xxhash
from benchmarks.nexmark.draws import bits, draw, hash_longs, letters, stream_id
from benchmarks.nexmark.generator import (
    CHUNK,
    EPOCH,
    EVENT_SCHEMA,
    HOT_CHANNELS,
    Nexmark,
    NexmarkConfig,
    last_auction,
    last_person,
    strings,
    views,
)

FIRST, COUNT = 5_000_000, 200_000


@pytest.fixture(scope="module")
def events() -> pa.Table:
    return Nexmark().events(FIRST, FIRST + COUNT)


@pytest.fixture(scope="module")
def bids(events: pa.Table) -> pa.RecordBatch:
    numbers = np.arange(FIRST, FIRST + COUNT, dtype=np.int64)
    return Nexmark().bids(numbers[numbers % EPOCH >= 4])


def of_type(events: pa.Table, code: int, name: str) -> pa.Table:
    chosen = events.filter(pc.equal(events["event_type"], code))
    return pa.Table.from_struct_array(chosen[name].combine_chunks())


def test_draws_are_xxhash64() -> None:
    values = np.array([0, 1, -1, 2**62], dtype=np.int64)
    seed = 42
    hashes = hash_longs(values.view(np.uint64), np.uint64(seed))
    expected = [xxhash.xxh64_intdigest(int(v).to_bytes(8, "little", signed=True), seed) for v in values]
    assert hashes.tolist() == expected


def test_a_draw_depends_on_seed_stream_and_number_only() -> None:
    numbers = np.arange(100, dtype=np.int64)
    assert (draw(numbers, 1, 2) == draw(numbers[::-1], 1, 2)[::-1]).all()
    assert (draw(numbers, 1, 2) != draw(numbers, 1, 3)).all()
    assert (draw(numbers, 1, 2) != draw(numbers, 2, 2)).all()
    assert draw(numbers, 1, 2).min() >= 0
    assert stream_id(1, 2) != stream_id(2, 1)


def test_bits_are_uniform() -> None:
    drawn = draw(np.arange(100_000, dtype=np.int64), 7, 1)
    counts = np.bincount(bits(drawn, 20, 4), minlength=16)
    assert abs(counts / 100_000 * 16 - 1).max() < 0.05


def test_letters_are_a_prefix_of_more_letters() -> None:
    assert letters(1_000, 3)[:100] == letters(100, 3)


def test_proportions(events: pa.Table) -> None:
    kinds = np.bincount(events["event_type"].to_numpy())
    assert kinds.tolist() == [COUNT // 50, COUNT // 50 * 3, COUNT // 50 * 46]


def test_each_event_is_a_person_an_auction_or_a_bid(events: pa.Table) -> None:
    for code, name in enumerate(("person", "auction", "bid")):
        valid = events[name].is_valid().to_numpy()
        assert (valid == (events["event_type"].to_numpy() == code)).all()
    assert events.schema == EVENT_SCHEMA


def test_hot_ratios(bids: pa.RecordBatch, events: pa.Table) -> None:
    hot_auctions = np.asarray(bids["auction"]) % 100 == 0
    assert 0.50 < hot_auctions.mean() < 0.52  # 1/2, and one in 100 of the others by chance
    hot_bidders = np.asarray(bids["bidder"]) % 100 == 1
    assert 0.74 < hot_bidders.mean() < 0.77
    sellers = of_type(events, 1, "auction")["seller"].to_numpy()
    assert 0.74 < (sellers % 100 == 0).mean() < 0.77


def test_hot_channels_and_urls(bids: pa.RecordBatch) -> None:
    channels, urls = bids["channel"], bids["url"]
    hot = pc.is_in(channels, pa.array(HOT_CHANNELS))
    assert 0.49 < pc.mean(hot.cast(pa.int8())).as_py() < 0.51
    tagged = pc.match_substring(urls, "&channel_id=")
    share = pc.mean(tagged.filter(pc.invert(hot)).cast(pa.int8())).as_py()
    assert 0.88 < share < 0.92
    assert pc.sum(tagged.filter(hot).cast(pa.int8())).as_py() == 0
    assert len(pc.unique(channels)) > 9_000
    pairs = pa.table({"c": channels, "u": urls}).group_by("c").aggregate([("u", "count_distinct")])
    assert pc.max(pairs["u_count_distinct"]).as_py() == 1


def test_bids_refer_to_recent_auctions_and_people(bids: pa.RecordBatch) -> None:
    numbers = np.arange(FIRST, FIRST + COUNT, dtype=np.int64)
    numbers = numbers[numbers % EPOCH >= 4]
    age = last_auction(numbers) + 1_000 - np.asarray(bids["auction"])
    assert age.min() >= -10
    assert age.max() <= 100
    age = last_person(numbers) + 1_000 - np.asarray(bids["bidder"])
    assert age.min() >= -10
    assert age.max() <= 1_000


def test_prices_are_log_uniform(bids: pa.RecordBatch) -> None:
    logs = np.log10(np.asarray(bids["price"])) - 2
    assert logs.min() >= 0
    assert logs.max() < 6
    counts, _ = np.histogram(logs, bins=6, range=(0, 6))
    assert abs(counts / len(logs) * 6 - 1).max() < 0.05


def test_sizes_of_events(events: pa.Table) -> None:
    extra = pc.utf8_length(of_type(events, 2, "bid")["extra"]).to_numpy()
    assert (extra.min(), extra.max()) == (54, 81)
    for code, name, average in ((0, "person", 200), (1, "auction", 500)):
        table = of_type(events, code, name)
        texts = sum(pc.utf8_length(c).to_numpy() for c in table.columns if pa.types.is_string(c.type))
        longs = 8 if name == "person" else 48
        assert abs((texts + longs).mean() - average) < average * 0.03


def test_people_have_names_cards_and_towns(events: pa.Table) -> None:
    people = of_type(events, 0, "person")
    assert pc.all(pc.match_substring_regex(people["creditCard"], r"^\d{4} \d{4} \d{4} \d{4}$")).as_py()
    assert pc.all(pc.match_substring_regex(people["emailAddress"], r"^[a-z]{3,6}@[a-z]{3,4}\.com$")).as_py()
    assert len(pc.unique(people["name"])) == 99
    assert len(pc.unique(people["city"])) == 10
    assert len(pc.unique(people["state"])) == 6
    assert people["id"].to_pylist() == list(range(1_000 + FIRST // 50, 1_000 + (FIRST + COUNT) // 50))


def test_auctions_expire_after_a_while(events: pa.Table) -> None:
    auctions = of_type(events, 1, "auction")
    open_for = pc.milliseconds_between(auctions["dateTime"], auctions["expires"]).to_numpy()
    assert open_for.min() >= 1
    assert open_for.max() <= 2 * 167 + 1
    assert pc.all(pc.less(auctions["initialBid"], auctions["reserve"])).as_py()
    assert set(auctions["category"].to_pylist()) == {10, 11, 12, 13, 14}


def test_event_time_advances_at_the_configured_rate() -> None:
    config = NexmarkConfig(rate=3)
    times = Nexmark(config).times(np.arange(0, 31, 3, dtype=np.int64))
    assert (times - config.base_time_ms).tolist() == [1_000 * second for second in range(11)]


@pytest.mark.parametrize("cuts", [(0, 1, 7, 50, 149, 150), (0, 150), (0, 75, 150)])
def test_ranges_are_independent(cuts: tuple[int, ...]) -> None:
    generator = Nexmark(NexmarkConfig(seed=9))
    whole = generator.events(1_000, 1_150)
    pieces = [generator.events(1_000 + a, 1_000 + b) for a, b in pairwise(cuts)]
    assert pa.concat_tables(pieces).to_pylist() == whole.to_pylist()


def test_chunks_do_not_change_events() -> None:
    generator = Nexmark()
    table = generator.events(0, CHUNK + 10)
    assert table.slice(CHUNK - 5).to_pylist() == generator.events(CHUNK - 5, CHUNK + 10).to_pylist()


def test_seeds_differ_and_repeat() -> None:
    a, b = (Nexmark(NexmarkConfig(seed=s)).events(0, 500) for s in (1, 2))
    assert not a.equals(b)
    assert a.equals(Nexmark(NexmarkConfig(seed=1)).events(0, 500))


def test_string_views_short_and_long() -> None:
    text = np.frombuffer(bytes(range(97, 123)) * 2, dtype=np.uint8)
    starts = np.array([0, 3, 5, 0, 1, 30], dtype=np.int64)
    sizes = np.array([0, 4, 12, 13, 26, 22], dtype=np.int64)
    whole = text.tobytes().decode()
    expected = [whole[a : a + s] for a, s in zip(starts, sizes, strict=True)]
    assert strings(views(text, starts, sizes), text).to_pylist() == expected
