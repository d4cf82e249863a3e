import threading

import pytest

from millpond.checkpoint.formats.commit import commit_name
from millpond.checkpoint.generation import (
    RESCALE_RUN,
    Base,
    base_name,
    check_fence,
    check_newest_base,
    claim,
    claim_name,
    claimed_generations,
    deciding_claim,
    fenced_name,
    read_base,
    read_claim,
    write_base,
)
from millpond.errors import FencedError, SettingError, StateDamagedError, TransientError
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.faults import Faults, FaultyFiles
from millpond.key_groups import split_key_groups
from tests.checkpoint.rig import begin, memory


def test_numbers_rise_and_fence():
    files = memory()
    first, second = (claim(files, run=r, partitions=3, key_groups=8) for r in "ab")
    assert (first.number, second.number) == (1, 2)
    assert read_claim(files, 1).ranges == ((0, 3), (3, 6), (6, 8))
    check_fence(files, 2)
    with pytest.raises(FencedError, match="Generation 2"):
        check_fence(files, 1)


def test_a_claim_of_the_time_is_behind_all_before_it():
    """So a run whose checkpoint was deleted is older than the run that has begun in its place."""
    files = memory()
    first = claim(files, run="a", partitions=1, minimum=1_700_000_000_000)
    second = claim(files, run="b", partitions=1, minimum=1_600_000_000_000)
    assert (first.number, second.number) == (1_700_000_000_000, 1_700_000_000_001)
    assert claimed_generations(files) == [first.number, second.number]


def test_fence_holds_when_the_next_generation_has_been_collected():
    files = memory()
    for run in "abc":
        claim(files, run=run, partitions=1)
    files.delete(claim_name(2))
    with pytest.raises(FencedError):
        check_fence(files, 1)


def test_the_fence_is_looked_at_without_a_list():
    files = memory()
    claim(files, run="a", partitions=1)
    counted = FaultyFiles(files, Faults())
    check_fence(counted, 1)
    assert counted.requests == {"head": 2}
    claim(files, run="b", partitions=1)
    assert files.exists(fenced_name(1))
    assert not files.exists(fenced_name(2))


def test_of_two_claims_at_once_the_lower_one_is_fenced():
    class Overtaken:
        """Before a claim of it is put, another run claims a higher number."""

        def __init__(self):
            self.first = True

        def __getattr__(self, name):
            return getattr(files, name)

        def put(self, name, data, *, create=False, sync=True):
            if self.first:
                self.first = False
                assert claim(files, run="b", partitions=1, minimum=10).number == 10
            files.put(name, data, create=create, sync=sync)

    files = memory()
    assert claim(Overtaken(), run="a", partitions=1).number == 1
    with pytest.raises(FencedError, match="Generation 10"):
        check_fence(files, 1)
    check_fence(files, 10)


def test_a_run_whose_checkpoint_was_deleted_is_fenced():
    files = memory()
    first = claim(files, run="a", partitions=1, minimum=1000)
    for info in files.list(""):
        files.delete(info.name)
    check_fence(files, first.number)  # no other run has begun in its place
    claim(files, run="b", partitions=1, minimum=2000)
    with pytest.raises(FencedError, match="Generation 2000"):
        check_fence(files, first.number)


@pytest.mark.parametrize("partitions", [1, 3, 7, 200])
def test_ranges_are_those_of_the_hash(partitions):
    ranges = split_key_groups(partitions)
    for group in range(0, 1 << 15, 97):
        first, stop = ranges[group * partitions >> 15]
        assert first <= group < stop


def test_racing_claims_get_different_numbers():
    files = memory()
    claims = []
    threads = [threading.Thread(target=lambda: claims.append(claim(files, run="r", partitions=1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(c.number for c in claims) == claimed_generations(files) == list(range(1, 9))
    check_fence(files, 8)
    for number in range(1, 8):
        with pytest.raises(FencedError):
            check_fence(files, number)


def test_claim_survives_puts_of_unknown_outcome():
    files = memory()
    for seed in range(20):
        faulty = FaultyFiles(files, Faults(fail=0.3, torn=0.2, repeat=0.2, retries=20, seed=seed))
        before = claimed_generations(files)
        try:
            number = claim(faulty, run="r", partitions=1).number
        except TransientError:
            continue
        assert read_claim(files, number).run == "r"
        for older in before:
            with pytest.raises(FencedError):
                check_fence(files, older)
        assert number > max(before, default=0)


class Overwriting(CountedFiles):
    """A store that takes the condition of a put and ignores it."""

    def put(self, name, data, *, create=False, sync=True):
        super().put(name, data, sync=sync)


def test_a_store_that_ignores_put_if_absent_is_refused():
    files = Overwriting(memory())
    for start in range(2):
        with pytest.raises(SettingError, match="If-None-Match"):
            claim(files, run="r", partitions=1)
        assert files.counts()["puts"] == 2 * (start + 1), "the claim, and once more"


def test_a_claim_that_a_newer_run_has_removed_says_so():
    files = memory()

    class Overtaken(CountedFiles):
        def put(self, name, data, *, create=False, sync=True):
            super().put(name, data, create=create, sync=sync)
            if name == claim_name(1) and not files.exists(claim_name(2)):
                claim(files, run="newer", partitions=1)
                files.delete(claim_name(1))

    with pytest.raises(FencedError, match="Generation 2"):
        claim(Overtaken(files), run="older", partitions=1)


def test_altered_claim_and_base_are_named():
    files = memory()
    begin(files)
    for name, read in ((claim_name(1), read_claim), ("generations/000000000000001.base.json", read_base)):
        data = files.get(name)
        files.put(name, [data.replace(b"1", b"2", 1)])
        with pytest.raises(StateDamagedError, match=name):
            read(files, 1)
        files.put(name, [data[:-30]])
        with pytest.raises(StateDamagedError, match=name):
            read(files, 1)


def test_a_torn_claim_decides_nothing():
    files = memory()
    assert deciding_claim(files) is None
    claim(files, run=RESCALE_RUN, partitions=5)
    files.put(claim_name(2), [b'{"number'])
    assert deciding_claim(files).partitions == 5


def test_only_runs_and_rescales_decide_the_number_of_partitions():
    files = memory()

    def decided() -> int | None:
        claimed = deciding_claim(files)
        return None if claimed is None else claimed.partitions

    claim(files, run="refused", partitions=2, key_groups=64)
    assert decided() is None
    run, _ = begin(files, 0, partitions=3)
    assert decided() == 3
    files.put(commit_name(1, run.number, "slot", 0), [b"commit"])
    claim(files, run="refused", partitions=4, key_groups=64)
    write_base(files, Base(claim(files, run="failed", partitions=5, key_groups=64).number, 1, ()))
    assert decided() == 3
    claim(files, run=RESCALE_RUN, partitions=6, key_groups=64)
    claim(files, run="refused", partitions=7, key_groups=64)
    assert decided() == 6
    last = claim(files, run="last", partitions=8, key_groups=64)
    files.put(commit_name(2, last.number, "slot", 0), [b"commit"])
    assert decided() == 8


def test_newest_commits_need_their_base_or_a_newer_one():
    files = memory()
    for committed, begun in (([], []), ([], [1]), ([2, 1], [1, 2]), ([1, 3], [2, 4])):
        check_newest_base(files, committed, begun)
    with pytest.raises(StateDamagedError, match="is gone") as raised:
        check_newest_base(files, [1, 3], [1, 2])
    assert raised.value.file == files.locate(base_name(3))
