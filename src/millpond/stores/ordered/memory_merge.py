"""Merging of the parts of an ordered table that are in memory."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.layout import HashRange
from millpond.stores.ordered.merge import Input, TimeInterval, merge_parts
from millpond.stores.ordered.parts import Part
from millpond.stores.ordered.time_buckets import TimeBuckets

_MERGE_RATIO = 2  # a part is merged with the smaller ones once their rows are at least 1/_MERGE_RATIO of its own


def merge_in_memory(
    parts: Sequence[Part],
    buckets: TimeBuckets,
    range_: HashRange,
    expired: int,
    *,
    max_bytes: int,
    drop_matched: bool,
    everything: bool,
) -> list[Part]:
    """Merge the small parts of each bucket that are in memory, or all of them; the state stays the same.

    Args:
        parts: the state. buckets: buckets of event time.
        range_: the hash range of the partition. expired: rows with times up to this one are dropped.
        max_bytes: bytes merged at once, at most; a merge needs twice as many.
        drop_matched: leave out matched rows.
        everything: merge all parts of a bucket, large ones too, because they are about to be written.
    """
    groups: dict[int | None, list[Part]] = {}
    kept = []
    for part in parts:
        # Parts in files, or being written to them, stay as they are.
        if part.rows is None or part.file is not None:
            kept.append(part)
        else:
            groups.setdefault(buckets.bucket_of(part), []).append(part)
    for number, group in groups.items():
        group.sort(key=lambda part: -part.count)
        unmerged = 0 if everything or (number is None and buckets.should_split(group)) else count_unmerged(group)
        while unmerged and group[unmerged - 1].expired_share(expired) > 0.5:
            unmerged -= 1
        chosen = group[unmerged:]
        kept += group[:unmerged]
        if sum(part.bytes for part in chosen) > max_bytes:
            kept += chosen
            continue
        whole = len(chosen) == 1 and number is not None
        if whole and chosen[0].expired_share(expired) <= (0.1 if everything else 0.5):
            kept += chosen
        elif chosen:
            intervals = [TimeInterval(expired)] if number is not None else buckets.intervals(chosen, expired)
            inputs, upto = [Input(part) for part in chosen], max(part.upto for part in chosen)
            kept += [
                Part(chosen[0].layout, rows, upto)
                for interval in intervals
                for rows in merge_parts(inputs, chosen[0].layout, range_, interval, drop_matched=drop_matched)
            ]
    return kept


def count_unmerged(group: Sequence[Part]) -> int:
    """Count the parts (largest first) that stay as they are: each has far more rows than all smaller ones together."""
    unmerged, smaller_rows = len(group), 0
    for number in reversed(range(len(group))):
        if smaller_rows and group[number].count <= _MERGE_RATIO * smaller_rows:
            unmerged = number
        smaller_rows += group[number].count
    return unmerged
