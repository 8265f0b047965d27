"""The study as text: tables as the report's, ours, and one page of HTML that needs no other file and no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from shardfold.tools.observe.page_parts import STYLE
from shardfold.tools.recipes.face import _drawing as drawing
from shardfold.tools.recipes.face._drawing import ChartAxis
from shardfold.tools.recipes.face._findings import StudyFinding, findings
from shardfold.tools.recipes.face.cards import ALLOWED, CARDS, PUBLISHED, RATES, CardSetting
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.images import ImageSource
from shardfold.tools.recipes.face.remarks import Here, remarks
from shardfold.tools.recipes.face.row import StudyRow

__all__ = ["Study", "Table", "write_page"]

TITLE = "Face recognition under five layouts"
MIB = 2**20

MORE = """
h2 { font-size: 1.25rem; margin-top: 3rem; } .lead { font-size: 1.1rem; max-width: 44rem; } p { max-width: 46rem; }
figure { margin: 1.2rem 0; } figcaption { color: var(--muted); font-size: .85rem; margin-top: .4rem; }
.note { border-left: 3px solid var(--line); padding-left: .8rem; color: var(--muted); font-size: .92rem; }
.computed { background: var(--card); border-radius: .5rem; padding: .1rem 1rem .8rem; }
td, th { padding-right: 1rem; } td:last-child, th:last-child { padding-right: 0; } table { font-size: .9rem; }
.command { display: grid; grid-template-columns: 1fr auto; gap: .5rem; align-items: start; margin: .3rem 0 .9rem; }
.command code { background: var(--card); border-radius: .4rem; padding: .4rem .6rem; font-size: .8rem;
  overflow-wrap: anywhere; user-select: all; }
.command button { font: inherit; font-size: .8rem; color: inherit; background: var(--card); cursor: pointer;
  border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .6rem; min-width: 4.2rem; }
"""

SCRIPT = """
for (const button of document.querySelectorAll('.command button')) button.onclick = async () => {
  const code = button.previousElementSibling, range = document.createRange();
  range.selectNodeContents(code); getSelection().removeAllRanges(); getSelection().addRange(range);
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = 'copied'; }
  catch { button.textContent = 'selected'; }
};
"""


class Study(NamedTuple):
    """What was found.

    Attributes:
        rows: of what was trained.
        baselines: Precision on the first held-out set, by false-accept rate, of what was not trained.
        ten: this model on 10 ranks, computed: setting, head, largest batch.
        cards: the report's 10 cards, computed: by head, parameters of a card and the settings.
        ranks: that trained.
        here: figures of this machine for the report's remarks; None: not all is trained yet.
    """

    rows: Sequence[StudyRow]
    baselines: Mapping[str, Mapping[str, float]]
    ten: Sequence[tuple[str, str, int]]
    cards: Mapping[str, tuple[int, Sequence[CardSetting]]]
    ranks: int
    here: Here | None = None

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "baselines": self.baselines,
            "computed_on_10_ranks": [dict(zip(("setting", "head", "batch"), each, strict=True)) for each in self.ten],
            "computed_on_10_cards": {
                head: [each._asdict() for each in found] for head, (_, found) in self.cards.items()
            },
            "remarked": self.here._asdict() if self.here is not None else None,
            "published": {name: {**each._asdict(), "middle_rate": RATES[name]} for name, each in PUBLISHED.items()},
        }


class Table(NamedTuple):
    """A title, heads and lines."""

    title: str
    heads: list[str]
    lines: list[list[str]]

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", f"| {' | '.join(self.heads)} |", f"|{'---|' * len(self.heads)}"]
        return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in self.lines), ""])

    def page(self) -> str:
        def row(cells: list[str], tag: str) -> str:
            words = 2 if self.heads[1:2] == ["head"] else 1
            return (
                "<tr>"
                + "".join(
                    f"<{tag}{' class=number' * (n >= words)}>{html.escape(cell)}</{tag}>"
                    for n, cell in enumerate(cells)
                )
                + "</tr>"
            )

        body = "".join(row(line, "td") for line in self.lines)
        return f'<div class="scroll"><table>{row(self.heads, "th")}{body}</table></div>'


def rates_table(rows: Sequence[StudyRow], budget: str) -> Table:
    """The report's first table."""
    mine = [row for row in rows if row.budget == budget]
    first = next((row for row in mine if (row.setting, row.head) == ("base", "replicated")), mine[0])
    lines = [
        [
            row.setting,
            row.head,
            str(row.batch),
            f"{row.images_per_s:.0f}",
            f"{row.images_per_s / first.images_per_s:.2f}",
            f"{row.used / MIB:.2f} of {row.allowed / MIB:.2f}",
            f"{row.at_base / MIB:.2f}",
            f"{row.host / MIB:.2f}",
            f"{(row.used + row.host) / MIB:.2f} / {row.measured / MIB:.2f}" if row.measured else "-",
        ]
        for row in mine
    ]
    heads = [
        "setting",
        "head",
        "batch",
        "images/s",
        "of the base",
        "MiB used of allowed",
        f"at {BASE[budget]} images",
        "host, MiB",
        "planned / measured",
    ]
    return Table(f"Rates and memory, {budget} budget", heads, lines)


