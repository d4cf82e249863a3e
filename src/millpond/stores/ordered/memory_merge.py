"""Merging of the parts of an ordered table that are in memory."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.layout import HashRange
from millpond.stores.ordered.merge import Input, TimeInterval, merged
from millpond.stores.ordered.parts import Part
from millpond.stores.ordered.time_buckets import TimeBuckets

_GROWTH = 2  # a part is merged with the smaller ones once their rows are at least 1/_GROWTH of its own


def merged_in_memory(
    parts: Sequence[Part],
    buckets: TimeBuckets,
    range_: HashRange,
    expired: int,
    *,
    most: int,
    drop_matched: bool,
    everything: bool,
) -> list[Part]:
    """Merge the small parts of each bucket that are in memory, or all of them; the state stays the same.

    Args:
        parts: the state. buckets: buckets of event time.
        range_: the hash range of the partition. expired: rows with times up to this one are dropped.
        most: bytes merged at once, at most; a merge needs twice as many.
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
            groups.setdefault(buckets.of(part), []).append(part)
    for number, group in groups.items():
        group.sort(key=lambda part: -part.count)
        stay = 0 if everything or (number is None and buckets.cut_up(group)) else settled(group)
        while stay and group[stay - 1].expired_share(expired) > 0.5:
            stay -= 1
        chosen = group[stay:]
        kept += group[:stay]
        if sum(part.bytes for part in chosen) > most:
            kept += chosen
            continue
        whole = len(chosen) == 1 and number is not None
        if whole and chosen[0].expired_share(expired) <= (0.1 if everything else 0.5):
            kept += chosen
        elif chosen:
            windows = [TimeInterval(expired)] if number is not None else buckets.windows(chosen, expired)
            inputs, upto = [Input(part) for part in chosen], max(part.upto for part in chosen)
            kept += [
                Part(chosen[0].layout, rows, upto)
                for window in windows
                for rows in merged(inputs, chosen[0].layout, range_, window, drop_matched=drop_matched)
            ]
    return kept


def settled(group: Sequence[Part]) -> int:
    """Count the parts (largest first) that stay as they are: each has far more rows than all smaller ones together."""
    stay, behind = len(group), 0
    for number in reversed(range(len(group))):
        if behind and group[number].count <= _GROWTH * behind:
            stay = number
        behind += group[number].count
    return stay
