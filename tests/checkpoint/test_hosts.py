"""Checkpoints of hosts that share no disk: each has a part, and together they are what one folder would have been.

A host is a folder of its own here, which its ranks are given; in one soak it is a mount namespace, in which the same
path is another file system.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.checkpoint import draft, messages
from shardfold.checkpoint.folders import listed
from shardfold.checkpoint.inspect import inspect
from shardfold.checkpoint.verify import verify
from shardfold.errors import CheckpointError, ConfigError
from shardfold.testing import Ranks, RanksFailed
from tests.support.saving import Disk, die, engine, expect, failing, left_over, train, whole

WORLD = 4


def home(folder: str, ranks_per_host: int = 2) -> Path:
    """This rank's host's disk."""
    path = Path(folder, f"host{int(os.environ['RANK']) // ranks_per_host}", "run")
    path.mkdir(parents=True, exist_ok=True)
    return path


def equal(trained: sf.Engine, folder: Path) -> bool:
    """Whether an engine holds what was expected of its step: weights, and moments as a checkpoint of it has them."""
    state, kept = trained.state_dict(), torch.load(folder / f"expected-{trained.steps}.pt")
    return state.keys() == kept.keys() and all(torch.equal(state[name], kept[name]) for name in kept)


def write(folder: str, layout: str, keep: int | None = None) -> list[str]:
    """Saves three steps, each host into its own folder; what a save says of itself."""
    root = home(folder)
    trained = engine(layout)
    for step in range(1, 4):
        train(trained)
        expect(trained, Path(folder) / "any")
        trained.save(root / f"step-{step}", shared=False, wait=step != 2, keep=keep, state={"epoch": step})
    trained.close()
    torch.distributed.barrier()  # the other rank of this host may be the one that gives the folder back
    return sorted(path.name for path in root.iterdir())


def read(folder: str, layout: str, ranks_per_host: int, name: str = "") -> dict[str, object]:
    """Loads on any layout and any hosts, and trains on."""
    root = Path(folder, f"host{int(os.environ['RANK']) // ranks_per_host}", "run")
    trained = engine(layout)
    report = trained.load(root / name)
    same = equal(trained, Path(folder))
    moments = {}
    with trained.gathered("norm.weight", of="exp_avg") as values:
        moments["norm.weight"] = values.clone()
    train(trained)
    trained.close()
    return {"step": report.step, "state": report.state, "same": same, "fetched": report.num_bytes_fetched,
            "read": report.num_bytes, "moments": moments}  # fmt: skip


@pytest.mark.soak
def test_each_host_keeps_a_part_and_every_layout_loads_them(ranks: Ranks, tmp_path: Path) -> None:
    """4 ranks on 2 hosts write; the same hosts load under the same and under another layout, element for element. With
    the same layout no rank needs a byte of another host's weights."""
    assert ranks.run(write, str(tmp_path), "zero3", world_size=WORLD) == [["latest", "step-1", "step-2", "step-3"]] * 4
    for host in (0, 1):
        root = tmp_path / f"host{host}" / "run"
        assert (root / "latest").read_text() == "step-3"
        files = {path.name for path in (root / "step-3").iterdir()}
        theirs = {f"rank-{rank:05d}-of-00004.safetensors" for rank in (2 * host, 2 * host + 1)}
        assert files == {"index.json"} | theirs
    for layout in ("zero3", "zero1", "ddp"):
        for found in ranks.run(read, str(tmp_path), layout, 2, world_size=WORLD):
            assert found["step"] == 3 and found["same"] and found["state"] == {"epoch": 3}
            assert found["fetched"] < found["read"]


@pytest.mark.soak
def test_other_hosts_and_numbers_of_ranks_load_it(ranks: Ranks, tmp_path: Path) -> None:
    """A rank per host, three hosts of which one has nothing, all ranks on the first host beside one on the second."""
    ranks.run(write, str(tmp_path), "zero2", world_size=WORLD)
    for count, ranks_per_host in ((2, 1), (3, 1), (4, 3)):
        for rank, found in enumerate(ranks.run(read, str(tmp_path), "zero1", ranks_per_host, world_size=count)):
            assert found["step"] == 3 and found["same"], (count, rank)
            if rank // ranks_per_host == 2:
                assert found["fetched"] == found["read"] > 0


