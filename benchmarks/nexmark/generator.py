"""NEXMark events as Arrow record batches: any range of event numbers, vectorised and reproducible.

Proportions, hot ratios, identifiers, prices and inter-event times are those of the NEXMark generator for Flink. Draws
come from `draws`, so that `spark` computes the same events inside Spark. Two differences are deliberate. A
bidder's identifier starts at 1,000 like a person's (in Flink's it is 2,000, which no join finds). Random text is cut
from a fixed text.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from benchmarks.nexmark.draws import Longs, bits, draw, letters

PERSONS, AUCTIONS, BIDS = 1, 3, 46
EPOCH = PERSONS + AUCTIONS + BIDS
FIRST_ID = 1_000
FIRST_CATEGORY, CATEGORIES = 10, 5
ID_LEAD = 10
HOT_BIDDER_RATIO, HOT_SELLER_RATIO = 4, 4
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
CHANNELS = 10_000
PERSON_BYTES, AUCTION_BYTES, BID_BYTES = 200, 500, 100
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
CITIES = (
    *("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland"),
    *("Bend", "Redmond", "Seattle", "Kent", "Cheyenne"),
)
STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
STARTS, TEXT = 2_048, 2_048 + 640
PRICE_STEPS = 128
CHUNK = 65_536


class Draw:
    """Stream numbers of draws. A draw has 63 bits, enough for several columns."""

    BID_IDS, PRICE, CHANNEL, EXTRA, URL, URL_TAIL, HOT_BID = range(1, 8)
    PERSON_NAMES, CARD, MAIL = range(10, 13)
    SELLER, INITIAL_BID, RESERVE, AUCTION_TEXTS, EXPIRES = range(20, 25)


class NexmarkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the stream.

    Attributes:
        seed: seed of all draws.
        rate: events per second of event time.
        base_time_ms: event time of event 0, in milliseconds since the epoch (default: 2015-07-15 00:00 UTC).
        in_flight_auctions: number of the newest auctions that may be bid on.
        active_people: number of the newest people who may bid.
        hot_every: one in `hot_every` auctions, and people, is hot; the newest one gets, or makes, most of the bids.
        hot_bids: percentage of bids on the hot auction.
    """

    seed: int = 1
    rate: int = 10_000
    base_time_ms: int = 1_436_918_400_000
    in_flight_auctions: int = 100
    active_people: int = 1_000
    hot_every: int = 100
    hot_bids: int = 50


