"""NEXMark's columns as Spark SQL over the event number `n`, which Spark's generated code evaluates without Python.

Draws stay outside of conditional branches: Spark shares a common subexpression only if it is always evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.nexmark.draws import bits_sql, draw_sql, letters
from benchmarks.nexmark.generator import (
    AUCTION_BYTES,
    AUCTIONS,
    BID_BYTES,
    CATEGORIES,
    CHANNELS,
    CITIES,
    EPOCH,
    FIRST_CATEGORY,
    FIRST_ID,
    FIRST_NAMES,
    HOT_BIDDER_RATIO,
    HOT_CHANNELS,
    HOT_SELLER_RATIO,
    ID_LEAD,
    LAST_NAMES,
    PERSON_BYTES,
    PERSONS,
    STATES,
    TEXT,
    Draw,
    NexmarkConfig,
    price_tables,
)

_LAST_PERSON = f"(n div {EPOCH})"
_LAST_AUCTION = (
    f"(n div {EPOCH} * {AUCTIONS} + if(n % {EPOCH} < {PERSONS}, -1, least(n % {EPOCH} - {PERSONS}, {AUCTIONS - 1})))"
)


class Columns:
    """Expressions that all kinds of events share."""

    def __init__(self, config: NexmarkConfig) -> None:
        self._config = config
        self._text = f"X'{letters(TEXT, config.seed).hex()}'"

    def _draw(self, stream: int, number: str = "n") -> str:
        return draw_sql(number, self._config.seed, stream)

    def _cut(self, start: str, size: str) -> str:
        return f"cast(substring({self._text}, cast({start} + 1 as int), cast({size} as int)) as string)"

    def _milliseconds(self, number: str = "n") -> str:
        return f"({self._config.base_time_ms}L + {number} * 1000 div {self._config.rate})"

    def _price(self, stream: int) -> str:
        drawn = self._draw(stream)
        factors = []
        for table, shift in zip(price_tables(), (14, 7, 0), strict=True):
            values = ", ".join(f"{value!r}D" for value in table.tolist())
            factors.append(f"array({values})[cast({bits_sql(drawn, shift, 7)} as int)]")
        return f"cast(floor({' * '.join(factors)} * 100.0D + 0.5D) as bigint)"

    def _hot(self, last: str) -> str:
        return f"{last} div {self._config.hot_every} * {self._config.hot_every}"

    def _any_person(self, drawn: str) -> str:
        active = f"least({_LAST_PERSON} + 1, {self._config.active_people}L)"
        return f"{_LAST_PERSON} + 1 - {active} + {drawn} % ({active} + {ID_LEAD})"

    def _extra(self, size: str, average: int) -> str:
        drawn = self._draw(Draw.EXTRA)
        missing = f"({average}L - ({size}))"
        fifth = f"(({missing} + 2) div 5)"
        return self._cut(bits_sql(drawn, 0, 11), f"({missing} - {fifth} + {bits_sql(drawn, 11, 30)} % (2 * {fifth}))")

    @property
    def time(self) -> str:
        """Event time."""
        return f"timestamp_millis({self._milliseconds()})"


class BidColumns(Columns):
    """The columns of the bid whose event number is `n`."""

    where = f"n % {EPOCH} >= {PERSONS + AUCTIONS}"

    @property
    def auction(self) -> str:
        """The bid's auction."""
        drawn = self._draw(Draw.BID_IDS)
        first = f"greatest({_LAST_AUCTION} - {self._config.in_flight_auctions}, 0L)"
        bound = f"({_LAST_AUCTION} - {first} + {1 + ID_LEAD})"
        hot = f"{bits_sql(self._draw(Draw.HOT_BID), 0, 31)} % 100 < {self._config.hot_bids}"
        hot_auction = self._hot(_LAST_AUCTION)
        return f"{FIRST_ID}L + if({hot}, {hot_auction}, {first} + {bits_sql(drawn, 3, 30)} % {bound})"

    @property
    def bidder(self) -> str:
        """The bidding person."""
        drawn = self._draw(Draw.BID_IDS)
        any_bidder = self._any_person(bits_sql(drawn, 33, 30))
        hot = f"{bits_sql(drawn, 1, 2)} % {HOT_BIDDER_RATIO} > 0"
        return f"{FIRST_ID}L + if({hot}, {self._hot(_LAST_PERSON)} + 1, {any_bidder})"

    @property
    def _channel_number(self) -> str:
        return f"({bits_sql(self._draw(Draw.CHANNEL), 1, 31)} % {CHANNELS})"

    @property
    def _hot_channel(self) -> str:
        return f"{bits_sql(self._draw(Draw.CHANNEL), 0, 1)} > 0"

    @property
    def channel(self) -> str:
        """The channel through which the bid was made."""
        names = ", ".join(f"'{name}'" for name in HOT_CHANNELS)
        hot = f"array({names})[cast({self._channel_number} % {len(HOT_CHANNELS)} as int)]"
        return f"if({self._hot_channel}, {hot}, concat('channel-', cast({self._channel_number} as string)))"

    @property
    def url(self) -> str:
        """The channel's page."""
        hot = len(HOT_CHANNELS)
        site = f"if({self._hot_channel}, {self._channel_number} % {hot}, {self._channel_number} + {hot})"
        drawn = self._draw(Draw.URL, site)
        directories = ", '/', ".join(
            self._cut(bits_sql(drawn, 12 * i, 11), f"(3 + {bits_sql(drawn, 12 * i + 11, 1)})") for i in range(3)
        )
        channel_id = bits_sql(self._draw(Draw.URL_TAIL, site), 0, 31)
        tagged = f"{site} >= {hot} and {bits_sql(drawn, 40, 16)} % 10 > 0"
        tail = f"if({tagged}, concat('&channel_id=', cast({channel_id} as string)), '')"
        return f"concat('https://www.nexmark.com/', {directories}, '/item.htm?query=1', {tail})"

    @property
    def all(self) -> dict[str, str]:
        """All columns, by name."""
        return {
            "auction": self.auction,
            "bidder": self.bidder,
            "price": self._price(Draw.PRICE),
            "channel": self.channel,
            "url": self.url,
            "dateTime": self.time,
            "extra": self._extra("32", BID_BYTES),
        }