def pruned(folder: str) -> list[str]:
    return write(folder, "zero3", keep=2)


@pytest.mark.soak
def test_keep_holds_on_every_host(ranks: Ranks, tmp_path: Path) -> None:
    """`keep=2` leaves the same two on both hosts, and nothing else."""
    assert ranks.run(pruned, str(tmp_path), world_size=WORLD) == [["latest", "step-2", "step-3"]] * WORLD
    for host in (0, 1):
        assert left_over(tmp_path / f"host{host}" / "run") == []


@pytest.mark.soak
def test_the_folders_copied_together_are_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """What two hosts wrote, in one folder: it verifies, and one rank loads it."""
    ranks.run(write, str(tmp_path), "zero3", world_size=WORLD)
    union = tmp_path / "union" / "run"
    for host in (0, 1):
        shutil.copytree(tmp_path / f"host{host}" / "run", union, dirs_exist_ok=True)
    shutil.copy(tmp_path / "expected-3.pt", union.parent)
    assert whole(union) == 3
    trained = engine("ddp")
    assert trained.load(union).step == 3 and equal(trained, tmp_path)
    trained.close()


@pytest.mark.soak
def test_a_part_alone_says_what_is_missing_and_where_it_is(ranks: Ranks, tmp_path: Path) -> None:
    """Loading, reading and verifying the folder of one host name the files that lack, who wrote them, and where."""
    ranks.run(write, str(tmp_path), "zero3", world_size=WORLD)
    roots = [tmp_path / f"host{host}" / "run" for host in (0, 1)]
    files = [f"rank-0000{rank}-of-00004.safetensors" for rank in (2, 3)]
    where = rf"it was written on .+ \(ranks 2-3\) as {roots[1]}/step-3"
    lacks = [rf"{file}: is missing \({where}/{file}: copy it from there\)" for file in files]
    sentence = f"{roots[0]}/step-3 is not complete: {'; '.join(lacks)}; take another checkpoint."
    with pytest.raises(CheckpointError, match=sentence):
        sf.Checkpoint(roots[0])
    trained = engine("ddp")
    with pytest.raises(CheckpointError, match=sentence):
        trained.load(roots[0])
    train(trained)  # nothing was changed
    trained.close()
    found = verify(roots[0])
    assert not found.ok and [each.file[:10] for each in found.damage] == ["rank-00002", "rank-00003"]
    assert found.num_bytes > 0  # what is there was read
    contents = inspect(roots[0])
    assert [each.file[:10] for each in contents.missing] == ["rank-00002", "rank-00003"]
    # The last copy of a file is lost: all ranks say so.
    (roots[1] / "step-3" / "rank-00003-of-00004.safetensors").unlink()
    for said in ranks.run(refused, str(tmp_path), world_size=WORLD):
        assert "rank-00003-of-00004.safetensors: is missing (it was written on" in said
        assert "rank-00002" not in said and "take another checkpoint" in said


def refused(folder: str) -> str:
    trained = engine()
    with pytest.raises(CheckpointError) as error:
        trained.load(home(folder))
    train(trained)
    trained.close()
    return str(error.value)


def found_out(folder: str) -> tuple[list[str], list[str], list[str]]:
    """The same path on every rank, which is another folder on another host; all ways to say so."""
    os.chdir(home(folder).parent)
    root = Path("/proc/self/cwd/run")
    trained, said, logged = engine(), list[str](), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("shardfold").addHandler(handler)
    train(trained)
    expect(trained, Path(folder) / "any")
    for path, shared in ((root / "a", True), (home(folder) / "a", None), (root / "a", 2)):
        try:
            trained.save(path, wait=True, shared=shared)
        except (CheckpointError, ConfigError) as error:
            said.append(f"{type(error).__name__}: {error}")
    there = sorted(os.listdir(root))
    trained.save(root / "a", wait=True)
    trained.save(root / "b", wait=True)
    assert trained.load(root).step == 1 and equal(trained, Path(folder))
    one = Path(folder) / "one"
    for shared in (True, False, None):  # what is shared is shared, whatever was said
        trained.save(one / f"{shared}", wait=True, shared=shared)
    trained.close()
    logging.getLogger("shardfold").removeHandler(handler)
    return said, logged, there


