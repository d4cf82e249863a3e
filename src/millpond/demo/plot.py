"""The plot that the demo leaves behind."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from millpond.demo.side import Side

_COLOURS = {"millpond": "#1f6feb", "spark": "#e25a1c"}


def draw(sides: list[Side], folder: Path, lines: list[str]) -> list[Path]:
    """Write `demo.png` and `demo.html`; return what was written (nothing without matplotlib).

    Args:
        lines: what the page says above the picture.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, times) = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True, layout="constrained")
    for side in sides:
        batches = [b.batch for b in side.batches]
        colour = _COLOURS[side.engine]
        rates.plot(batches, [b.rows / b.ms for b in side.batches], label=side.name, color=colour, marker=".")
        times.plot(batches, [b.ms for b in side.batches], label=side.name, color=colour, marker=".")
        for killed in side.kills:
            after = next((b.batch for b in side.batches if b.start > killed), None)
            if after is not None:
                rates.axvline(after - 0.5, color=colour, linestyle=":")
                times.axvline(after - 0.5, color=colour, linestyle=":")
    rates.set_ylabel("thousand rows/s")
    times.set_ylabel("batch ms")
    times.set_xlabel("batch (dotted: killed and restarted)")
    for axes in (rates, times):
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle("NEXMark q17: Spark's RocksDB and Millpond on the same events")
    picture = folder / "demo.png"
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    data = base64.b64encode(picture.read_bytes()).decode()
    page = folder / "demo.html"
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    page.write_text(
        f'<!doctype html><title>Millpond demo</title>{text}<img src="data:image/png;base64,{data}" alt="plot">\n'
    )
    return [picture, page]
