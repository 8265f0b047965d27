"""Steps of one GPT under contenders of `shardfold bench` that take turns: time, throughput, utilization, memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import shardfold as sf
from shardfold.comm.mesh import pick_device
from shardfold.engine.peak_rate import peak_of
from shardfold.launch import num_cores
from shardfold.plan.checks import human
from shardfold.plan.layout import PRECISIONS
from shardfold.tools.bench.contenders import Contender, find
from shardfold.tools.bench.results import ContenderRow, MeasuredRounds, loss_difference, rows
from shardfold.tools.bench.settings import Settings, gpt_shape
from shardfold.tools.bench.turns import Callbacks, available_bytes, compare
from shardfold.tools.extras import EXTRAS
from tests.support.gpu.report import FAILED, PASSED, SKIPPED, Case
from tests.support.gpu.section import Asked, Notes
from tests.support.gpu.setting import SIM

__all__ = ["WORKS", "Work", "absent", "figures", "no_room", "run", "set_up", "settings_of"]

LEAST = 20.0  # seconds that a comparison is begun with
SPARE = 0.9  # of the host's memory may be taken


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a section compares.

    Attributes:
        contenders: of `shardfold bench`; ratios are to the first that runs.
        given: settings of it.
        host: bytes of host memory for each parameter, by contender: these run one after the other, and only where
            there is room. Empty: all are alive together.
    """

    contenders: Sequence[str]
    given: Mapping[str, Any]
    host: Mapping[str, float] = field(default_factory=dict[str, float])


#: fp32 master, two moments and gradients of AdamW, an eighth more as pinned memory; parameters that arrive late, in
#: bf16. FSDP2 keeps its fp32 parameters in the master's place, and pins them and their gradients in powers of 2.
AWAY = {"zero2-host": 18.0, "delayed-zero2-host": 20.0, "deepspeed-2-host": 18.0, "torch-fsdp2-host": 8.0 + 8.0 * 1.4}
COMMON = {"precision": "bf16", "warm": 3}
REHEARSED = {"params": 2e5, "rows": 1, "context": 16, "rounds": 1, "steps": 1, "warm": 2, "threads": 1}

WORKS: dict[str, Work] = {
    "steps-200M": Work(
        contenders=("bare", "compile-bare", "torch-ddp", "torch-fsdp2", "compile-fsdp2", "deepspeed-2", "zero3",
                    "compile-zero3"),
        given={"params": 200e6, "rows": 8, "context": 1024, "rounds": 3, "steps": 5, "together": 4},
    ),
    "steps-1.3B": Work(
        contenders=("compile-bare", "torch-ddp", "compile-fsdp2", "deepspeed-2", "zero3", "compile-zero3"),
        given={"params": 1.3e9, "rows": 2, "context": 2048, "rounds": 3, "steps": 4, "together": 2},
    ),
    "steps-7B": Work(
        contenders=("zero2-host", "delayed-zero2-host", "torch-fsdp2-host", "deepspeed-2-host"),
        given={"job": "offload", "params": 6.5e9, "rows": 4, "context": 2048, "rounds": 1, "steps": 2, "warm": 2},
        host=AWAY,
    ),
    # Few tokens: what the host does for each operation decides.
    "compile": Work(
        contenders=("bare", "compile-bare", "torch-fsdp2", "compile-fsdp2", "zero3", "compile-zero3", "one-pass-zero3"),
        given={"params": 100e6, "rows": 1, "context": 512, "rounds": 3, "steps": 10, "together": 7},
    ),
    "fp8": Work(
        contenders=("zero3", "fp8-zero3"),
        given={"params": 1.3e9, "rows": 4, "context": 2048, "rounds": 2, "steps": 4, "together": 2},
    ),
}  # fmt: skip


def run(asked: Asked, notes: Notes) -> None:
    if lacking := [name for name, extra in EXTRAS.items() if extra == "cli" and find_spec(name) is None]:
        notes.not_run("all contenders", f"{', '.join(lacking)} is not installed (pip install 'shardfold[cli]')")
        return
    work = WORKS[asked.name]
    settings = settings_of(work, asked, notes)
    notes.fact("what", settings.title())
    set_up(asked, notes)
    chosen: list[Contender] = []
    for name in work.contenders:
        if why := absent(find(name), settings, asked):
            notes.not_run(name, why)
        else:
            chosen.append(find(name))
    for group in [[each] for each in chosen] if work.host else [chosen]:
        names = ", ".join(each.name for each in group)
        if notes.clock.left < LEAST and not asked.small:
            notes.not_run(names, f"the {notes.clock.seconds:.0f} s of the section were over")
        elif why := no_room(work, settings, group):
            notes.not_run(names, why)
        elif group:
            _compared(asked, notes, work, group)