@pytest.mark.soak
def test_it_is_found_out_whether_hosts_share_a_folder(ranks: Ranks, tmp_path: Path) -> None:
    """One path that is another disk on another host is seen as that: refused if the folder is to be shared, else each
    host keeps its part, with one warning. Paths that differ without a word are a mistake."""
    for rank, (said, logged, there) in enumerate(ranks.run(found_out, str(tmp_path), world_size=WORLD)):
        assert there == []
        assert "was not written: " in said[0] and "(ranks 0-1) and " in said[0] and "(ranks 2-3)" in said[0]
        assert "shared=False" in said[0]
        assert said[1].startswith("ConfigError: engine.save() was given different places")
        assert said[2].startswith("ConfigError: engine.save(shared=2)")
        assert len(logged) == (rank == 0) and all("each keeps the part that its ranks wrote" in text for text in logged)
    for host in (0, 1):
        root = tmp_path / f"host{host}" / "run"
        assert [path.name for path in listed(root)] == ["a", "b"] and left_over(root) == []
    for name in ("True", "False", "None"):
        assert verify(tmp_path / "one" / name).ok
        with sf.Checkpoint(tmp_path / "one" / name) as checkpoint:
            assert "hosts" not in checkpoint.index.written


def broken_hosts(folder: str) -> dict[str, str]:
    """Saves that fail on one host; after each of them what is there is as it was, on both."""
    root, rank = home(folder), int(os.environ["RANK"])
    trained = engine()
    train(trained)
    expect(trained, Path(folder) / "any")
    trained.save(root / "a", wait=True, shared=False)
    said: dict[str, str] = {}

    def attempt(name: str, on: tuple[int, ...], broken: Any, target: str = "b") -> None:
        said[name] = ""
        with broken if rank in on else nullcontext():
            try:
                trained.save(root / target, wait=True, shared=False)
            except CheckpointError as error:
                said[name] = str(error)
        torch.distributed.barrier()
        if name != "latest":
            found = {path.name for path in root.iterdir()} - {".shardfold-run.json"}  # whose folder it is
            assert found == {"a", "latest"}, name
        train(trained)

    for same in ("b", "a"):
        attempt(f"part to {same}", (3,), failing(root, "pwrite", 1, errno.ENOSPC), same)
        attempt(f"index to {same}", (2,), failing(root, "write", 2, errno.ENOSPC), same)
        attempt(f"place to {same}", (2,), failing(root, "fsync", 6, errno.EIO), same)
    # Both ranks of the host: to one that finds the folder of the other it would not matter that it cannot make one.
    attempt("folder", (2, 3), failing(root, "mkdir", 1, errno.EACCES))
    assert trained.load(root).step == 1 and equal(trained, Path(folder))
    train(trained)
    expect(trained, Path(folder) / "any")
    attempt("latest", (2,), failing(root, "replace", 1, errno.EACCES))
    said["names"] = (root / "latest").read_text()
    assert trained.load(root).step == 2 and equal(trained, Path(folder))
    trained.close()
    return said


@pytest.mark.soak
def test_what_fails_on_one_host_fails_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """A disk that is full, or broken, on the second host: the first takes back what it had put into its place. It stays
    only when all have put it there; a host that cannot move its `latest` finds it all the same."""
    said = ranks.run(broken_hosts, str(tmp_path), world_size=WORLD)
    for rank, each in enumerate(said):
        for name, text in each.items():
            if name == "names":
                assert text == ("a" if rank >= 2 else "b")
            elif name == "latest":
                assert text == ""
            else:
                assert text.endswith("as they were."), (name, text)
                who = "3" if "part" in name else "2, 3" if name == "folder" else "2"
                assert f"was not written: rank {who}: " in text, (name, text)


