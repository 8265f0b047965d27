"""The study as text: two tables as the report's, ours, and one page of HTML that needs no other file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from shardfold.tools.recipes.face.config import FaceConfig
from shardfold.tools.recipes.face.images import Source
from shardfold.tools.recipes.face.row import Row

__all__ = ["PUBLISHED", "computed", "findings", "write_page"]

PUBLISHED = {
    "base": (440, "2500", 15950),
    "stage 2": (440, "2600-2650", 14000),
    "stage 2 + offload": (584, "2800-2850", 15900),
    "stage 3 + offload": (660, "> 2950", 15900),
    "stage 3": (600, "2500-2550", 15900),
}
"""The report's batch, images/s and MB, of 16,150 on each of 10 V100."""

CARDS, ALLOWED, PARAMETERS = 10, 16150, 121.5e6
"""Its model's parameters follow from its file of 243 MB in fp16."""

STYLE = """:root{color-scheme:light dark}
body{font:16px/1.55 Georgia,serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1,h2{font-weight:normal;line-height:1.2}h2{margin-top:2.2rem;border-top:1px solid #8886;padding-top:1rem}
table{border-collapse:collapse;font:13px/1.4 system-ui,sans-serif;margin:1rem 0;display:block;overflow-x:auto}
th,td{padding:.3rem .5rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}img{max-width:100%}
th:first-child,td:first-child{text-align:left}
th{border-bottom:1px solid #888}code{font-size:12px;background:#8882;padding:.1rem .3rem}
.command{display:block;margin:.15rem 0;white-space:pre-wrap;overflow-wrap:anywhere}.note{color:#888;font-size:14px}"""

REMARKS = (
    (
        "R1",
        "The report found that neither a distributed head nor DeepSpeed's collectives combine with ZeRO. Here the head "
        "is a part of the same engine: its classes are split over the ranks that read other samples, its states "
        "are not "
        "split once more, and no gradient of a class is sent.",
    ),
    (
        "R2",
        "In the report stage 2 with the optimizer offloaded was the fastest with matching accuracy, and stage 3 could "
        "turn parameter offload on silently. Here what rests where is one table, which a run prints, and offload is on "
        "where it is asked for.",
    ),
    (
        "R3",
        "Overlapped communication costs memory, there and here: the two largest units are counted as gathered in what "
        "stage 3 takes.",
    ),
    (
        "R5",
        "Without fp16 the report gained 50 images/s, and lost under 10 % of rate and memory with it. A CPU without "
        "16-bit arithmetic gains nothing from it, so this page is in the precision of its command.",
    ),
    (
        "R6",
        "The head is over twice the ViT, so that a ViT that is 30 % faster is 10 % overall: Amdahl's law with a "
        "share of "
        "0.39, 1 / (0.61 + 0.39 / 1.3) = 1.10. The second table says what splitting the head gives instead.",
    ),
)


def computed() -> list[tuple[str, float, int]]:
    """For the report's 10 cards, from the bytes that ZeRO's formulas give for its model: the setting, MB of states on a
    card, and the batch that fits, where the base's batch of 440 says what one image takes."""
    states = {
        "base": 16.0,
        "stage 2": 2 + 14 / CARDS,
        "stage 2 + offload": 2.0,
        "stage 3 + offload": 0.0,
        "stage 3": 16 / CARDS,
    }
    mb = {name: PARAMETERS * each / 1e6 for name, each in states.items()}
    image = (PUBLISHED["base"][2] - mb["base"]) / PUBLISHED["base"][0]
    return [(name, each, int((ALLOWED - each) / image)) for name, each in mb.items()]


def findings(rows: Sequence[Row]) -> list[str]:
    """What the rows say of the report's order, a sentence each."""
    said: list[str] = []
    for budget in dict.fromkeys(row.budget for row in rows):
        mine = {row.setting: row for row in rows if row.budget == budget and row.head == "replicated"}
        batches = sorted(mine, key=lambda name: mine[name].batch)
        theirs = sorted(PUBLISHED, key=lambda name: PUBLISHED[name][0])
        same = all(mine[a].batch <= mine[b].batch for a in mine for b in mine if PUBLISHED[a][0] < PUBLISHED[b][0])
        said.append(
            f"Largest batches under the {budget} budget, from the smallest: {', '.join(batches)}. "
            + ("That is the report's order." if same else f"The report's is {', '.join(theirs)}.")
        )
        fastest = sorted(mine, key=lambda name: -mine[name].images_per_s)
        said.append(
            f"Fastest under the {budget} budget: {', '.join(fastest)}; in the report stage 3 + offload, "
            "stage 2 + offload, stage 2, stage 3 and the base. Offload copies nothing here: device and host are "
            "one memory, and the links "
            "between ranks are this machine's memory too, so rates need not follow a cluster's."
        )
        pairs = [(row, other) for row in mine.values() for other in rows
                 if other.head == "sharded" and (other.budget, other.setting) == (budget, row.setting)]  # fmt: skip
        ratios = ", ".join(f"{b.setting} {b.images_per_s / a.images_per_s:.2f}" for a, b in pairs)
        said.append(f"Images/s with split classes, divided by those with a replicated head: {ratios}.")
    return said