BASE = {"large": 48, "small": 16}
"""Images of the base under each budget."""


def precision_table(rows: Sequence[StudyRow], budget: str) -> Table:
    """The report's second table: of every held-out set."""
    mine = [row for row in rows if row.budget == budget]
    sets = list(mine[0].precision)
    first, rates = sets[0], list(mine[0].precision[sets[0]])
    one = rates[min(1, len(rates) - 1)]
    heads = ["setting", "head", *(first for _ in rates), *sets[1:], "loss"]
    lines = [
        [
            row.setting,
            row.head,
            *(f"{100 * row.precision[first][r]:.2f}@{r}" for r in rates),
            *(f"{100 * row.precision[each][one]:.2f}@{one}" for each in sets[1:]),
            f"{row.loss:.2f}",
        ]
        for row in mine
    ]
    return Table(f"Precision on identities that training never saw, {budget} budget", heads, lines)


def baselines_table(found: Study) -> Table:
    """What was not trained, beside the best that was."""
    first = next(iter(found.rows[0].precision))
    best = max(found.rows, key=lambda row: sum(row.precision[first].values()))
    rates = list(best.precision[first])
    named = {f"trained: {best.setting}, {best.head} head, {best.budget} budget": best.precision[first]}
    named |= dict(sorted(found.baselines.items()))
    lines = [[name, *(f"{100 * values[r]:.2f}@{r}" for r in rates)] for name, values in named.items()]
    return Table("Beside what was not trained", ["", *(f"at {rate}" for rate in rates)], lines)


def cards_table(found: Study) -> Table:
    """The report's cards: published, and computed."""
    computed = {head: {each.name: each for each in mine} for head, (_, mine) in found.cards.items()}
    heads = [
        "setting",
        "published: batch",
        "images/s",
        "MB",
        "computed: MB at that batch",
        "largest batch",
        "images/s of one, of all",
        "split head: largest batch",
        "images/s of one, of all",
    ]
    lines = [
        [
            name,
            str(said.batch),
            said.rate,
            f"{said.mb:,}",
            f"{computed['replicated'][name].mb:,.0f}",
            *(
                text
                for head in ("replicated", "sharded")
                for text in (
                    f"{computed[head][name].batch}",
                    f"{computed[head][name].rate:,.0f}, {CARDS * computed[head][name].rate:,.0f}",
                )
            ),
        ]
        for name, said in PUBLISHED.items()
    ]
    return Table(f"The report's {CARDS} V100 with {ALLOWED:,} MB each: published, and computed", heads, lines)


def write_page(out: Path, found: Study, config: FaceConfig, held_out: ImageSource) -> None:
    """study.md and study.html."""
    budgets = list(dict.fromkeys(row.budget for row in found.rows))
    tables = [make(found.rows, budget) for make in (rates_table, precision_table) for budget in budgets]
    tables += [baselines_table(found), cards_table(found)]
    said = findings(found.rows, found.ten)
    text = [f"# {TITLE}", "", lead(found, config), "", *(f"- **{each.title}.** {each.text}" for each in said), ""]
    text += [table.markdown() for table in tables]
    text += [computed_note(found), "", "## Every setting as a command", "", *(f"    {r.command}" for r in found.rows)]
    (out / "study.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    (out / "study.html").write_text(html_page(found, config, held_out, said), encoding="utf-8")


def lead(found: Study, config: FaceConfig) -> str:
    """What was done, in words."""
    classes = f"{config.identities:,}" if config.data is None else "as many classes as the folder has"
    return (
        f"Backbone {config.backbone} of width {config.width} with {config.layers} blocks, and a head of {classes} "
        f"classes of {config.embedding} numbers, on {found.ranks} ranks in {config.precision}, trained on "
        f"{'faces that are drawn' if config.data is None else str(config.data)}. A budget is what the base (every rank "
        f"holds everything) takes with {BASE['large']} or {BASE['small']} images. Each setting has the largest batch "
        "that fits, by the planner, and all see the same number of images."
    )


def computed_note(found: Study) -> str:
    """What the table of the report's cards is."""
    parameters = found.cards["replicated"][0]
    return (
        f"Computed by the planner, not measured, for a model of {parameters / 1e6:.1f} million parameters in fp16 with "
        "fp32 sums of gradients. The report names neither its ViT nor the size of its images: the model here is a ViT "
        "of width 512 with 12 blocks on 96 x 96 pixels and 159,000 classes, which gives the report's file of 243 MB. "
        "Nor does it say whether its images/s are of one card or of all, so both are here. Seconds follow from what "
        "the maker prints of a V100 and its links, with products at 60 % of that: take them for a ranking. Batches "
        "that the report chose by hand need not be the largest ones."
    )


def html_page(found: Study, config: FaceConfig, held_out: ImageSource, said: Sequence[StudyFinding]) -> str:
    """The page."""
    rows = found.rows
    budgets = list(dict.fromkeys(row.budget for row in rows))
    parts = [f"<h1>{TITLE}</h1>", f'<p class="lead">{html.escape(lead(found, config))}</p>']
    drawn = config.data is None
    words = "Identities that were kept apart, a row for each." + (
        " They are drawn: the results about layouts hold for photographs too, those about Precision do not."
        if drawn
        else ""
    )
    parts += [f"<figure>{drawing.faces(held_out)}<figcaption>{words}</figcaption></figure>"]
    for budget in budgets:
        parts += [*_pictures(rows, budget), rates_table(rows, budget).page()]
    parts += [
        "<h2>What this run shows</h2>",
        *(f"<p><b>{html.escape(each.title)}.</b> {html.escape(each.text)}</p>" for each in said),
    ]
    parts += [*_learned(rows, budgets[0])]
    parts += [_headed(precision_table(rows, budget)) for budget in budgets]
    parts += [_headed(baselines_table(found))]
    parts += [
        f'<div class="computed">{_headed(cards_table(found))}<p class="note">'
        f"{html.escape(computed_note(found))}</p></div>"
    ]
    if found.here is not None:
        parts += ["<h2>The report's remarks</h2>"]
        parts += [f"<p><b>{number}</b> {html.escape(text)}</p>" for number, text in remarks(rows, found.here)]
    parts += ["<h2>Every setting as a command</h2>"]
    for row in rows:
        parts.append(f"<div>{row.setting}, {row.head} head, {row.budget} budget</div>")
        parts.append(f'<div class="command"><code>{html.escape(row.command)}</code><button>copy</button></div>')
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            '<link rel="icon" href="data:,">',
            f"<title>{TITLE}</title><style>{STYLE}{drawing.STYLE}{MORE}</style></head><body>",
            *parts,
            f"<script>{SCRIPT}</script></body></html>",
            "",
        ]
    )


