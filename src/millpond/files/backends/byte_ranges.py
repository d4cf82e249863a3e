"""Coalescing of byte ranges of one object into requests."""

from __future__ import annotations

from collections.abc import Sequence

MAX_GAP_BYTES = 1 << 20
"""Largest gap in bytes between two ranges that are fetched in one request."""


def group_ranges(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group `(offset, length)` ranges by request.

    Returns:
        For each request, the positions of its ranges in `ranges`, in order of offsets.
    """
    groups: list[list[int]] = []
    end = 0
    for i in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, length = ranges[i]
        if groups and offset - end <= MAX_GAP_BYTES:
            groups[-1].append(i)
        else:
            groups.append([i])
            end = offset
        end = max(end, offset + length)
    return groups


def coalesce_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Coalesce `(offset, length)` ranges: near ranges become one, including the gaps between them."""
    requests = []
    for group in group_ranges(ranges):
        begin = ranges[group[0]][0]
        requests.append((begin, max(sum(ranges[i]) for i in group) - begin))
    return requests
