"""Pictures of reports: bars with intervals, by Matplotlib."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lookahead_agent.errors import ConfigurationError, extra_imports

PICTURES = (".svg", ".png")


@dataclass(frozen=True)
class Bar:
    """One value of a panel, with the ends of its interval if it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """Bars of one measure, and their title."""

    title: str
    bars: Sequence[Bar]


def draw_bars(panels: Sequence[Panel], suffix: str) -> bytes:
    """Draw the panels below one another, as a file of this suffix.

    Raises:
        ConfigurationError: There is no value to draw.
        MissingExtraError: Matplotlib is not installed.
    """
    if not panels:
        raise ConfigurationError("the rows have no figure to draw: write the report as .md or .csv")
    heights = [0.7 + 0.3 * len(panel.bars) for panel in panels]
    figure = new_figure((7.0, sum(heights)))
    rows = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, axes in zip(panels, rows, strict=True):
        values = [bar.value for bar in panel.bars]
        places = range(len(values))
        axes.barh(places, values, color="#7aa6c2")
        for place, bar in enumerate(panel.bars):
            if bar.low is not None and bar.high is not None:
                axes.plot((bar.low, bar.high), (place, place), color="#333333", linewidth=1)
        axes.set_yticks(places, [_escape(bar.label) for bar in panel.bars], fontsize=8)
        axes.invert_yaxis()
        axes.set_title(_escape(panel.title), fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, suffix)


def _escape(text: str) -> str:
    return text.replace("$", r"\$")  # Matplotlib reads formulas between dollar signs


def new_figure(size: tuple[float, float]) -> Any:
    """Create an empty figure; raises MissingExtraError if Matplotlib is not installed."""
    with extra_imports("pictures need Matplotlib: pip install 'lookahead-agent[bench]'"):
        from matplotlib.figure import Figure
    return Figure(figsize=size, layout="constrained")


def save(figure: Any, suffix: str) -> bytes:
    """Return the figure as a file of this suffix, identical for identical figures."""
    import matplotlib

    file = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
    # Text stays text, which is smaller than outlines and searchable.
    with matplotlib.rc_context({"svg.hashsalt": "lookahead-agent", "svg.fonttype": "none"}):
        figure.savefig(file, format=suffix[1:], metadata=metadata, bbox_inches="tight", dpi=150)
    content = file.getvalue()
    return content[content.index(b"<svg") :] if suffix == ".svg" else content