@pytest.mark.soak
def test_hosts_that_were_broken_off_at_different_moments(ranks: Ranks, tmp_path: Path) -> None:
    """Power fails while `a` is replaced: one host has the new one in its place and the old one beside it, the other the
    old one. What both have is loaded; a save under another name keeps it until that is complete."""
    ranks.run(write_twice, str(tmp_path), world_size=WORLD)
    first, other = (tmp_path / f"host{host}" / "run" for host in (0, 1))
    old = first / ".a.writing-00000000000a"
    (first / "old").rename(old)  # exchanged by the new one
    shutil.rmtree(other / "a")
    (other / "old").rename(other / "a")
    for found in ranks.run(read, str(tmp_path), "zero2", 2, world_size=WORLD):
        assert found["step"] == 1 and found["same"]
    for steps in ranks.run(goes_on, str(tmp_path), world_size=WORLD):
        assert steps == [1, 2, 2]
    assert left_over(first) == left_over(other) == []


def write_twice(folder: str) -> None:
    root, trained = home(folder), engine()
    for _ in range(2):
        train(trained)
        expect(trained, Path(folder) / "any")
        trained.save(root / "a", wait=True, shared=False)
        if trained.steps == 1 and trained.rank % 2 == 0:
            shutil.copytree(root / "a", root / "old")
    trained.close()


def goes_on(folder: str) -> list[int]:
    """Saves to another name; at first with a disk that fails."""
    root, trained = home(folder), engine()
    steps = [trained.load(root / "a").step]
    train(trained)
    broken = failing(root, "pwrite", 1, errno.ENOSPC) if trained.rank == 3 else nullcontext()
    with broken, pytest.raises(CheckpointError, match="rank 3: No space left"):
        trained.save(root / "b", wait=True, shared=False)
    steps[0] = trained.load(root / "a").step
    train(trained)
    trained.save(root / "b", wait=True, shared=False)
    steps += [trained.load(root).step, trained.load(root / "b").step]
    trained.close()
    return steps


def save_and_die(folder: str, victims: tuple[int, ...], share: float, same: bool, swap: bool) -> None:
    """Saves step 1, and again step 2, where the victims die after ``share`` of their calls of the file system."""
    root = home(folder)
    if not swap:
        draft._swap = lambda one, other: False
    trained = engine()
    train(trained)
    expect(trained, Path(folder) / "any")
    with Disk(root, lambda number, name: None).watched() as disk:
        trained.save(root / "a", wait=True, shared=False)
    moment = round(share * disk.calls)
    train(trained)
    expect(trained, Path(folder) / "any")
    messages.BEAT, messages.SILENCE = 0.1, 2.0

    def at(number: int, name: str) -> None:
        if trained.rank in victims and number == moment:
            die()

    said = ""
    with Disk(root, at).watched():
        try:
            trained.save(root / ("a" if same else "b"), shared=False).wait()
        except CheckpointError as error:
            said = str(error)
    if trained.rank in victims:  # all its calls are done
        die()
    trained.close()
    Path(folder, f"said-{trained.rank}").write_text(said)


def killed(ranks: Ranks, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple) -> None:
    """Whatever died: what any host names as its latest loads whole, and the run goes on."""
    monkeypatch.setattr("shardfold.testing.ranks.SETTLE", 60.0)  # to end by themselves is what is tested
    with pytest.raises(RanksFailed) as failed:
        ranks.run(save_and_die, str(folder), *moment, world_size=WORLD)
    assert {each.rank for each in failed.value.failures} <= set(moment[0]), str(failed.value)
    for rank in set(range(WORLD)) - set(moment[0]):
        said = (folder / f"said-{rank}").read_text()
        assert not said or "as they were" in said or "not known" in said, said
    names = {(folder / f"host{host}" / "run" / "latest").read_text() for host in (0, 1)}
    for name in ("", *names):
        for found in ranks.run(read, str(folder), "zero2", 1, name, world_size=2):
            assert found["step"] in (1, 2) and found["same"], name
    for step in ranks.run(saves_again, str(folder), world_size=2):
        assert step in (2, 3)
    for host in (0, 1):
        root = folder / f"host{host}" / "run"
        assert (root / "latest").read_text() == "c"
        assert [name for name in left_over(root) if {p.name for p in (root / name).iterdir()} - {"owner.json"}] == []


