"""NEXMark's queries in Flink's SQL, over the views `bid`, `auction` and `person`; columns are those of the Spark ones.

Flink refuses q6, as it does in NEXMark itself: its `OVER` cannot follow rows that change.
"""

from __future__ import annotations

_DAY = "DATE_FORMAT(`dateTime`, 'yyyy-MM-dd')"
_RANKS = ("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")
_CHANNEL_ID = "REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2)"
_OPEN = "A.id = B.auction AND B.`dateTime` BETWEEN A.`dateTime` AND A.expires"
_SELL = "A.id, A.itemName, A.description, A.initialBid, A.reserve, A.`dateTime`, A.expires, A.seller, A.category"


def _by_rank(aggregate: str) -> str:
    return ", ".join([aggregate, *(f"{aggregate} FILTER (WHERE {rank})" for rank in _RANKS)])


def _tumble(table: str, time: str = "dateTime") -> str:
    return f"TABLE(TUMBLE(TABLE {table}, DESCRIPTOR(`{time}`), INTERVAL '10' SECOND))"


_SESSION = "TABLE(SESSION(TABLE bid PARTITION BY bidder, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))"


def _sessions(aggregate: str) -> str:
    columns = f"bidder, {aggregate}, window_start AS starttime, window_end AS endtime"
    return f"SELECT {columns} FROM {_SESSION} GROUP BY bidder, window_start, window_end"


def _gathered(table: str, keys: str) -> str:
    """Return SQL for the highest bids of each window, which gathers all its bids until it closes."""
    bid = "ROW(auction, price, bidder, CAST(`dateTime` AS TIMESTAMP(3)), extra)"
    return (
        f"SELECT B.*, endtime FROM (SELECT window_end AS endtime, MAX(price) AS most, ARRAY_AGG({bid}) AS bids"
        f" FROM {table} GROUP BY {keys}window_start, window_end)"
        " CROSS JOIN UNNEST(bids) AS B(auction, price, bidder, `dateTime`, extra) WHERE B.price = most"
    )


_COUNTS = _by_rank("COUNT(*)")
_DISTINCT = f"{_by_rank('COUNT(DISTINCT bidder)')}, {_by_rank('COUNT(DISTINCT auction)')}"
_HOT = (
    "SELECT auction, COUNT(*) AS num, window_start AS starttime, window_end AS endtime FROM"
    " TABLE(HOP(TABLE bid, DESCRIPTOR(`dateTime`), INTERVAL '2' SECOND, INTERVAL '10' SECOND))"
    " GROUP BY auction, window_start, window_end"
)
_HOTTEST = (
    f"SELECT H.starttime, H.endtime, H.auction, H.num FROM ({_HOT}) H JOIN"
    f" (SELECT MAX(num) AS most, starttime, endtime FROM ({_HOT}) GROUP BY starttime, endtime) M"
    " ON H.starttime = M.starttime AND H.endtime = M.endtime AND H.num >= M.most"
)
_HIGHEST = (
    "SELECT B.auction, B.price, B.bidder, B.`dateTime`, B.extra, M.endtime FROM bid B JOIN"
    f" (SELECT MAX(price) AS most, window_end AS endtime FROM {_tumble('bid')} GROUP BY window_start, window_end) M"
    " ON B.price = M.most WHERE B.`dateTime` BETWEEN M.endtime - INTERVAL '10' SECOND AND M.endtime"
)
_WINNING = (
    "SELECT id, itemName, description, initialBid, reserve, `dateTime`, expires, seller, category, extra, auction,"
    f" bidder, price, bid_dateTime, bid_extra FROM (SELECT {_SELL}, A.extra, B.auction, B.bidder, B.price,"
    " B.`dateTime` AS bid_dateTime, B.extra AS bid_extra,"
    " ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY B.price DESC, B.`dateTime` ASC) AS rank_number"
    f" FROM auction A, bid B WHERE {_OPEN}) WHERE rank_number <= 1"
)

