"""Moments on a disk that fails on one rank: what all ranks are told, what is lost, and how training goes on."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.errors import StepError
from shardfold.plan.rewrites import Overlap
from shardfold.testing import Ranks
from shardfold.tiers import _drive as drives
from shardfold.tiers.disk import DiskTier
from tests.support import models
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SHORT = 4096
"""Bytes that a file may have: the first moment of each engine fits."""


def make(tier: str = "disk", layout: str = "zero2", **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    table = sf.PRESETS[layout].edit("moments", tier=tier)
    return sf.Engine(models.Small(), optimizer=ADAMW, **grouped(layout=table, **options))


def step(engine: sf.Engine, number: int) -> None:
    part = [t.chunk(engine.world_size)[engine.rank] for t in models.batches(number + 1)[number]]
    engine.backward(engine(*part))
    engine.step()


def everything(engine: sf.Engine) -> dict[str, Tensor]:
    """All values and all moments, whole."""
    found = dict(engine.state_dict())
    for state in ("exp_avg", "exp_avg_sq"):
        with engine.gathered(of=state) as values:
            found |= {f"{state} of {name}": value.clone() for name, value in values.items() if value is not None}
    return found


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def plain(steps: int) -> dict[str, Tensor]:
    """What training with moments on the device comes to."""
    engine = make("device")
    for number in range(steps):
        step(engine, number)
    found = everything(engine)
    engine.close()
    return found


@contextmanager
def full() -> Iterator[None]:
    """Files of this process cannot grow beyond their first bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHORT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def cut_short(engine: sf.Engine) -> None:
    """This rank's file loses all but its beginning."""
    tier = engine.sharded.tiers.named("disk")
    assert isinstance(tier, DiskTier)
    tier.look(patient=True)
    os.truncate(tier.drives[0].fileno(), SHORT)


def said(do: Callable[[], Any]) -> tuple[str, str, int | None]:
    """Type and words of what is raised, and the system's number of its cause on this rank."""
    try:
        do()
    except sf.ShardfoldError as error:
        return type(error).__name__, str(error), getattr(error.__cause__, "errno", None)
    return "", "", None


# -- what cannot be written


@contextmanager
def at_once() -> Iterator[None]:
    """Each write is waited for by who stores: what fails in a step is found in that step."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DiskTier, "is_refused", True)
        yield


@at_once()
def _full(folder: str, bad: int, options: dict[str, Any]) -> list[Any]:
    engine = make(**options)
    step(engine, 0)
    found: list[Any] = []
    for number in (1, 2):
        if engine.rank == bad:
            with full():
                found.append(said(partial(step, engine, number)))
        else:
            found.append(said(partial(step, engine, number)))
    engine.save(f"{folder}/full", wait=True)  # what is in memory only is saved too
    step(engine, 3)
    found += [engine.steps, differ(everything(engine), plain(4))]
    engine.load(f"{folder}/full")
    step(engine, 3)
    found.append(differ(everything(engine), plain(4)))
    engine.close()
    return found


@pytest.mark.parametrize("options", [{}, {"overlap": Overlap(update_thread=True), "layout": "zero3"}])
def test_a_full_disk_loses_nothing(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """All ranks hear from each step which rank could not write how much where, and why. The step is done, a checkpoint
    is whole, and training goes on, to the bit as with moments on the device."""
    for rank, (*errors, steps, training, resumed) in enumerate(
        ranks.run(_full, str(tmp_path), 1, options, world_size=2)
    ):
        for number, (kind, words, cause) in enumerate(errors, 2):
            assert kind == "StepError"
            assert words.startswith(
                f"step {number} is done, but not all states are back where they rest: rank 1: STORE "
            )
            assert "bytes of values could not be written to a file in " in words and "File too large" in words
            assert "Nothing is lost: what is not in the file stays in host memory. Make room there and go on" in words
            assert cause == (errno.EFBIG if rank == 1 else None)
        assert len(errors) == 2 and steps == 4
        assert not training and not resumed


@at_once()
def _filled(folder: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drives, "_system_fallocate", None)  # room is looked up, and then another takes it
        table = sf.PRESETS["zero2"].edit("moments", tier="disk", folder=folder)
        torch.manual_seed(0)
        engine = sf.Engine(models.Small(), optimizer=ADAMW, layout=table)
    ballast = Path(folder, "ballast")
    if engine.rank == 0:
        with suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    torch.distributed.barrier()
    found: list[Any] = [said(partial(step, engine, 0))[:2]]
    torch.distributed.barrier()
    ballast.unlink(missing_ok=True)
    torch.distributed.barrier()
    step(engine, 1)
    found += [engine.steps, differ(everything(engine), plain(2))]
    engine.close()
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: needs root")
def test_a_small_disk_that_another_fills(ranks: Ranks, tmp_path: Path) -> None:
    """Where room cannot be taken, only looked up, and is gone when states are stored: both ranks say so, and once there
    is room training goes on to the bit as if nothing had been."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={1 << 20}", "none", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        for (kind, words), steps, training in ranks.run(_filled, str(tmp_path), world_size=2):
            assert kind == "StepError" and "step 1 is done, but not all states are back where they rest" in words
            assert f"could not be written to a file in {tmp_path}" in words and "No space left on device" in words
            assert steps == 2 and not training
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# -- what cannot be read


