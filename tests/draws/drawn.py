"""Draws: a model, an optimizer, an engine's arguments and a list of calls, all of one number; what becomes of them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import shardfold as sf
from shardfold.testing import Ranks, RanksFailed
from tests.draws.blocks import BUFFERED, CONTAINING, ODD, PLAIN, RECURRENT, SHARING, Block
from tests.draws.calls import Call, Count, Void, differs, expect, play
from tests.draws.model import ONE_GROUP

TOLERANCE = {"float64": 1e-12, "float32": 2e-4}
LIMIT = 45.0  # seconds for one draw


@dataclass(frozen=True)
class Draw:
    """``options``: arguments of the engine, as Python text, which may name ``sf``, ``torch`` and ``folder``; ``given``:
    the optimizer is an object, and not what makes one."""

    blocks: tuple[Block, ...]
    calls: tuple[Call, ...]
    size: int = 2
    head: str = "called"
    dtype: str = "float64"
    optimizer: str = "sgd"
    given: bool = False
    accumulate: int = 1
    clip: float | None = None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def delayed(self) -> bool:
        return "delayed_update" in self.options.get("overlap", "")

    def text(self) -> str:
        """Python of the draw."""
        return f"Draw({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


@dataclass(frozen=True)
class Outcome:
    """``kind``: ``ran``, ``refused``, ``void`` (there is nothing to compare with) or ``failed``."""

    kind: str
    said: str = ""

    @property
    def sign(self) -> str:
        """What a smaller draw has to fail with, too, to be the same."""
        if "sees other values" in self.said:
            return "values"
        found = re.search(r"call \d+, \(.*?\}\): (.{0,60})", self.said)
        return re.sub(r"[0-9]+|'.*?'", "", found.group(1) if found else self.said[:60])


# -- models


def some_blocks(draw: random.Random) -> tuple[Block, ...]:
    return tuple(one_block(draw, i, deep=True) for i in range(draw.choice([1, 2, 2, 3, 3, 4])))


def one_block(draw: random.Random, number: int, *, deep: bool) -> Block:
    families = [PLAIN, PLAIN, ODD, RECURRENT, BUFFERED, *([SHARING] if number else []), *([CONTAINING] if deep else [])]
    family = draw.choice(families)
    kind = draw.choice(family)
    if family is CONTAINING:
        return kind, tuple(one_block(draw, 0, deep=False) for _ in range(draw.choice([1, 2])))
    return kind, draw.randrange(number) if family is SHARING else 0


# -- engines

ONCE = 'sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute", until="step"))'
TABLES = (
    ONCE, ONCE, 'sf.PRESETS["zero3"].edit("params", over=("inter",))',
    'sf.PRESETS["zero1"].edit("master", "moments", over=("intra",))',
    'sf.PRESETS["zero2"].edit("grads", "master", "moments", over=("intra",))',
    'sf.PRESETS["zero3"].replace(held=sf.Cell(over=("intra",), dtype="compute"))',
    'sf.PRESETS["ddp"].edit("moments", "master", tier="host")',
    'sf.PRESETS["zero3"].edit("master", "moments", "grads", tier="host")',
)  # fmt: skip
EXACT = tuple(name for name in sf.PRESETS if name != "zeropp")
UNITS = ('["blocks.*"]', '["blocks.*"]', '["blocks.0"]', "[torch.nn.Linear]", '["blocks.0", "head"]')
NESTED_UNITS = ('["blocks.*.inner.*"]',) * 3
MODES = (
    '"recompute"', '"recompute"', '"select"', '"packed"', 'sf.Activations(mode="host", smallest=1)',
    'sf.Activations(mode="disk", smallest=1)', 'sf.Activations(mode="recompute", inputs="host", smallest=1)',
    '{"blocks.0": "recompute", "*": "keep"}', '{"blocks.0": sf.Activations(mode="host", smallest=1), "*": "recompute"}',
)  # fmt: skip
OFFLOADS = ('"host"', '"host:0.5"', '{"optimizer": "disk", "grads": "host", "folder": folder}',
            '{"optimizer": "host"}')  # fmt: skip


def some_options(draw: random.Random, size: int, blocks: Sequence[Block]) -> dict[str, str]:
    layout = draw.choice(TABLES) if draw.random() < 0.25 else f'"{draw.choice(EXACT)}"'
    options = {"layout": layout}
    if size > 1 and ("over=" in layout or layout in ('"hsdp"', '"hpz"') or draw.random() < 0.15):
        inter = draw.choice([n for n in (1, 2, size) if size % n == 0])
        options["mesh"] = f'{{"inter": {inter}, "intra": {size // inter}}}'
    if draw.random() < 0.5:
        nested = any(isinstance(argument, tuple) for _, argument in blocks)
        options["units"] = draw.choice([*UNITS, *NESTED_UNITS] if nested else UNITS)
    if draw.random() < 0.4:
        options.setdefault("units", UNITS[0])  # few blocks have siblings of their class
        options["activations"] = draw.choice(MODES)
    if layout.strip('"') in ("zero1", "zero2", "zero3") and draw.random() < 0.2:
        options["offload"] = draw.choice(OFFLOADS)
    elif layout == '"infinity"' and draw.random() < 0.4:
        options["offload"] = '{"params": "disk", "optimizer": "disk", "grads": "disk", "folder": folder}'
    if (overlap := some_overlap(draw, layout, options)) is not None:
        options["overlap"] = overlap
    if draw.random() < 0.15:
        options["debug"] = "True"
    if draw.random() < 0.05:
        options["precision"] = '"bf16"'  # fp64 is kept
    return options


def some_overlap(draw: random.Random, layout: str, options: dict[str, str]) -> str | None:
    chosen = {
        "prefetch": draw.choice(["0", "2"]) if draw.random() < 0.2 else None,
        "reduces_in_flight": draw.choice(["0", "1"]) if draw.random() < 0.2 else None,
        "order": '"any"' if draw.random() < 0.1 else None,
        "update_thread": "True" if draw.random() < 0.25 else None,
        "reduce_once": "True" if draw.random() < 0.2 else None,
    }
    if "offload" in layout or "offload" in options:
        if draw.random() < 0.25:
            chosen |= {"delayed_update": "True", "update_thread": None}
        elif draw.random() < 0.25:
            chosen["speculate"] = '"1MiB"'
    words = [f"{name}={value}" for name, value in chosen.items() if value is not None]
    return f"sf.Overlap({', '.join(words)})" if words else None


def some_copies(draw: random.Random, optimizer: str, options: dict[str, str]) -> str | None:
    """Who holds copies of the optimizer's states, where there can be such."""
    away = "offload" in options or any(word in options["layout"] for word in ("tier=", "infinity", "offload"))
    once = optimizer.rpartition(":")[2] in ("sgd", "adamw") and "update_thread" not in options.get("overlap", "")
    return draw.choice(['"rank"', '"host"']) if once and not away and draw.random() < 0.6 else None


