import pytest

from millpond.checkpoint.formats.commit import commit_name
from millpond.checkpoint.generation import base_name, claim, claim_name, read_base
from millpond.checkpoint.recovery import Recovery
from millpond.errors import StateDamagedError, StateIncompatibleError
from tests.checkpoint.rig import Slot, begin, litter, memory


def run(files, generation, tmp_path, versions, *, start=0, partitions=(0, 1), data=b"x"):
    """A slot that takes partitions from version `start` to `versions`."""
    slot = Slot(files, generation, tmp_path)
    for partition in partitions:
        manifest = slot.open(partition, start)
        for version in range(start + 1, versions + 1):
            manifest = slot.seal(manifest, data + b"%d" % version).manifest
    slot.settle()
    return slot


def look(files, **options):
    return Recovery(files, claim(files, run="look", partitions=2, key_groups=64), operators=1, **options)


def test_durable_is_what_every_partition_has(tmp_path):
    files = memory()
    generation, first = begin(files)
    assert first.newest() == 0
    assert first.durable(0)
    assert not first.durable(1)
    run(files, generation.number, tmp_path, 3)
    run(files, generation.number, tmp_path, 4, start=3, partitions=(0,))
    recovery = look(files)
    assert [recovery.durable(v) for v in range(6)] == [True] * 4 + [False] * 2
    assert recovery.missing(4) == [(0, 1)]
    assert recovery.newest() == 3


def test_every_operator_counts(tmp_path):
    files = memory()
    generation, _ = begin(files, operators=2)
    run(files, generation.number, tmp_path, 1)
    recovery = Recovery(files, claim(files, run="r", partitions=2, key_groups=64), operators=2)
    assert recovery.missing(1) == [(1, 0), (1, 1)]


def test_contradicting_attempts_are_not_durable(tmp_path):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 2)
    for data in (b"same", b"same"):
        run(files, generation.number, tmp_path, 3, start=2, data=data)
    assert look(files).newest() == 3
    generation, _ = begin(files, 2)
    run(files, generation.number, tmp_path, 3, start=2, data=b"one")
    run(files, generation.number, tmp_path, 3, start=2, partitions=(1,), data=b"another")
    recovery = look(files)
    assert recovery.missing(3) == [(0, 1)]
    assert recovery.newest() == 2


@pytest.mark.parametrize("first", [5, 7])
def test_the_last_attempt_counts_whatever_it_read(tmp_path, first):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 2)
    for attempt, data in ((first, b"one"), (6, b"another")):
        slot = Slot(files, generation.number, tmp_path)
        for partition in (0, 1):
            slot.seal(slot.open(partition, 2), data, attempt=attempt)
        slot.settle()
    last = b"one" if first > 6 else b"another"
    reader = Slot(files, generation.number, tmp_path)
    assert reader.read(reader.open(0, 3))[-1] == last
    generation, recovery = begin(files)
    assert recovery.newest() == 3
    reader = Slot(files, generation.number, tmp_path)
    assert [reader.read(reader.open(partition, 3))[-1] for partition in (0, 1)] == [last, last]


def test_late_commit_of_an_older_run_is_ignored(tmp_path):
    files = memory()
    old, _ = begin(files)
    run(files, old.number, tmp_path, 2)
    late = Slot(files, old.number, tmp_path)
    sealed = [late.seal(late.open(p, 2), b"late") for p in (0, 1)]
    begin(files, 2)  # builds on version 2
    for number, one in enumerate(sealed):  # the old run's puts arrive now; they are never acknowledged
        late.checkpoint.put_commit(late.name, number, [(one, late.checkpoint.parent_of(one.manifest))])
    recovery = look(files)
    assert not recovery.durable(3)
    assert recovery.newest() == 2
    generation, _ = begin(files, 2)
    assert (
        run(files, generation.number, tmp_path, 3, start=2, data=b"new").open(0, 3).lineage
        != sealed[0].manifest.lineage
    )


def test_a_run_that_died_before_it_began_is_skipped(tmp_path):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 2)
    claim(files, run="dies", partitions=2, key_groups=64)
    claim(files, run="dies too", partitions=2, key_groups=64)
    files.put("generations/000003.base.json", [b'{"gener'])
    assert look(files).newest() == 2


def test_altered_base_of_a_run_with_commits_is_refused(tmp_path):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 2)
    name = "generations/000000000000001.base.json"
    files.put(name, [files.get(name).replace(b'"version":0', b'"version":2')])
    with pytest.raises(StateDamagedError, match=name):
        look(files)


def test_commits_without_their_run_are_not_passed_over(tmp_path):
    """Version 3 of the first run is another one than that of the run whose base is gone."""
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 3)
    generation, _ = begin(files, 2)
    run(files, generation.number, tmp_path, 3, start=2, data=b"other")
    base = files.get(base_name(generation.number))
    files.delete(base_name(generation.number))
    for find in (look, Recovery):
        with pytest.raises(StateDamagedError, match=rf"The file {base_name(generation.number)}.* is gone") as raised:
            find(files)
        assert raised.value.file == files.locate(base_name(generation.number))
    assert look(files, from_scratch=True).newest() == 0
    files.put(base_name(generation.number), [base])
    assert look(files).newest() == 3


def test_claim_comes_before_the_listing(tmp_path):
    # A commit that is acknowledged is seen by every later start: either its run was fenced, or it is in the listing.
    files = memory()
    generation, _ = begin(files)
    slot = Slot(files, generation.number, tmp_path)
    for partition in (0, 1):
        slot.seal(slot.open(partition, 0), b"x")
    recovery = look(files)
    assert recovery.newest() == 0
    slot.settle()
    assert slot.committer.stats.commits == 0, "acknowledged, though the new run does not see it"


