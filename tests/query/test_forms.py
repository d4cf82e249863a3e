"""The form of an exchange, batch by batch, as the figures of the batch before suggest."""

from __future__ import annotations

import pytest

from millpond.query.running.forms import FormChoice


def figures(
    rows: int, exchanged: int = 0, changed: int = 0, misses: int = 0, *, combined: bool = False
) -> dict[str, float]:
    return {
        "input_rows": rows,
        "exchanged_rows": exchanged,
        "combined_rows": 0 if exchanged in (0, rows) and not combined else rows,
        "changed_rows": changed,
        "cache_hits": rows - misses,
        "cache_misses": misses,
    }


def test_few_groups_stay_combined() -> None:
    choice = FormChoice(combines=True, files=True)
    assert choice.form == "combined"
    for _ in range(3):
        assert choice.choose(figures(1_000_000, exchanged=200, changed=100)) == "combined"


def test_many_groups_are_sent_as_rows_until_there_are_few() -> None:
    choice = FormChoice(combines=True, files=True, tasks=2)
    assert choice.choose(figures(1_000_000, exchanged=900_000, changed=800_000)) == "files"
    assert choice.choose(figures(1_000_000, exchanged=1_000_000, changed=200_000)) == "files", "two tasks, 0.4 a row"
    assert choice.choose(figures(1_000_000, exchanged=1_000_000, changed=100_000)) == "combined"
    assert choice.choose(figures(1_000_000, exchanged=400_000, changed=390_000)) == "combined", "it has saved half"


@pytest.mark.parametrize("left", [1000, 1800])
def test_values_that_do_not_repeat_are_tried_now_and_then(left: int) -> None:
    """Rows with values may be copies: there may be as many as came, or more."""
    choice = FormChoice(combines=True, files=False, tasks=2)
    forms = [choice.choose(figures(1000, exchanged=left, changed=2, combined=True))]
    for _ in range(40):
        combined = forms[-1] == "combined"
        forms.append(choice.choose(figures(1000, exchanged=left if combined else 1000, changed=2, combined=combined)))
    assert forms.count("combined") == 1
    assert choice.choose(figures(1000, exchanged=100, changed=2)) == "combined", "they repeat now"


def test_always() -> None:
    choice = FormChoice(combines=True, files=True, always=True)
    assert choice.choose(figures(1_000_000, exchanged=1_000_000, changed=1_000_000)) == "combined"


def test_small_batches_go_through_one_python_stage() -> None:
    choice = FormChoice(combines=False, files=True)
    assert choice.form == "files"
    assert choice.choose(figures(10_000)) == "rows"
    assert choice.choose(figures(70_000)) == "rows", "not for a batch that is a little larger"
    assert choice.choose(figures(200_000)) == "files"
    assert choice.choose(figures(70_000)) == "files"


def test_keys_that_are_not_in_memory_are_read_ahead() -> None:
    choice = FormChoice(combines=False, files=True)
    assert choice.choose(figures(10_000, misses=100)) == "files"
    assert choice.choose(figures(10_000)) == "rows"
    assert choice.choose(figures(10_000, misses=100)) == "files"


@pytest.mark.parametrize("rows", [10, 1_000_000])
def test_without_files_there_is_no_other_way(rows: int) -> None:
    assert FormChoice(combines=False, files=False).choose(figures(rows, misses=rows)) == "rows"


def test_batches_without_rows_say_nothing() -> None:
    choice = FormChoice(combines=False, files=True)
    choice.choose(figures(10))
    assert choice.choose({"input_rows": 0.0}) == "rows"
    assert choice.choose({}) == "rows"


def test_figures_of_a_batch_that_was_planned_before_the_choice() -> None:
    """Batches run back to back: the one that follows a choice still has the old form."""
    choice = FormChoice(combines=True, files=True, tasks=2)
    few, many = figures(1_000_000, exchanged=1_000_000, changed=100), figures(1_000_000, exchanged=200, changed=100)
    for given in (few, few, many, few, many):
        assert choice.choose(given) == "combined"
    assert choice.choose(figures(1_000_000, exchanged=900_000, changed=700_000)) == "files"
    assert choice.choose(figures(1_000_000, exchanged=900_000, changed=700_000)) == "files"


def test_rows_are_not_combined_while_many_keys_for_them_are_not_in_memory() -> None:
    """Keys of combined rows are not read ahead."""
    choice = FormChoice(combines=True, files=True)
    assert choice.choose(figures(1_000_000, exchanged=300_000, changed=200_000, misses=150_000)) == "files"
    assert choice.choose(figures(1_000_000, exchanged=1_000_000, changed=200_000, misses=170_000)) == "files"


def test_many_rows_are_combined_although_some_keys_are_not_in_memory() -> None:
    """Keys that are new miss memory, too: a batch may have new keys only."""
    choice = FormChoice(combines=True, files=True, tasks=2)
    assert choice.choose(figures(920_000, exchanged=920_000, changed=20_000, misses=20_000)) == "combined"
    assert choice.choose(figures(920_000, exchanged=40_000, changed=20_000, misses=20_000)) == "combined"


def test_on_a_cluster_keys_are_not_read_ahead() -> None:
    choice = FormChoice(combines=True, files=False)
    assert choice.choose(figures(1_000_000, exchanged=200_000, changed=100_000, misses=100_000)) == "combined"


def test_where_there_is_nothing_to_choose() -> None:
    assert FormChoice(combines=False, files=False).fixed
    assert FormChoice(combines=True, files=False, always=True).fixed
    assert not FormChoice(combines=True, files=False).fixed
    assert not FormChoice(combines=False, files=True).fixed