# -- calls


BETWEEN_STEPS = ("freeze", "load_state", "save", "load", "rebuild")
ENDS = ("zero", "reset", "fail")


class Calls:
    """A list that grows by whole steps and by what is done between them."""

    def __init__(
        self,
        draw: random.Random,
        blocks: int,
        accumulate: int,
        size: int,
        *,
        alike: bool,
        delayed: bool,
    ) -> None:
        self.draw, self.blocks, self.accumulate, self.size = draw, blocks, accumulate, size
        self.alike, self.delayed = alike, delayed
        self.made: list[Call] = []
        self.saved = False

    def add(self, name: str, **arguments: Any) -> None:
        self.made.append((name, arguments))

    def seed(self) -> int:
        return self.draw.randrange(1000)

    def micro_batch(self, *, weighed: bool, bare: bool) -> None:
        draw, more = self.draw, dict[str, Any]()
        if weighed:
            more["weights"] = tuple(draw.randint(1, 5) for _ in range(self.size))
        elif bare:
            more["how"] = "bare"
        if draw.random() < 0.15:
            more["forwards"] = 2
        if draw.random() < 0.12:
            more["between"] = draw.choice(["evaluate", "evaluate", "evaluate_gathered", "state", "read"])
        if draw.random() < 0.2:
            skips = tuple((draw.randrange(self.blocks),) * draw.randrange(2) for _ in range(self.size))
            more["skips"] = skips[:1] if self.alike else skips
        if draw.random() < 0.05:
            more["backwards"] = 2
        self.add("train", seed=self.seed(), **more)

    def step(self) -> None:
        draw = self.draw
        weighed, bare = draw.random() < 0.2, draw.random() < 0.4
        for i in range(self.accumulate):
            if i + 1 < self.accumulate and draw.random() < 0.1:
                self.add("train", seed=self.seed(), sync=False, **({"weights": (2, 3)} if weighed else {}))
            else:
                self.micro_batch(weighed=weighed, bare=bare)
            if draw.random() < 0.15:
                self.beside(between=True)
            if draw.random() < 0.3:
                self.add("step")
        chance = draw.random()
        if chance < 0.06:
            return self.add("zero")
        if chance < 0.1:
            return self.add("optimizer_zero")
        if chance < 0.15 and not self.delayed:
            late = self.saved and draw.random() < 0.5
            return self.add("fail_step", **({"late": True} if late else {}))
        if chance < 0.3:
            self.add("grads")
        self.add("step")

    def beside(self, *, between: bool = False) -> None:
        """Something between two steps, or between two micro-batches."""
        draw = self.draw
        within = ["evaluate", "evaluate", "evaluate_gathered", "forward", "rate", "state", "read", "reset", "fail"]
        apart = ["save", "save", "load", "freeze", "unfreeze", "write", "load_state", "fail", "fail", "evaluate_copy",
                 "rebuild"]  # fmt: skip
        name = draw.choice(within if between else within + apart)
        arguments: dict[str, Any] = {}
        if name in ("evaluate", "evaluate_gathered", "forward", "evaluate_copy", "fail"):
            arguments["seed"] = self.seed()
        if name == "evaluate" and draw.random() < 0.3:
            arguments["train"] = True
        elif name.startswith("evaluate") and name != "evaluate_copy" and draw.random() < 0.4:
            least = 0 if name == "evaluate_gathered" else 1
            counts = tuple(draw.randint(least, 2) for _ in range(self.size))
            arguments["counts"] = counts[:1] if self.alike and name == "evaluate" else counts
        if name == "rate":
            arguments |= {"group": draw.randrange(2), "factor": draw.choice([0.5, 1.5])}
        if name in ("freeze", "unfreeze"):
            arguments |= {"block": draw.randrange(self.blocks)} | ({"on": False} if name == "unfreeze" else {})
        if name == "write":
            arguments |= {"index": self.seed(), "factor": 0.9}
        if name == "load_state":
            arguments["factor"] = 0.9
        if name == "fail":
            where, then = draw.choice(["forward", "backward"]), draw.choice(["", "", "reset", "zero"])
            arguments |= {"where": where, "block": draw.randrange(self.blocks)} | ({"then": then} if then else {})
        if name == "rebuild":
            arguments["layout"] = draw.choice(EXACT)
        if name == "save" and draw.random() < 0.5:
            arguments["wait"] = False
        if name == "load" and not self.saved:
            return
        self.saved = (self.saved or name == "save") and name != "rebuild"
        self.add("freeze" if name == "unfreeze" else name, **arguments)


