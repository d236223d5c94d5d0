"""Style, text alternatives and saving of plots, with matplotlib."""

import re
import warnings
from collections.abc import Callable
from html import escape
from io import BytesIO
from typing import Any, BinaryIO

import matplotlib as mpl
from matplotlib.figure import Figure

from pagepool.replay.shared.colors import COLORS

BLUE, ORANGE, GREEN, PURPLE, GREY, INK, GRID, PAPER = (light for light, _ in COLORS.values())
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names of traces may contain dollar signs
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pagepool",  # makes ids reproducible
}
DOTS_PER_INCH = 180
MAX_SHORT_NAME = 40


def shorten_name(name: str) -> str:
    """Shorten a name that is too long for a plot, keeping its beginning and end.

    >>> shorten_name("chat"), shorten_name("0123456789" * 10)
    ('chat', '0123456789012345678901234…67890123456789')
    """
    return name if len(name) <= MAX_SHORT_NAME else f"{name[:25]}…{name[-14:]}"


def format_count(count: float) -> str:
    """Format a number for an axis, with three significant digits.

    >>> format_count(1500), format_count(2e6), format_count(700), format_count(999_999), format_count(1e18)
    ('1.5k', '2M', '700', '1M', '1E')
    """
    rounded = float(f"{count:.3g}")
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rounded >= factor:
            return f"{rounded / factor:g}{unit}"
    return f"{rounded:g}"


def save_figure(draw: Callable[[], Figure], file: BinaryIO, file_format: str, *, title: str, description: str) -> None:
    """Save a figure as ``"png"`` or ``"svg"``, with title and description as text alternatives. The bytes are reproducible."""
    content = BytesIO()
    is_svg = file_format == "svg"
    texts = {"Software": None, "Title": title, "Description": description}
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if is_svg else texts
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # the viewer's font may have it
        draw().savefig(content, format=file_format, dpi=DOTS_PER_INCH, metadata=metadata)
    file.write(_name_svg(content.getvalue().decode(), title, description).encode() if is_svg else content.getvalue())


def _name_svg(text: str, title: str, description: str) -> str:
    """Add title and description as the root's first children, and label the image with them."""
    attributes = 'role="img" lang="en" xml:lang="en" aria-labelledby="picture-title picture-description"'
    names = (
        f'<title id="picture-title">{escape(title)}</title>\n'
        f' <desc id="picture-description">{escape(description)}</desc>'
    )  # fmt: skip
    return re.sub(r"<svg ([^>]*)>", lambda match: f"<svg {attributes} {match[1]}>\n {names}", text, count=1)