def settings_of(work: Work, asked: Asked, notes: Notes) -> Settings:
    """Those of `shardfold bench` that the work has here, with what is left of the time."""
    left = max(notes.clock.left, 1.0)
    here = {
        "device": asked.device, "ranks": asked.ranks, "threads": max(1, num_cores() // asked.ranks),
        "within": left, "timeout": max(left, LEAST),
    }  # fmt: skip
    return Settings(**{**COMMON, **here, **work.given, **(REHEARSED if asked.small else {})})


def set_up(asked: Asked, notes: Notes) -> None:
    """For the processes of contenders: what one has compiled the others find, and a rehearsal compiles nothing."""
    if asked.small:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        notes.not_run("compiling", "a rehearsal runs what is to be compiled as it is")
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(asked.folder) / "compiled")


def absent(contender: Contender, settings: Settings, asked: Asked) -> str | None:
    """Why it does not take part here, or None."""
    if contender.missing():
        return f"{contender.package} is not installed"
    if asked.device == SIM and not contender.ours:
        return "peers are not run on the simulated device"
    if asked.device == SIM and contender.compiled:
        return "nothing compiles for the simulated device"
    if contender.ours and contender.compiled and "compile" not in {each.name for each in fields(sf.Runtime)}:
        return "sf.Runtime of this version compiles nothing"
    if contender.precision and contender.precision not in PRECISIONS:
        return f"this version has no precision {contender.precision!r}"
    return contender.misfit(settings)


def no_room(work: Work, settings: Settings, group: Sequence[Contender]) -> str | None:
    """Why what these keep in host memory does not fit, or None."""
    params = gpt_shape(settings.params, settings.context).num_parameters
    needed = sum(work.host.get(each.name, 0.0) for each in group) * params
    if needed <= SPARE * available_bytes():
        return None
    return f"about {human(needed)} of host memory are needed, and {human(available_bytes())} can be had"


def _compared(asked: Asked, notes: Notes, work: Work, group: Sequence[Contender]) -> None:
    """Has them take turns, and notes their rows after each turn: a time that runs out leaves what there is."""

    def note(measured: MeasuredRounds) -> None:
        complete = list(measured.complete())
        for row in rows(measured, complete[0]) if complete else []:
            says = f"ratios to {complete[0]}" if row.name == complete[0] and len(group) > 1 else ""
            notes.case(Case(name=row.name, verdict=PASSED, says=says, figures=figures(row, measured, asked)))

    settings = settings_of(work, asked, notes)
    measured = compare(settings, group, Callbacks(doing=notes.begins, turned=note))
    note(measured)
    for name, failure in measured.failures.items():
        verdict = FAILED if find(name).ours else SKIPPED  # a peer that does not run is no failure of ours
        notes.case(Case(name=name, verdict=verdict, says=failure.reason, detail=failure.said))
    for name in measured.not_started:
        notes.not_run(name, f"not started, as three quarters of {settings.within:.0f} s were over")
    if difference := loss_difference(measured):
        step, relative, (one, other) = difference
        notes.fact("losses", f"of step {step} differ by {relative:.1e} at most, between {one} and {other}")


def figures(row: ContenderRow, measured: MeasuredRounds, asked: Asked) -> dict[str, Any]:
    """Of one contender. Utilization is of the rate that the maker prints for bf16; 6 operations for each token and
    parameter, and 12 for each token, position before or behind it, and dimension of a layer (PaLM, arXiv 2204.02311,
    appendix B)."""
    settings = measured.settings
    shape = gpt_shape(settings.params, settings.context)
    rate = settings.rows * settings.context / row.step  # tokens per second of a rank
    found: dict[str, Any] = {
        "step, ms": round(1e3 * row.step, 2), "ratio": round(row.ratio, 3), "tokens/s": round(rate * settings.ranks),
    }  # fmt: skip
    # The simulated device is known in the ranks alone.
    peak = None if asked.device == SIM else peak_of(None, pick_device(asked.device), PRECISIONS["bf16"]).flops
    if peak is not None:
        products = 6 * shape.num_parameters
        attention = 12 * shape.layers * shape.d_model * settings.context
        found["MFU"] = f"{products * rate / peak:.1%}"
        found["with attention"] = f"{(products + attention) * rate / peak:.1%}"
    found |= {name: human(value) for name in ("peak", "held", "moved") if (value := getattr(row, name)) is not None}
    found["behind backward, ms"] = round(1e3 * row.update, 2)
    found["first step, s"] = round(measured.first[row.name], 1)
    return found