def _lost(folder: str, bad: int, options: dict[str, Any]) -> list[Any]:
    engine = make(**options)
    step(engine, 0)
    engine.save(f"{folder}/before", wait=True)
    if engine.rank == bad:
        cut_short(engine)
    found: list[Any] = [said(partial(step, engine, 1))]
    found.append(engine.memory().transient)
    found.append(said(lambda: engine.save(f"{folder}/after", wait=True)))
    found.append(said(partial(step, engine, 1)))
    engine.load(f"{folder}/before")
    step(engine, 1)
    step(engine, 2)
    engine.save(f"{folder}/after", wait=True)
    found += [engine.steps, differ(everything(engine), plain(3))]
    engine.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": Overlap(update_thread=True), "layout": "zero3"},
        {"offload": {"optimizer": "disk", "grads": "disk"}},
    ],
)
def test_what_a_disk_lost_is_loaded_again(ranks: Ranks, tmp_path: Path, options: dict[str, Any], world: int) -> None:
    """All ranks hear which rank could not read how much from where, and why, of which unit. From then on steps and
    saves are refused with that reason, and a checkpoint puts all right in the same engine: to the bit as if nothing had
    been."""
    for rank, (lost, transient, saved, again, steps, training) in enumerate(
        ranks.run(_lost, str(tmp_path), world - 1, options, world_size=world)
    ):
        kind, words, cause = lost
        who = "rank 1: " if world == 2 else ""
        assert kind == "StepError" and words.startswith(f"step 2 ended half-way: {who}UPDATE ")
        assert "bytes of values could not be read from a file in " in words and "the file has lost its end" in words
        assert words.endswith("engine.load() of a checkpoint puts all of them right.")
        assert cause == (errno.ENODATA if rank == world - 1 else None)
        for call, (kind, words, _) in (("engine.save()", saved), ("engine.step()", again)):
            assert kind == "UsageError" and words.startswith(f"{call}: step 2 ended half-way ({who}UPDATE ")
            assert words.endswith("the file has lost its end): load a checkpoint before going on.")
        assert transient == 0 and steps == 3 and not training


def _saved(folder: str) -> list[Any]:
    engine = make()
    step(engine, 0)
    engine.save(f"{folder}/before", wait=True)
    if engine.rank == 1:
        cut_short(engine)
    found: list[Any] = [said(lambda: engine.save(f"{folder}/after", wait=True)), Path(folder, "after").exists()]
    found.append(said(lambda: engine.gathered(of="exp_avg_sq").__enter__()))
    engine.load(f"{folder}/before")
    step(engine, 1)
    found.append(differ(everything(engine), plain(2)))
    engine.close()
    return found


def test_no_checkpoint_is_written_of_what_cannot_be_read(ranks: Ranks, tmp_path: Path) -> None:
    """Where a save is the first to find it, or ``gathered()``, it is refused on all ranks with the reason; a load mends
    that too."""
    found = ranks.run(_saved, str(tmp_path), world_size=2)
    for rank, ((kind, words, _), there, (lent, why, _), training) in enumerate(found):
        assert kind == "CheckpointError" and "rank 1: " in words and "the file has lost its end" in words
        assert lent == ("UsageError" if rank == 1 else "ConfigError") and "the file has lost its end" in why
        assert ("rank 1: " in why) == (rank == 0) and "load a checkpoint before going on" in why
        assert not there and not training


ALL_ON_DISK = {"optimizer": "disk", "grads": "disk", "params": "disk"}