def saves_again(folder: str) -> int:
    root, trained = home(folder, 1), engine("zero1")
    trained.load(root)
    train(trained)
    trained.save(root / "c", wait=True, shared=False)
    step = trained.load(root).step
    trained.close()
    return step


def moments(count: int, seed: int) -> list[tuple[tuple[int, ...], float, bool, bool]]:
    choose = random.Random(seed)
    victims = [(0,), (2,), (3,), (0, 2), (0, 1, 2, 3), (2, 3)]
    return [
        (victims[number % len(victims)], choose.uniform(0.3, 1.0), choose.random() < 0.5, choose.random() < 0.7)
        for number in range(count)
    ]


#: The second host as its folder takes its place, and then before it moves `latest`; rank 0 in between; everybody.
CHOSEN = [
    ((2,), 0.8, True, True),
    ((2,), 0.93, False, True),
    ((0,), 0.85, True, False),
    ((0, 1, 2, 3), 0.8, True, True),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("moment", CHOSEN, ids=str)
def test_ranks_are_killed_in_a_save_of_several_hosts(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple
) -> None:
    """Whoever dies at whichever write: no host's `latest` names what is not whole on all of them together."""
    killed(ranks, tmp_path, monkeypatch, moment)


@pytest.mark.soak
@pytest.mark.parametrize("moment", moments(60, seed=3), ids=str)
def test_ranks_are_killed_at_any_write_of_several_hosts(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple
) -> None:
    """The same at 60 moments."""
    killed(ranks, tmp_path, monkeypatch, moment)


def in_its_namespace(path: str, outside: str) -> None:
    """A rank whose ``path`` is a disk of its host only: saves and loads there as if it were one folder of all."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{outside}/meeting", rank=int(os.environ["RANK"]), world_size=WORLD
    )
    root, trained = Path(path), engine()
    for step in (1, 2):
        train(trained)
        expect(trained, Path(outside) / "any")
        trained.save(root / f"step-{step}", wait=True)
    trained.close()
    trained = engine("zero1")
    assert trained.load(root).step == 2 and equal(trained, Path(outside))
    trained.close()
    torch.distributed.destroy_process_group()
    (Path(outside) / f"there-{os.environ['RANK']}").write_text(" ".join(sorted(os.listdir(root / "step-2"))))


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a disk: needs root")
def test_one_path_is_another_disk_in_another_namespace(tmp_path: Path) -> None:
    """Two hosts of two ranks, each a mount namespace with a file system of its own at the same path. Nobody says that
    they share none: it is found out, each disk has its host's part, and together they load under another layout."""
    path = tmp_path / "disk"
    path.mkdir()
    call = f"import tests.checkpoint.test_hosts as t; t.in_its_namespace({str(path)!r}, {str(tmp_path)!r})"
    mounted = f"mount --make-rprivate / && mount -t tmpfs tmpfs {shlex.quote(str(path))}"
    ranks_of_it = (
        'for r in "$@"; do RANK=$r "$0" -c "$CALL" & all="$all $!"; done; for p in $all; do wait $p || exit; done'
    )
    hosts = [
        subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f"{mounted} && {{ {ranks_of_it}; }}", sys.executable, *ranks],
            env={**os.environ, "CALL": call, "PYTHONPATH": str(Path(__file__).parents[2])},
            stderr=subprocess.PIPE, text=True,
        )
        for ranks in (("0", "1"), ("2", "3"))
    ]  # fmt: skip
    said = [host.communicate(timeout=300)[1] for host in hosts]
    if any("mount:" in text for text in said):
        pytest.skip(f"no disk can be mounted here: {said[0].strip()}")
    assert [host.returncode for host in hosts] == [0, 0], said
    assert os.listdir(path) == []  # of this process, which has none of their disks
    for rank in range(WORLD):
        theirs = [f"rank-{each:05d}-of-00004.safetensors" for each in ((0, 1) if rank < 2 else (2, 3))]
        assert (tmp_path / f"there-{rank}").read_text() == " ".join(["index.json", *theirs])
