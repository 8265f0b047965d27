"""Runs with states on disk that are killed at random moments, over and over, each from the last checkpoint on.

python -m tests.support.killing                    # 100 kills, 2 ranks
python -m tests.support.killing --times 10 --ranks 1 --layout zero3

Each run makes an engine, loads the last checkpoint, and trains and saves until one of its ranks is killed (``SIGKILL``)
somewhere in that. The others have to end by themselves. Behind each kill the folder of the disk tier is empty and its
file system has as much room as at first, where that can be a small one of its own (an image of ext4: needs root). Every
second run has a file system that cannot make files without names, as far as it can tell. At the end a run that nobody
kills says what weights and moments are after each step: those that all the others have loaded or come to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.checkpoint import messages
from shardfold.errors import ShardfoldError
from shardfold.tiers import _drive as drive
from tests.support import models

LIMIT = 120  # seconds that a rank has to end in


def fingerprint(engine: sf.Engine) -> str:
    """Of all weights and moments, to the bit."""
    found = hashlib.sha256()
    for name, value in sorted(engine.state_dict().items()):
        found.update(name.encode() + value.numpy().tobytes())
    for state in ("exp_avg", "exp_avg_sq"):
        with engine.gathered(of=state) as values:
            for name, value in sorted(values.items()):
                found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def train(rank: int, given: argparse.Namespace, place: Path, number: int, out: int, stop: int | None) -> None:
    """One rank of one run: says what it has come to, and ends when another is gone or at step ``stop``."""
    folder, kept = str(place / "disk"), place / "run"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(place / f"store-{number}"), given.ranks)  # pyright: ignore
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given.ranks)
    messages.BEAT, messages.SILENCE = 0.1, 2.0
    if number % 2:
        drive.os.__dict__.pop("O_TMPFILE", None)

    def say(*words: object) -> None:
        if rank == 0:
            os.write(out, (json.dumps(words) + "\n").encode())

    torch.manual_seed(0)
    table = sf.PRESETS[given.layout].edit(*given.states, tier="disk", folder=folder)
    engine = sf.Engine(models.Small(), optimizer=partial(torch.optim.AdamW, lr=1e-2), layout=table)
    say("made")
    if stop is None and (kept / "latest").exists():
        engine.load(kept)
    say("loaded", engine.steps, fingerprint(engine))
    while engine.steps != stop:
        rows = [t.chunk(given.ranks)[rank] for t in models.batches(1, seed=engine.steps)[0]]
        engine.backward(engine(*rows))
        engine.step()
        say("step", engine.steps, fingerprint(engine))
        if stop is None:
            engine.save(kept / f"step-{engine.steps}", wait=engine.steps % 2 == 0, keep=2)
            say("saved")
    engine.close()
    dist.destroy_process_group()


def begin(given: argparse.Namespace, place: Path, number: int, stop: int | None = None) -> tuple[list[int], int]:
    """The processes of a run, and what its rank 0 says."""
    said, out = os.pipe()
    ranks: list[int] = []
    for rank in range(given.ranks):
        if not (child := os.fork()):
            os.close(said)
            status = 1
            try:
                train(rank, given, place, number, out, stop)
                status = 0
            except ShardfoldError:
                status = 3  # what a rank says when another is gone
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        ranks.append(child)
    os.close(out)
    return ranks, said


def ended(process: int) -> int:
    """How it ended, within the limit."""
    for _ in range(LIMIT * 100):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError("a rank hung when another was killed")


@contextmanager
def drive_at(folder: Path) -> Iterator[bool]:
    """A small file system there, if that can be made."""
    folder.mkdir()
    image = folder.with_suffix(".img")
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    made = False
    with suppress(OSError):
        steps = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
        made = all(subprocess.run(words, capture_output=True, check=False).returncode == 0 for words in steps)
    if made:
        (folder / "lost+found").rmdir()
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", str(folder)], check=True)


def killed(given: argparse.Namespace, place: Path) -> None:
    draw, states, tally = random.Random(given.seed), dict[int, str](), Counter[str]()
    with drive_at(place / "disk") as own:
        free = os.statvfs(place / "disk").f_bfree
        for number in range(given.times):
            ranks, said = begin(given, place, number)
            lines = os.fdopen(said)
            heard = [
                json.loads(line) for line, _ in zip(lines, range(draw.choice((0, 1, 2, 3, 5, 8, 11))), strict=False)
            ]
            time.sleep(draw.random() * 0.05)
            victim = draw.randrange(given.ranks)
            os.kill(ranks[victim], signal.SIGKILL)
            codes = [ended(process) for process in ranks]
            assert codes[victim] == -signal.SIGKILL and set(codes) <= {-signal.SIGKILL, 3}, codes
            heard += [json.loads(line) for line in lines if line.endswith("\n")]
            lines.close()
            for what, *found in heard:
                tally[what] += 1
                if found:
                    assert states.setdefault(found[0], found[1]) == found[1], f"{what} {found[0]} is another"
            tally[f"killed behind: {heard[-1][0] if heard else 'the start'}"] += 1
            left = os.listdir(place / "disk")
            tally["names left by a file system without nameless files"] += len(left)
            assert not left or number % 2, left
            for name in left:
                assert name.startswith(drive.PREFIX) and (place / "disk" / name).stat().st_size == 0
                (place / "disk" / name).unlink()
            assert not own or os.statvfs(place / "disk").f_bfree == free, "room is lost"
        last = max(states, default=0)
        ranks, said = begin(given, place, given.times, stop=last)
        with os.fdopen(said) as lines:
            told = {found[0]: found[1] for _, *found in map(json.loads, lines) if found}
        assert [ended(process) for process in ranks] == [0] * given.ranks
        assert told == {step: told[step] for step in range(last + 1)} and states.items() <= told.items()
    print(f"{given.times} kills, {given.ranks} ranks, {given.layout}, on disk: {', '.join(given.states)}; {last} steps")
    print("\n".join(f"    {n:4} {what}" for what, n in sorted(tally.items())))
    print(f"all equal to a run without kills{', no byte of the drive was lost' if own else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", default="zero2")
    parser.add_argument("--states", nargs="+", default=["moments"])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        killed(given, Path(place))


if __name__ == "__main__":
    sys.exit(main())
