"""A plan as a self-contained HTML page."""

import re
from io import BytesIO

from pagepool.replay.plans.host_report import list_host_columns
from pagepool.replay.plans.plan import Plan
from pagepool.replay.plans.plot import save_plot
from pagepool.replay.plans.report import (
    HIT_RATE,
    describe,
    headline,
    list_columns,
    list_knee_columns,
    list_notes,
    list_policy_columns,
    summarize,
)
from pagepool.replay.plans.state_report import list_interval_columns
from pagepool.replay.shared.colors import COLORS
from pagepool.replay.shared.web import make_html, make_paragraphs, make_table


def make_page(plan: Plan, name: str) -> str:
    """Make the page, including the plot; `name` is the name of the trace."""
    tables = [make_table(f"By size of the pool; {HIT_RATE}", list_columns(plan))]
    if plan.policies:
        tables.append(make_table("LRU pools that hit as much as adaptive eviction", list_policy_columns(plan)))
    if plan.checkpoints:
        tables.append(make_table(*list_interval_columns(plan)))
    if plan.host_runs:
        tables.append(make_table(*list_host_columns(plan)))
    if plan.knees and not (plan.checkpoints or plan.windows):
        tables.append(make_table("Pages for a share of all possible hits", list_knee_columns(plan)))
    parts = [
        make_paragraphs([summarize(plan), *describe(plan)]),
        _make_svg(plan, name),
        *tables,
        "<h2>What the columns mean</h2>",
        make_paragraphs(list_notes(plan)),
    ]
    return make_html(headline(plan, name), "\n".join(parts))


def _make_svg(plan: Plan, name: str) -> str:
    """Make the SVG element without the XML header, in the colors of the page."""
    file = BytesIO()
    save_plot(plan, name, file, "svg", is_within_page=True)
    text = file.getvalue().decode()
    names = {light: f"var(--{name})" for name, (light, _) in COLORS.items()}
    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda match: names.get(match[0], match[0]), text[text.index("<svg") :])