def _unreadable(folder: str) -> list[Any]:
    engine = make("disk", "zero3", offload=ALL_ON_DISK)
    average = sf.Average(engine, decay=0.5)
    step(engine, 0)
    state = engine.state_dict()
    engine.save(f"{folder}/before", wait=True)
    part = [t.chunk(engine.world_size)[engine.rank] for t in models.batches(2)[1]]
    engine.backward(engine(*part))
    tier = engine.sharded.tiers.named("disk")
    assert isinstance(tier, DiskTier)
    tier.look(patient=True)  # what is not in the file yet would come from memory

    def lend(*names: str, **options: Any) -> None:
        with engine.gathered(*names, **options) as values, torch.no_grad():
            if options.get("write"):
                values.add_(1.0)

    def apply() -> None:
        with average.applied():
            raise AssertionError("the average was lent")

    calls: list[Callable[[], Any]] = [
        lend, partial(lend, of="master"), partial(lend, of="exp_avg"), engine.state_dict,
        partial(lend, "head.weight", write=True), apply, lambda: engine.save(f"{folder}/after", wait=True),
        engine.release,
    ]  # fmt: skip
    with wrong(engine, "broken", "preadv") if engine.rank == 1 else nullcontext():
        found = [said(partial(lend, of="grads"))[:2]]
        engine.zero_grad()
        found += [said(call)[:2] for call in calls]
    again = engine.state_dict()
    mended = [all(torch.equal(again[name], state[name]) for name in state)]
    engine.load(f"{folder}/before")
    step(engine, 1)
    mended.append(not differ(everything(engine), plain(2)))
    engine.close()
    return [found, mended, Path(folder, "after").exists()]


@pytest.mark.soak
def test_what_cannot_be_read_between_steps_is_told_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """All states on disk, of which one rank's cannot be read: whoever asks for values hears on every rank which rank
    could not read, and why, and nothing hangs. Where the disk reads again, all is as before."""
    for rank, (found, mended, there) in enumerate(ranks.run(_unreadable, str(tmp_path), world_size=2)):
        for number, (kind, words) in enumerate(found):
            assert kind and "Input/output error" in words, (number, kind, words)
            assert "rank 1: " in words or rank == 1, (number, words)
            assert "load a checkpoint before going on" in words or kind == "CheckpointError", (number, words)
        assert mended == [True, True] and not there


# -- every way to fail, in every operation


def _raises(code: int) -> Callable[..., int]:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def _some(call: Callable[..., int]) -> Callable[..., int]:
    """It says that it did a part, or all, as a die falls; what it does not say of a read is not there."""
    draw = Random(0)

    def less(file: int, data: Any, place: int) -> int:
        got = call(file, data, place)
        part = draw.choice((got, draw.randint(1, got)))
        if isinstance(data, list):
            data[0][part:got] = bytes(got - part)
        return part

    return less


WAYS: dict[str, Callable[[Callable[..., int]], Callable[..., int]]] = {
    "no room": lambda call: _raises(errno.ENOSPC),
    "broken": lambda call: _raises(errno.EIO),
    "stuck": lambda call: lambda *_: 0,
    "short": _some,
}
SAID = {
    "no room": "No space left on device",
    "broken": "Input/output error",
    "stuck": "100 times in a row the drive took or gave less than 4096 bytes",
}
"""What is told of each; nothing of a drive that takes what is left when it is asked again."""


@contextmanager
def wrong(engine: sf.Engine, way: str, call: str) -> Iterator[None]:
    """Calls of the system go wrong in that way with the file of this rank's disk, and with no other."""
    tier = engine.sharded.tiers.named("disk")
    assert isinstance(tier, DiskTier)
    file, real = tier.drives[0].fileno(), getattr(os, call)
    faulty = WAYS[way](real)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, call, lambda fd, *rest: (faulty if fd == file else real)(fd, *rest))
        yield
        tier.look(patient=True)


def _every_way(folder: str, bad: int, cases: Sequence[tuple[str, str]]) -> list[list[Any]]:
    found: list[list[Any]] = []
    expected, engine = plain(3), make()
    step(engine, 0)
    engine.save(f"{folder}/before", wait=True)
    for way, call in cases:
        with wrong(engine, way, call) if engine.rank == bad else nullcontext():
            heard = [said(partial(step, engine, number))[:2] for number in (1, 2)]
        engine.load(f"{folder}/before")
        step(engine, 1)
        step(engine, 2)
        found.append([heard, engine.steps, differ(everything(engine), expected)])
        engine.load(f"{folder}/before")
    engine.close()
    return found


