"""The manifests that count at a version."""

from itertools import permutations

from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.checkpoint.generation import BaseVersion, Tip
from millpond.checkpoint.resolution import latest_attempts, uncertain_places


def made(id_: str, lineage: int, partition: int = 0, attempt: int = 0) -> PartitionManifest:
    return PartitionManifest(0, partition, 5, id=id_, lineage=lineage, attempt=attempt)


def inherited(*lineages: int) -> BaseVersion:
    """A base with a tip of each lineage, in the order of the partitions."""
    tips = (Tip(0, partition, f"base{partition}", lineage, "c", 1) for partition, lineage in enumerate(lineages))
    return BaseVersion(5, tuple(tips), ((0, 32), (32, 64)))


def test_the_latest_attempt_counts_in_whatever_order():
    manifests = made("a", 1, attempt=5), made("b", 2, attempt=6), made("c", 3, attempt=6)
    other = made("d", 4, partition=1)
    for order in permutations(manifests):
        latest = latest_attempts([*order, other])
        assert latest == {(0, 0): [manifest for manifest in order if manifest.attempt == 6], (0, 1): [other]}
    assert latest_attempts([]) == {}


def test_two_lineages_are_uncertain_and_two_attempts_are_not():
    latest = latest_attempts([made("a", 1), made("b", 2), made("c", 3, 1), made("d", 3, 1)])
    assert uncertain_places(latest) == {(0, 0)}
    assert not uncertain_places(latest_attempts([made("a", 1, attempt=1), made("b", 2, attempt=2)]))


def test_the_lineage_of_the_base_counts_where_there_is_an_own_manifest():
    latest = latest_attempts([made("a", 1)])
    assert not uncertain_places(latest, inherited(1, 9))
    assert uncertain_places(latest, inherited(2, 9)) == {(0, 0)}
    assert not uncertain_places(latest, inherited())