def legal(calls: Sequence[Call], accumulate: int) -> tuple[Call, ...]:
    """Those calls that are not out of place: some belong between steps, and weights to whole steps."""
    count, kept = Count(accumulate), list[Call]()
    for call in calls:
        name, more = call
        try:
            if name == "train":
                weighed, sync = bool(more.get("weights")), more.get("sync", True)
                count.add(more.get("backwards", 1), weighed=weighed, sync=sync)
            elif name in BETWEEN_STEPS:
                count.between_steps()
            elif name == "step" and not count.micro:
                continue
        except Void:
            continue
        if name in ENDS or (name in ("step", "fail_step") and count.ready):
            count.end()
        kept.append(call)
    return tuple(kept)


def make_draw(seed: int) -> Draw:
    draw = random.Random(seed)
    size = draw.choices([1, 2, 3, 4], [10, 84, 4, 2])[0]
    blocks, accumulate = some_blocks(draw), draw.choice([1, 1, 2, 3])
    options = some_options(draw, size, blocks)
    optimizer = draw.choice(["", "", "two:"]) + draw.choice(list(ONE_GROUP))
    alike = "Inner" in repr(blocks)  # a backward in forward is one that all ranks run
    delayed = "delayed_update" in options.get("overlap", "")
    calls = Calls(draw, len(blocks), accumulate, size, alike=alike, delayed=delayed)
    for _ in range(draw.randint(3, 6)):
        while draw.random() < 0.45:
            calls.beside()
        calls.step()
    calls.add("state")
    head = draw.choice(["called", "called", "read", "tied"])
    dtype = "float32" if draw.random() < 0.1 else "float64"
    if dtype == "float32":
        options.pop("precision", None)  # 16 bits are not what plain PyTorch has in 32
    if size > 1 and (survive := some_copies(random.Random(f"copies of {seed}"), optimizer, options)) is not None:
        options["survive"] = survive
    return Draw(
        blocks=blocks, calls=legal(calls.made, accumulate), size=size, head=head, dtype=dtype,
        optimizer=optimizer, given=draw.random() < 0.4,
        accumulate=accumulate, clip=draw.choice([None, None, None, 0.3]), options=options,
    )  # fmt: skip


# -- what becomes of one

REFUSALS: tuple[str, ...] = ()
"""Of what an engine says in a call: what the documents say that it refuses."""


def try_out(draw: Draw, ranks: Ranks) -> Outcome:
    try:
        want = expect(draw)
    except Void as error:
        return Outcome("void", str(error))
    try:
        seen = ranks.run(play, draw, REFUSALS, world_size=draw.size, timeout=LIMIT, warnings_as_errors=False)
    except RanksFailed as error:
        first = error.failures[0]
        return Outcome("failed", f"{first.summary}\n{error}")
    refused = [said for said in seen if isinstance(said, str)]
    if refused:
        kind = "refused" if len(refused) == draw.size else "failed"
        return Outcome(kind, refused[0] if kind == "refused" else f"refused on some ranks only: {refused}")
    tolerance = TOLERANCE[draw.dtype]
    for number, (call, wanted) in enumerate(zip(draw.calls, want, strict=True)):
        for rank in range(draw.size):
            if said := differs(seen[rank][number], wanted[rank], tolerance):
                return Outcome("failed", f"rank {rank} sees other values: call {number}, {call}: {said}"[:600])
    return Outcome("ran")