def test_base_keeps_a_planned_batch_s_version(tmp_path):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 3)
    look(files).write_base([2, 3])
    again = look(files)
    assert again.durable(2)
    assert again.durable(3)
    assert again.newest() == 3


def test_half_repeated_batch_with_other_input_is_not_durable(tmp_path):
    # Version 3 is part of the base; its batch ran again, with other input, in one partition only.
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 3)
    recovery = look(files)
    recovery.write_base([2, 3])
    run(files, recovery.generation.number, tmp_path, 3, start=2, partitions=(0,), data=b"other")
    half = Recovery(files)
    assert half.missing(3) == [(0, 0)]
    assert half.durable(2)
    run(files, recovery.generation.number, tmp_path, 3, start=2, partitions=(1,), data=b"other")
    assert Recovery(files).durable(3)


def test_half_repeated_batch_with_the_same_input_is_durable(tmp_path):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 3)
    recovery = look(files)
    recovery.write_base([2, 3])
    run(files, recovery.generation.number, tmp_path, 3, start=2, partitions=(0,))
    assert look(files).durable(3)


def test_older_versions_are_found_in_older_runs(tmp_path):
    files = memory()
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        generation, _ = begin(files, start)
        run(files, generation.number, tmp_path, stop, start=start)
    recovery = Recovery(files)
    assert [recovery.durable(version) for version in range(1, 8)] == [True] * 6 + [False]
    assert (recovery.operators, len(recovery.ranges(3))) == (1, 2)
    manifest = recovery.manifest(0, 1, 4)
    assert (manifest.version, manifest.partition) == (4, 1)
    with pytest.raises(ValueError, match="claimed"):
        recovery.write_base([6])


def test_damaged_commits_are_named(tmp_path):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 1)
    (info,) = files.list("commits/")
    files.put(info.name, [files.get(info.name)[:-1]])
    recovery = look(files)
    assert recovery.missing(1) == [(0, 0), (0, 1)]
    assert recovery.damaged == {files.locate(info.name)}


@pytest.mark.parametrize("wrong", ["version", "generation", "slot"])
def test_commit_under_a_wrong_name_is_refused(tmp_path, wrong):
    files = memory()
    generation, _ = begin(files)
    run(files, generation.number, tmp_path, 3)
    generation, _ = begin(files, 2)
    run(files, generation.number, tmp_path, 4, start=2, data=b"other")
    *_, earlier_run, commit, later_version = (info.name for info in files.list("commits/"))
    source, name = {
        "version": (later_version, commit),
        "generation": (earlier_run, commit),
        "slot": (commit, commit_name(3, generation.number, "another", 0)),
    }[wrong]
    files.put(name, [files.get(source)])
    recovery = Recovery(files)
    with pytest.raises(StateDamagedError, match="has a wrong name: it was written for version") as raised:
        recovery.durable(3)
    assert (raised.value.file, raised.value.version) == (files.locate(name), 3)
    assert recovery.durable(2)


def test_commit_of_a_base_under_a_wrong_name_is_refused(tmp_path):
    files = memory()
    generation, _ = begin(files)
    for partition in (0, 1):
        run(files, generation.number, tmp_path, 1, partitions=(partition,))
    generation, _ = begin(files)
    commit, other = files.list("commits/")
    assert commit.size == other.size, "the size in the base shows nothing"
    files.put(commit.name, [files.get(other.name)])
    with pytest.raises(StateDamagedError, match="has a wrong name") as raised:
        Recovery(files).manifests(1)
    assert raised.value.file == files.locate(commit.name)
    (base,) = read_base(files, generation.number).versions
    (tip,) = (tip for tip in base.tips if tip.commit == commit.name)
    with pytest.raises(StateDamagedError, match="has a wrong name") as raised:
        Slot(files, generation.number, tmp_path).open(tip.partition, 1)
    assert (raised.value.file, raised.value.version) == (files.locate(commit.name), 1)
    assert (raised.value.operator, raised.value.partition) == ("0", tip.partition)


@pytest.mark.parametrize("name_of", [base_name, claim_name])
def test_generation_file_under_a_wrong_name_is_refused(tmp_path, name_of):
    files = memory()
    for start in (0, 2):
        generation, _ = begin(files, start)
        run(files, generation.number, tmp_path, start + 2, start=start)
    name = name_of(generation.number)
    files.put(name, [files.get(name_of(generation.number - 1))])
    for find in (look, Recovery, lambda files: Slot(files, generation.number, tmp_path)):
        with pytest.raises(StateDamagedError, match="has a wrong name: it was written for generation 1") as raised:
            find(files)
        assert raised.value.file == files.locate(name)


def test_only_durable_versions_can_begin(tmp_path):
    with pytest.raises(ValueError, match="Version 4"):
        look(memory()).write_base([4])


def test_other_key_groups_are_refused_with_both_numbers(tmp_path):
    files = memory()
    begin(files)
    with pytest.raises(StateIncompatibleError, match=r"has 64 key groups; this version of Millpond has 128"):
        Recovery(files, claim(files, run="r", partitions=2, key_groups=128), operators=1)


def test_foreign_files_beside_the_commits_are_passed_over(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot = run(files, generation.number, tmp_path, 3)
    litter(files)
    assert slot.checkpoint.has_commits_from(3)
    assert not slot.checkpoint.has_commits_from(4)
    assert Slot(files, generation.number, tmp_path).open(0, 3).version == 3
    recovery = look(files)
    assert recovery.newest() == 3
    assert not recovery.damaged
