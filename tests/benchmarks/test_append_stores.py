"""The sweeps over the append stores, small."""

from pathlib import Path

from benchmarks.studies.append_stores import SWEEPS, main, sessions


def test_every_appended_row_is_taken(tmp_path: Path) -> None:
    made = sessions(
        f"{tmp_path}/store", str(tmp_path), keys=300, active=20, gap=20, rows=4, cold=True, write_buffer=1 << 14
    )
    assert made.stats["keys"] == 0
    assert made.stats["prefetch_misses"] > 0
    assert made.rows_per_second > 0


def test_a_sweep_is_printed_and_plotted(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plot.png"
    name = "read batch ratio"
    main(["--keys", "100", "--active", "10", "--gap", "10", "--sweep", name, "--plot", str(path)])
    assert len(capsys.readouterr().out.splitlines()) == len(SWEEPS[name][1])
    assert path.stat().st_size > 1000