QUERIES = {
    "q0": "SELECT auction, bidder, price, `dateTime`, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price, `dateTime`, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": (
        "SELECT P.name, P.city, P.state, A.id FROM auction A JOIN person P ON A.seller = P.id"
        " WHERE A.category = 10 AND (P.state = 'OR' OR P.state = 'ID' OR P.state = 'CA')"
    ),
    "q4": (
        "SELECT category, AVG(final) FROM (SELECT MAX(B.price) AS final, A.category"
        f" FROM auction A, bid B WHERE {_OPEN} GROUP BY A.id, A.category) GROUP BY category"
    ),
    "q5": _HOTTEST,
    "q6": (
        "SELECT id, seller, AVG(price) OVER (PARTITION BY seller ORDER BY `dateTime` ROWS BETWEEN 10 PRECEDING AND"
        " CURRENT ROW) FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY id, seller ORDER BY price DESC) AS rank_number"
        f" FROM (SELECT A.id, A.seller, B.price, B.`dateTime` FROM auction A, bid B WHERE {_OPEN}))"
        " WHERE rank_number <= 1"
    ),
    "q7": _HIGHEST,
    "q8": (
        "SELECT P.id, P.name, P.starttime, P.endtime FROM"
        f" (SELECT id, name, window_start AS starttime, window_end AS endtime FROM {_tumble('person')}"
        " GROUP BY id, name, window_start, window_end) P JOIN"
        f" (SELECT seller, window_start AS starttime, window_end AS endtime FROM {_tumble('auction')}"
        " GROUP BY seller, window_start, window_end) A"
        " ON P.id = A.seller AND P.starttime = A.starttime AND P.endtime = A.endtime"
    ),
    "q9": _WINNING,
    "q10": (
        f"SELECT auction, bidder, price, `dateTime`, extra, {_DAY} AS dt, DATE_FORMAT(`dateTime`, 'HH:mm') AS hm"
        " FROM bid"
    ),
    "q11": _sessions("COUNT(*) AS bid_count"),
    "q12": (
        "SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime FROM"
        f" {_tumble('arriving', 'arrived')} GROUP BY bidder, window_start, window_end"
    ),
    "q13": (
        "SELECT B.auction, B.bidder, B.price, B.`dateTime`, S.`value` FROM bid B,"
        " LATERAL TABLE(SIDE(CAST(MOD(B.auction, 10000) AS BIGINT))) AS S(`value`)"
    ),
    "q14": (
        "SELECT auction, bidder, 0.908 * price,"
        " CASE WHEN HOUR(`dateTime`) >= 8 AND HOUR(`dateTime`) <= 18 THEN 'dayTime'"
        " WHEN HOUR(`dateTime`) <= 6 OR HOUR(`dateTime`) >= 20 THEN 'nightTime' ELSE 'otherTime' END,"
        " `dateTime`, extra,"
        " CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) FROM bid"
        " WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000"
    ),
    "q15": f"SELECT {_DAY}, {_COUNTS}, {_DISTINCT} FROM bid GROUP BY {_DAY}",
    "q16": (
        f"SELECT channel, {_DAY}, MAX(DATE_FORMAT(`dateTime`, 'HH:mm')), {_COUNTS}, {_DISTINCT}"
        f" FROM bid GROUP BY channel, {_DAY}"
    ),
    "q17": (
        f"SELECT auction, {_DAY}, {_COUNTS}, MIN(price), MAX(price), AVG(price), SUM(price)"
        f" FROM bid GROUP BY auction, {_DAY}"
    ),
    "q18": (
        "SELECT auction, bidder, price, channel, url, `dateTime`, extra FROM (SELECT *,"
        " ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY `dateTime` DESC) AS rank_number FROM bid)"
        " WHERE rank_number <= 1"
    ),
    "q19": (
        "SELECT auction, bidder, price, channel, url, `dateTime`, extra, rank_number FROM (SELECT *,"
        " ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC) AS rank_number FROM bid)"
        " WHERE rank_number <= 10"
    ),
    "q20": (
        "SELECT B.auction, B.bidder, B.price, B.channel, B.url, B.`dateTime`, B.extra, A.itemName, A.description,"
        " A.initialBid, A.reserve, A.`dateTime`, A.expires, A.seller, A.category, A.extra"
        " FROM bid B JOIN auction A ON B.auction = A.id WHERE A.category = 10"
    ),
    "q21": (
        "SELECT auction, bidder, price, channel, CASE WHEN LOWER(channel) = 'apple' THEN '0'"
        " WHEN LOWER(channel) = 'google' THEN '1' WHEN LOWER(channel) = 'facebook' THEN '2'"
        f" WHEN LOWER(channel) = 'baidu' THEN '3' ELSE {_CHANNEL_ID} END FROM bid"
        f" WHERE {_CHANNEL_ID} IS NOT NULL OR LOWER(channel) IN ('apple', 'google', 'facebook', 'baidu')"
    ),
    "q22": (
        "SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3), SPLIT_INDEX(url, '/', 4),"
        " SPLIT_INDEX(url, '/', 5) FROM bid"
    ),
    "q23": (
        "SELECT B.bidder, B.price, B.channel, B.url, B.extra, P.id, P.name, P.emailAddress, P.creditCard, P.city,"
        " P.state, P.extra, A.itemName, A.description, A.initialBid, A.reserve, A.`dateTime`, A.expires, A.seller,"
        " A.category, A.extra FROM bid B JOIN person P ON P.id = B.bidder JOIN auction A ON A.seller = B.bidder"
    ),
    "q5-append": (
        "SELECT starttime, endtime, C.auction, C.num FROM (SELECT starttime, endtime, MAX(num) AS most,"
        f" ARRAY_AGG(ROW(auction, num)) AS counts FROM ({_HOT}) GROUP BY starttime, endtime)"
        " CROSS JOIN UNNEST(counts) AS C(auction, num) WHERE C.num = most"
    ),
    "q7-append": _gathered(_tumble("bid"), ""),
    "q7-session": _gathered(_SESSION, "bidder, "),
    "q11-median": _sessions("PERCENTILE(price, 0.5) AS median_price"),
}