def _headed(table: Table) -> str:
    return f"<h2>{html.escape(table.title)}</h2>{table.page()}"


def _pairs(rows: Sequence[StudyRow], budget: str) -> list[tuple[str, list[StudyRow]]]:
    """Of each setting the rows of both heads."""
    mine = [row for row in rows if row.budget == budget]
    return [(name, [row for row in mine if row.setting == name]) for name in dict.fromkeys(row.setting for row in mine)]


def _pictures(rows: Sequence[StudyRow], budget: str) -> list[str]:
    """Bars of memory and of rates."""
    pairs = _pairs(rows, budget)
    allowed = pairs[0][1][0].allowed
    memory = [
        (name, [(row.at_base, f"{row.at_base / MIB:.2f} MiB, so {row.batch} fit") for row in mine])
        for name, mine in pairs
    ]
    rates = [
        (name, [(row.images_per_s, f"{row.images_per_s:.0f}, batch {row.batch}") for row in mine])
        for name, mine in pairs
    ]
    legend = (
        '<div class="keys"><span><i style="background:var(--bar-2);height:.7rem"></i>head on every rank</span>'
        '<span><i style="background:var(--bar);height:.7rem"></i>classes split</span></div>'
    )
    return [
        f"<h2>The {budget} budget: {allowed / MIB:.2f} MiB of each rank</h2>",
        legend,
        f'<div class="charts"><figure>{drawing.bars(memory, max(v for _, pair in memory for v, _ in pair))}<figcaption>'
        f"Memory of a rank with {BASE[budget]} images, and how many fit into the budget</figcaption></figure>"
        f"<figure>{drawing.bars(rates, max(v for _, pair in rates for v, _ in pair))}<figcaption>Images/s of all ranks "
        "with the largest batch</figcaption></figure></div>",
    ]


def _learned(rows: Sequence[StudyRow], budget: str) -> list[str]:
    """Curves of losses, ROC and DET."""
    mine = [row for row in rows if row.budget == budget and row.head == "sharded"]
    losses = [row.losses for row in mine]
    most, high = max(line[-1][0] for line in losses), max(y for line in losses for _, y in line)
    low = min(y for line in losses for _, y in line)
    roc = [row.curve for row in mine]
    det = [[(x, max(1 - y, 1e-3)) for x, y in line] for line in roc]
    start = max(min(x for line in roc for x, _ in line), 1e-5)
    rate = ChartAxis("false-accept rate", start, 1, log=True)
    charts = (
        (
            drawing.curves(
                losses, ChartAxis("images", 0, most), ChartAxis("loss", low, high), label="losses by images"
            ),
            "Loss",
        ),
        (drawing.curves(roc, rate, ChartAxis("true-accept rate", 0, 1), label="ROC curves"), "ROC"),
        (drawing.curves(det, rate, ChartAxis("false-reject rate", 1e-2, 1, log=True), label="DET curves"), "DET"),
    )
    shown = "".join(f"<figure>{chart}<figcaption>{words}</figcaption></figure>" for chart, words in charts)
    return [
        f"<h2>What was learned, {budget} budget, classes split</h2>",
        drawing.key([row.setting for row in mine]),
        f'<div class="charts">{shown}</div>',
        "<p>Layouts do not change what a batch teaches: losses of one batch are equal. These lines are apart because "
        "batches are: of the same images a larger batch makes fewer steps.</p>",
    ]