class AuctionColumns(Columns):
    """The columns of the auction whose event number is `n`."""

    where = f"n % {EPOCH} between {PERSONS} and {PERSONS + AUCTIONS - 1}"

    @property
    def seller(self) -> str:
        """The selling person."""
        drawn = self._draw(Draw.SELLER)
        hot_seller = self._hot(_LAST_PERSON)
        any_seller = self._any_person(bits_sql(drawn, 2, 30))
        return f"{FIRST_ID}L + if({bits_sql(drawn, 0, 2)} % {HOT_SELLER_RATIO} > 0, {hot_seller}, {any_seller})"

    @property
    def expires(self) -> str:
        """End of the auction."""
        open_ = self._config.in_flight_auctions * EPOCH // AUCTIONS
        horizon = f"({self._milliseconds(f'(n + {open_})')} - {self._milliseconds()})"
        lasts = f"{self._draw(Draw.EXPIRES)} % greatest(2 * {horizon}, 1L)"
        return f"timestamp_millis({self._milliseconds()} + 1 + {lasts})"

    @property
    def all(self) -> dict[str, str]:
        """All columns, by name."""
        initial, texts = self._price(Draw.INITIAL_BID), self._draw(Draw.AUCTION_TEXTS)
        item_size, about_size = f"(3 + {bits_sql(texts, 0, 16)} % 17)", f"(3 + {bits_sql(texts, 16, 16)} % 97)"
        return {
            "id": f"{FIRST_ID}L + {_LAST_AUCTION}",
            "itemName": self._cut(bits_sql(texts, 32, 11), item_size),
            "description": self._cut(bits_sql(texts, 43, 11), about_size),
            "initialBid": initial,
            "reserve": f"{initial} + {self._price(Draw.RESERVE)}",
            "dateTime": self.time,
            "expires": self.expires,
            "seller": self.seller,
            "category": f"{FIRST_CATEGORY}L + {bits_sql(self._draw(Draw.SELLER), 32, 30)} % {CATEGORIES}",
            "extra": self._extra(f"48 + {item_size} + {about_size}", AUCTION_BYTES),
        }


class PersonColumns(Columns):
    """The columns of the person whose event number is `n`."""

    where = f"n % {EPOCH} < {PERSONS}"

    def _one_of(self, names: Sequence[str], place: int) -> str:
        listed = ", ".join(f"'{name}'" for name in names)
        picked = bits_sql(self._draw(Draw.PERSON_NAMES), 15 * place, 15)
        return f"array({listed})[cast({picked} % {len(names)} as int)]"

    @property
    def mail(self) -> str:
        """A mail address."""
        drawn = self._draw(Draw.MAIL)
        user = self._cut(bits_sql(drawn, 0, 11), f"(3 + {bits_sql(drawn, 11, 2)})")
        host = self._cut(bits_sql(drawn, 13, 11), f"(3 + {bits_sql(drawn, 24, 1)})")
        return f"concat({user}, '@', {host}, '.com')"

    @property
    def card(self) -> str:
        """A card number."""
        drawn = self._draw(Draw.CARD)
        groups = (f"lpad(cast({bits_sql(drawn, k, 15)} % 10000 as string), 4, '0')" for k in (0, 15, 30, 45))
        return f"concat_ws(' ', {', '.join(groups)})"

    @property
    def all(self) -> dict[str, str]:
        """All columns, by name."""
        first, last, city, state = (
            self._one_of(names, place) for place, names in enumerate((FIRST_NAMES, LAST_NAMES, CITIES, STATES))
        )
        texts = {
            "name": f"concat({first}, ' ', {last})",
            "emailAddress": self.mail,
            "creditCard": self.card,
            "city": city,
            "state": state,
        }
        size = " + ".join(["8", *(f"length({text})" for text in texts.values())])
        return {
            "id": f"{FIRST_ID}L + {_LAST_PERSON}",
            **texts,
            "dateTime": self.time,
            "extra": self._extra(size, PERSON_BYTES),
        }