_TIME = pa.timestamp("us", tz="UTC")
PERSON = pa.struct(
    [
        *(("id", pa.int64()), ("name", pa.string()), ("emailAddress", pa.string()), ("creditCard", pa.string())),
        *(("city", pa.string()), ("state", pa.string()), ("dateTime", _TIME), ("extra", pa.string())),
    ]
)
AUCTION = pa.struct(
    [
        *(("id", pa.int64()), ("itemName", pa.string()), ("description", pa.string()), ("initialBid", pa.int64())),
        *(("reserve", pa.int64()), ("dateTime", _TIME), ("expires", _TIME), ("seller", pa.int64())),
        *(("category", pa.int64()), ("extra", pa.string())),
    ]
)
BID = pa.struct(
    [
        *(("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()), ("channel", pa.string())),
        *(("url", pa.string()), ("dateTime", _TIME), ("extra", pa.string())),
    ]
)
EVENT_SCHEMA = pa.schema([("event_type", pa.int32()), ("person", PERSON), ("auction", AUCTION), ("bid", BID)])


def price_tables() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Make three tables whose product is 10^(6u), u of 21 bits.

    Unlike powers, products of doubles are equal on all platforms.
    """
    steps = np.arange(PRICE_STEPS, dtype=np.float64)
    coarse, middle, fine = (np.power(10.0, 6.0 * steps / PRICE_STEPS**k) for k in (1, 2, 3))
    return coarse, middle, fine


def last_person(numbers: Longs) -> Longs:
    """Return the number of the newest person at each event, counted from 0."""
    return numbers // EPOCH


def last_auction(numbers: Longs) -> Longs:
    """Return the number of the newest auction at each event, counted from 0; −1 before the first."""
    position = numbers % EPOCH
    return numbers // EPOCH * AUCTIONS + np.where(position < PERSONS, -1, np.minimum(position - PERSONS, AUCTIONS - 1))


class Nexmark:
    """Generator of the stream of one configuration."""

    def __init__(self, config: NexmarkConfig | None = None) -> None:
        self.config = config or NexmarkConfig()
        seed = self.config.seed
        self._text = np.frombuffer(letters(TEXT, seed), dtype=np.uint8)
        self._prices = price_tables()
        self._channels = Pool([*HOT_CHANNELS, *(f"channel-{i}" for i in range(CHANNELS))])
        self._urls = Pool(self._make_urls())

    def _draw(self, numbers: Longs, stream: int) -> Longs:
        return draw(numbers, self.config.seed, stream)

    def _make_urls(self) -> list[str]:
        """Make the URL of every channel, the four hot ones first."""
        sites = np.arange(len(HOT_CHANNELS) + CHANNELS, dtype=np.int64)
        text = self._text.tobytes().decode()
        drawn, tail = self._draw(sites, Draw.URL), self._draw(sites, Draw.URL_TAIL)
        directories = []
        for i in range(3):
            starts, sizes = bits(drawn, 12 * i, 11), 3 + bits(drawn, 12 * i + 11, 1)
            directories.append(
                [text[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
            )
        tagged = (sites >= len(HOT_CHANNELS)) & (bits(drawn, 40, 16) % 10 > 0)
        tails = [
            f"&channel_id={i}" if t else "" for i, t in zip(bits(tail, 0, 31).tolist(), tagged.tolist(), strict=True)
        ]
        return [
            f"https://www.nexmark.com/{a}/{b}/{c}/item.htm?query=1{tail}"
            for a, b, c, tail in zip(*directories, tails, strict=True)
        ]

    def times(self, numbers: Longs) -> Longs:
        """Return event times in milliseconds since the epoch."""
        times: Longs = self.config.base_time_ms + numbers * 1_000 // self.config.rate
        return times

    def _price(self, numbers: Longs, stream: int) -> Longs:
        """Draw prices in cents: log-uniform from 1 to 1,000,000 dollars."""
        drawn = self._draw(numbers, stream)
        coarse, middle, fine = self._prices
        power = coarse[bits(drawn, 14, 7)] * middle[bits(drawn, 7, 7)] * fine[bits(drawn, 0, 7)]
        cents: Longs = np.floor(power * 100.0 + 0.5).astype(np.int64)
        return cents

    def _person_id(self, numbers: Longs, drawn: Longs) -> Longs:
        people = last_person(numbers) + 1
        active = np.minimum(people, self.config.active_people)
        people_ids: Longs = people - active + drawn % (active + ID_LEAD)
        return people_ids

    def _cut(self, starts: Longs, sizes: Longs) -> pa.Array:
        """Cut strings of given sizes from given positions of the text."""
        return strings(views(self._text, starts, sizes), self._text)

    def _extra(self, numbers: Longs, size: Longs | int, average: int) -> pa.Array:
        """Make padding that brings events of `size` bytes to `average`, with a variation of a fifth of the padding."""
        drawn = self._draw(numbers, Draw.EXTRA)
        missing = average - size
        fifth = (missing + 2) // 5
        return self._cut(bits(drawn, 0, 11), missing - fifth + bits(drawn, 11, 30) % (2 * fifth))

    def bids(self, numbers: Longs) -> pa.RecordBatch:
        """Make the bids with these event numbers (int64[n], all of them bids), as columns."""
        drawn = self._draw(numbers, Draw.BID_IDS)
        last = last_auction(numbers)
        every = self.config.hot_every
        first = np.maximum(last - self.config.in_flight_auctions, 0)
        any_auction = first + bits(drawn, 3, 30) % (last - first + 1 + ID_LEAD)
        hot = bits(self._draw(numbers, Draw.HOT_BID), 0, 31) % 100 < self.config.hot_bids
        auction = FIRST_ID + np.where(hot, last // every * every, any_auction)
        hot = bits(drawn, 1, 2) % HOT_BIDDER_RATIO > 0
        hot_bidder = last_person(numbers) // every * every + 1
        bidder = FIRST_ID + np.where(hot, hot_bidder, self._person_id(numbers, bits(drawn, 33, 30)))
        drawn = self._draw(numbers, Draw.CHANNEL)
        channel = bits(drawn, 1, 31) % CHANNELS
        site = np.where(bits(drawn, 0, 1) > 0, channel % len(HOT_CHANNELS), channel + len(HOT_CHANNELS))
        columns = [
            *(pa.array(auction), pa.array(bidder), pa.array(self._price(numbers, Draw.PRICE))),
            *(self._channels.pick(site), self._urls.pick(site), self._timestamps(self.times(numbers))),
            self._extra(numbers, 32, BID_BYTES),
        ]
        return pa.record_batch(columns, names=BID.names)

    def auctions(self, numbers: Longs) -> pa.RecordBatch:
        """Make the auctions with these event numbers."""
        drawn = self._draw(numbers, Draw.SELLER)
        hot_seller = last_person(numbers) // self.config.hot_every * self.config.hot_every
        any_seller = self._person_id(numbers, bits(drawn, 2, 30))
        seller = FIRST_ID + np.where(bits(drawn, 0, 2) % HOT_SELLER_RATIO > 0, hot_seller, any_seller)
        category = FIRST_CATEGORY + bits(drawn, 32, 30) % CATEGORIES
        initial = self._price(numbers, Draw.INITIAL_BID)
        now = self.times(numbers)
        horizon = self.times(numbers + self.config.in_flight_auctions * EPOCH // AUCTIONS) - now
        expires = now + 1 + self._draw(numbers, Draw.EXPIRES) % np.maximum(2 * horizon, 1)
        drawn = self._draw(numbers, Draw.AUCTION_TEXTS)
        item_size, about_size = 3 + bits(drawn, 0, 16) % 17, 3 + bits(drawn, 16, 16) % 97
        columns = [
            pa.array(FIRST_ID + last_auction(numbers)),
            self._cut(bits(drawn, 32, 11), item_size),
            self._cut(bits(drawn, 43, 11), about_size),
            *(pa.array(initial), pa.array(initial + self._price(numbers, Draw.RESERVE))),
            *(self._timestamps(now), self._timestamps(expires), pa.array(seller), pa.array(category)),
            self._extra(numbers, 48 + item_size + about_size, AUCTION_BYTES),
        ]
        return pa.record_batch(columns, names=AUCTION.names)

    def persons(self, numbers: Longs) -> pa.RecordBatch:
        """Make the persons with these event numbers."""
        drawn = self._draw(numbers, Draw.PERSON_NAMES)
        picked = [
            pa.array(names).take(pa.array(bits(drawn, 15 * i, 15) % len(names)))
            for i, names in enumerate((FIRST_NAMES, LAST_NAMES, CITIES, STATES))
        ]
        name = pc.binary_join_element_wise(picked[0], picked[1], " ")
        drawn = self._draw(numbers, Draw.MAIL)
        user = self._cut(bits(drawn, 0, 11), 3 + bits(drawn, 11, 2))
        host = self._cut(bits(drawn, 13, 11), 3 + bits(drawn, 24, 1))
        mail = pc.binary_join_element_wise(pc.binary_join_element_wise(user, host, "@"), "com", ".")
        drawn = self._draw(numbers, Draw.CARD)
        groups = [
            pc.utf8_lpad(pa.array(bits(drawn, k, 15) % 10_000).cast(pa.string()), 4, "0") for k in (0, 15, 30, 45)
        ]
        card = pc.binary_join_element_wise(*groups, " ")
        lengths = (np.asarray(pc.binary_length(c)).astype(np.int64) for c in (name, mail, card, picked[2], picked[3]))
        columns = [
            *(pa.array(FIRST_ID + last_person(numbers)), name, mail, card, picked[2], picked[3]),
            *(self._timestamps(self.times(numbers)), self._extra(numbers, 8 + sum(lengths), PERSON_BYTES)),
        ]
        return pa.record_batch(columns, names=PERSON.names)

    @staticmethod
    def _timestamps(milliseconds: Longs) -> pa.Array:
        return pa.array(milliseconds * 1_000).cast(_TIME)

    def events(self, start: int, stop: int) -> pa.Table:
        """Make events `start` to `stop` − 1, in order (`EVENT_SCHEMA`), in chunks that fit the CPU cache."""
        edges = [*range(start, stop, CHUNK), stop]
        pieces = [self.numbered(np.arange(a, b, dtype=np.int64)) for a, b in pairwise(edges)]
        return pa.Table.from_batches(pieces, EVENT_SCHEMA)

    def numbered(self, numbers: Longs) -> pa.RecordBatch:
        """Make the events with these numbers (int64[n], in any order), in the given order."""
        position = numbers % EPOCH
        kind = (position >= PERSONS).astype(np.int32) + (position >= PERSONS + AUCTIONS)
        person, auction, bid = (kind == code for code in range(3))
        # Nearly every event is a bid, so making bids of all rows and masking the others is cheaper than scattering
        # bids.
        bids = pa.StructArray.from_arrays(self.bids(numbers).columns, fields=list(BID), mask=pa.array(~bid))
        persons = spread(self.persons(numbers[person]), person, PERSON)
        auctions = spread(self.auctions(numbers[auction]), auction, AUCTION)
        return pa.record_batch([pa.array(kind, pa.int32()), persons, auctions, bids], schema=EVENT_SCHEMA)


def views(text: NDArray[np.uint8], starts: Longs, sizes: Longs) -> NDArray[np.int32]:
    """Make Arrow's 16-byte string views of slices of a text: size, first four bytes, buffer (0), offset.

    Slices of up to 12 bytes are stored in the view itself, padded with zeros.
    """
    out = np.zeros((len(starts), 4), dtype=np.int32)
    out[:, 0] = sizes
    padded = np.concatenate([text, np.zeros(16, dtype=np.uint8)])
    out[:, 1] = np.lib.stride_tricks.sliding_window_view(padded, 4)[starts].view(np.int32)[:, 0]
    out[:, 3] = starts
    short = np.flatnonzero(sizes <= 12)
    if len(short):
        inline = np.lib.stride_tricks.sliding_window_view(padded, 12)[starts[short]]
        inline[np.arange(12) >= sizes[short, None]] = 0
        out[short, 1:] = inline.view(np.int32)
    return out


def strings(string_views: NDArray[np.int32], text: NDArray[np.uint8]) -> pa.Array:
    """Copy the strings behind views. Arrow's cast copies much faster than NumPy can."""
    buffers = [None, pa.py_buffer(string_views), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string_view(), len(string_views), buffers).cast(pa.string())


class Pool:
    """A pool of a few thousand strings to pick from repeatedly."""

    def __init__(self, values: list[str]) -> None:
        sizes = np.array([len(v) for v in values], dtype=np.int64)
        self._text = np.frombuffer("".join(values).encode(), dtype=np.uint8)
        self._views = views(self._text, np.cumsum(sizes) - sizes, sizes)

    def pick(self, places: Longs) -> pa.Array:
        """Return the strings at the given positions."""
        return strings(self._views[places], self._text)


def spread(rows: pa.RecordBatch, chosen: NDArray[np.bool_], type_: pa.StructType) -> pa.StructArray:
    """Scatter `rows`, in order, to where `chosen` is true; other entries are null (their fields zero or empty)."""
    places = np.flatnonzero(chosen)
    fields = []
    for column in rows.columns:
        if pa.types.is_string(column.type):
            _, offsets, data = column.buffers()
            wide = np.zeros(len(chosen) + 1, dtype=np.int32)
            wide[places + 1] = np.diff(np.frombuffer(offsets, dtype=np.int32, count=len(column) + 1))
            np.cumsum(wide, out=wide)
            fields.append(pa.StringArray.from_buffers(len(chosen), pa.py_buffer(wide), data))
        else:
            longs = np.zeros(len(chosen), dtype=np.int64)
            longs[places] = np.frombuffer(column.buffers()[1], dtype=np.int64, count=len(column))
            fields.append(pa.Array.from_buffers(column.type, len(chosen), [None, pa.py_buffer(longs)]))
    return pa.StructArray.from_arrays(fields, fields=list(type_), mask=pa.array(~chosen))