@pytest.mark.soak
def test_every_way_to_fail_is_told_and_mended_by_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """A drive of one rank that has no room, breaks, or takes and gives nothing any more, as states are fetched and as
    they are stored: both ranks say the same sentence, in the step or, as writes are not waited for, in the next. The
    last checkpoint loads, and training from it goes on to the bit as if nothing had been. A drive that does a part of
    what it is asked for loses nothing, and nothing is said."""
    cases = [(way, call) for way in WAYS for call in ("pwrite", "preadv") if (way, call) != ("no room", "preadv")]
    one, other = ranks.run(_every_way, str(tmp_path), 1, cases, world_size=2)
    for (way, call), (words, steps, training), (same, *_) in zip(cases, one, other, strict=True):
        assert words == same, "both ranks say the same"
        told = [(kind, sentence) for kind, sentence in words if kind]
        assert bool(told) == (way != "short"), (way, call, words)
        if told:
            kind, sentence = told[0]
            assert kind == "StepError" and SAID[way] in sentence, sentence
            done = "written to" if call == "pwrite" else "read from"
            assert (
                f"rank 1: {'STORE' if call == 'pwrite' else 'UPDATE'} " in sentence
                and f" {done} a file in " in sentence
            )
        if call == "preadv" and told:
            assert words[0][0] == "StepError" and words[1][0] == "UsageError", (
                "no step is made of what could not be read"
            )
        assert steps == 3 and not training, (way, call)


def _not_loaded(folder: str, bad: int) -> list[Any]:
    engine = make()
    step(engine, 0)
    engine.save(f"{folder}/before", wait=True)
    step(engine, 1)
    with wrong(engine, "broken", "pwrite") if engine.rank == bad else nullcontext():
        found: list[Any] = [said(lambda: engine.load(f"{folder}/before"))[:2]]
        found.append(said(partial(step, engine, 1))[:2])
    engine.load(f"{folder}/before")
    step(engine, 1)
    found += [engine.steps, differ(everything(engine), plain(2))]
    engine.close()
    return found


def test_a_disk_that_fails_in_a_load(ranks: Ranks, tmp_path: Path) -> None:
    """No rank waits for the one that cannot bring what it has loaded to its disk: all say the same, no step is made of
    what is there in part, and a load that is not disturbed puts all right."""
    for loaded, stepped, steps, training in ranks.run(_not_loaded, str(tmp_path), 1, world_size=2):
        kind, words = loaded
        assert kind == "CheckpointError" and words.startswith("rank 1: ") and "Input/output error" in words
        assert words.endswith("The engine now holds a part of it: load another checkpoint before going on.")
        assert stepped[0] == "UsageError" and stepped[1].endswith("half-way: load a checkpoint before going on.")
        assert steps == 2 and not training


# -- updates that raise


def refuse(*_: Any) -> None:
    raise ValueError("of the kernel")


def _raising(folder: str, tier: str) -> list[Any]:
    engine = make(tier)
    step(engine, 0)
    engine.save(f"{folder}/before", wait=True)
    assert engine._updater is not None
    shard = [*engine._updater._fused.values()][1]
    shard._adam = refuse  # type: ignore[method-assign]
    found: list[Any] = []
    try:
        step(engine, 1)
    except (ValueError, StepError) as error:
        found += [type(error).__name__, str(error)]
    del shard._adam
    found += [set(shard.steps), len(shard.here), said(engine.step)]
    engine.load(f"{folder}/before")
    step(engine, 1)
    found.append(differ(everything(engine), plain(2)))
    engine.close()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_an_update_that_raises_is_not_counted(ranks: Ranks, tmp_path: Path, tier: str) -> None:
    """Nor is it taken for done: the next step is refused with the reason, also where ranks raise by themselves, and a
    checkpoint puts all right."""
    for kind, words, counts, here, again, training in ranks.run(_raising, str(tmp_path), tier, world_size=2):
        assert kind == ("StepError" if tier == "disk" else "ValueError") and "of the kernel" in words
        assert counts == {1} and not here
        assert again[0] == "UsageError" and again[1].startswith("engine.step(): step 2 ended half-way (")
        assert "of the kernel" in again[1] and not training


def test_an_update_that_is_done_again_counts_once() -> None:
    """Its bias corrections are those of one step."""
    engine, other = make("device"), make("device")
    for each in (engine, other):
        each.backward(each(*models.batches(1)[0]))
        each._runner.visible.hide()
        assert each._updater is not None
        for unit in each.units:
            unit.gradients.complete()
            shard = each._updater._fused[id(unit.trainable[0])]
            used = [[True] * len(segment.parameters) for segment in unit.trainable]
            with torch.no_grad():
                if each is engine:
                    shard._adam = refuse  # type: ignore[method-assign]
                    with pytest.raises(ValueError, match="of the kernel"):
                        each._updater.update(unit, used, None)
                    del shard._adam
                each._updater.update(unit, used, None)
    assert not differ(engine.state_dict(), other.state_dict())
    engine.close()
    other.close()
