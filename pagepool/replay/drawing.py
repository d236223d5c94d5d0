"""How pictures look, and how they are saved, by matplotlib."""

from collections.abc import Callable
from typing import Any, BinaryIO

import matplotlib as mpl
from matplotlib.figure import Figure

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "save_figure"]

# Okabe and Ito's colours, which the colour-blind can tell apart; lines differ in style and marks as well, for print in black.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pagepool",  # for ids, which are random otherwise
}
DOTS_PER_INCH = 180


def save_figure(draw: Callable[[], Figure], file: BinaryIO, file_format: str) -> None:
    """Save what `draw` makes, ``"png"`` or ``"svg"``. The same picture gives the same bytes."""
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if file_format == "svg" else {"Software": None}
    with mpl.rc_context(STYLE):
        draw().savefig(file, format=file_format, dpi=DOTS_PER_INCH, metadata=metadata)