def tables(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """``(title, heads, lines)`` of each."""
    found: list[tuple[str, list[str], list[list[str]]]] = []
    for budget in dict.fromkeys(row.budget for row in rows):
        mine = [row for row in rows if row.budget == budget]
        lines = [
            [
                row.setting, row.head, str(row.batch), f"{row.images_per_s:.0f}",
                f"{row.used / 2**20:.1f} of {row.allowed / 2**20:.1f}", f"{row.loss:.2f}", f"{row.seconds:.0f}",
            ]
            for row in mine
        ]  # fmt: skip
        found.append((f"Rates and memory, {budget} budget",
                      ["setting", "head", "batch", "images/s", "MiB", "loss", "seconds"], lines))  # fmt: skip
        rates = list(mine[0].precision)
        lines = [[row.setting, row.head, *(f"{100 * row.precision[r]:.2f}@{r}" for r in rates)] for row in mine]
        found.append((f"Precision on identities that were kept apart, {budget} budget",
                      ["setting", "head", *(f"at {r}" for r in rates)], lines))  # fmt: skip
    lines = [
        [name, str(PUBLISHED[name][0]), PUBLISHED[name][1], str(PUBLISHED[name][2]), f"{mb:.0f}", str(batch)]
        for name, mb, batch in computed()
    ]
    found.append(("The report's 10 V100: published, and computed from ZeRO's formulas",
                  ["setting", "batch", "images/s", "MB", "computed: MB", "computed: batch"], lines))  # fmt: skip
    return found


def write_page(out: Path, rows: Sequence[Row], config: FaceConfig, held_out: Source) -> None:
    """study.md and study.html."""
    lines = ["# Face recognition under five layouts", ""]
    for title, heads, body in tables(rows):
        lines += [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        lines += [f"| {' | '.join(line)} |" for line in body] + [""]
    lines += [*findings(rows), "", *(f"    {row.command}" for row in rows)]
    (out / "study.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    parts = [_pictures(rows, held_out)]
    for title, heads, body in tables(rows):
        head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
        cells = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in line)}</tr>" for line in body)
        parts.append(f"<h2>{html.escape(title)}</h2><table><tr>{head}</tr>{cells}</table>")
        if "computed" in title:
            parts.append(
                "<p class=note>Computed: not measured. Parameters follow from the report's file of 243 MB in fp16; "
                "what an image takes, from its batch of 440. Where the published batch is larger than the computed "
                "one, the "
                "report had other savings besides, which it does not name.</p>"
            )
    parts += ["<h2>What this run shows</h2>", *(f"<p>{html.escape(each)}</p>" for each in findings(rows))]
    parts += ["<h2>The report's remarks</h2>", *(f"<p><b>{n}</b> {html.escape(text)}</p>" for n, text in REMARKS)]
    parts += ["<h2>Every setting as a command</h2>", "<p>With the settings of this study's config.json:</p>"]
    parts += [f"<code class=command>{html.escape(row.command)} --config config.json</code>" for row in rows]
    first = (
        f"Backbone {config.backbone} of width {config.width} with {config.layers} blocks, and a head of "
        f"{config.identities:,} classes of {config.embedding} numbers, trained on "
        f"{'drawn faces' if config.data is None else str(config.data)} in {config.precision}. Images/s are of all "
        "ranks together. Drawn faces are synthetic: the results about layouts hold for photographs too, those about "
        "Precision do not."
    )
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>Face recognition under five layouts</title>"
        f"<style>{STYLE}</style><h1>Face recognition under five layouts</h1><p>{html.escape(first)}</p>{''.join(parts)}"
    )
    (out / "study.html").write_text(page + "</html>\n", encoding="utf-8")


def _pictures(rows: Sequence[Row], held_out: Source) -> str:
    """Images in the page; nothing where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        from shardfold.tools.recipes.face.pictures import faces_picture
    except ModuleNotFoundError:
        return ""
    sheet = BytesIO()
    faces_picture(sheet, held_out)
    figure: Any = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    budgets = list(dict.fromkeys(row.budget for row in rows))
    for axes, budget in zip(figure.subplots(1, len(budgets), squeeze=False)[0], budgets, strict=True):
        for shift, head, colour in ((-0.2, "replicated", "#9aa7b5"), (0.2, "sharded", "#1f5fa8")):
            mine = [row for row in rows if row.budget == budget and row.head == head]
            places = [place + shift for place in range(len(mine))]
            axes.barh(places, [row.images_per_s for row in mine], height=0.38, color=colour, label=f"{head} head")
            for place, row in zip(places, mine, strict=True):
                axes.text(0, place, f" batch {row.batch}", va="center", fontsize=7)
        axes.set_yticks(range(len(mine)), [row.setting for row in mine], fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="images/s", title=f"{budget} budget")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=2, frameon=False, fontsize=8)
    bars = BytesIO()
    figure.savefig(bars, dpi=110)
    tags = [base64.b64encode(each.getvalue()).decode() for each in (sheet, bars)]
    return (
        f'<img alt="images of eight identities that were kept apart" src="data:image/png;base64,{tags[0]}">'
        f'<img alt="images per second of each setting" src="data:image/png;base64,{tags[1]}">'
    )
