"""Checkpoints whose writer means harm: one sentence each, and nothing runs, is read from outside, or hangs."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfold.checkpoint import Checkpoint, Writer
from shardfold.checkpoint.folders import INDEX
from shardfold.checkpoint.index import FORMAT, VERSION, _compact, checksum
from shardfold.checkpoint.trees import encode
from shardfold.checkpoint.verify import read_index, verify
from shardfold.errors import CheckpointError
from shardfold.tools import cli

pytestmark = pytest.mark.timeout(60)

SECRET = b"what only its owner may read"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile") / "run"
    writer = Writer(root / "step-1", step=1)
    writer.parameter("a.weight", torch.arange(12.0).view(3, 4))
    writer.state("a.weight", "exp_avg", torch.ones(12))
    writer.buffer("a.seen", torch.tensor(3))
    writer.once("a.weight", {"step": 1})
    writer.optimizer("torch.optim.adamw.AdamW", [({"lr": 0.1}, ["a.weight"])])
    writer.run({"schedule": None, "loss_scale": None, "averages": [], "state": {"x": 1, "table": torch.arange(9)}})
    writer.commit()
    return root


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """A checkpoint to be changed, beside a file that is none of its own."""
    shutil.copytree(made, tmp_path / "run")
    (tmp_path / "run" / "secret.bin").write_bytes(SECRET)
    (tmp_path / "secret.bin").write_bytes(SECRET)
    return tmp_path / "run" / "step-1"


def rewrite(folder: Path, change: Change) -> None:
    """Changes what an index says, and makes its checksum anew."""
    said = json.loads((folder / INDEX).read_bytes())
    for name in ("format", "version", "checksum"):
        del said[name]
    said = change(said) or said
    head = {"format": FORMAT, "version": VERSION, "checksum": checksum(_compact(said))}
    (folder / INDEX).write_text(json.dumps(head | said))


def call(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main([str(each) for each in arguments])
    return int(end.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any, says: str) -> None:
    """Status 2 and one line."""
    capsys.readouterr()
    status, said = call(*arguments), capsys.readouterr()
    assert status == 2, said.err
    assert said.err.startswith("Error: ") and said.err.count("\n") == 1 and said.err.endswith(".\n"), said.err
    assert says in said.err, said.err


def put(place: str, value: Any) -> Change:
    """Sets what is at a path such as ``pieces.0.at``."""

    def change(said: dict[str, Any]) -> None:
        *path, last = (int(part) if part.isdigit() else part for part in place.split("/"))
        node: Any = said
        for part in path:
            node = node[part]
        if value is REMOVED:
            del node[last]
        else:
            node[last] = value

    return change


def named(name: str) -> Change:
    """The first file under another name."""

    def change(said: dict[str, Any]) -> None:
        (old, size), *_ = said["files"].items()
        said["files"] = {name: size}
        for piece in said["pieces"]:
            piece["file"] = name if piece["file"] == old else piece["file"]

    return change


def boxed(box: Any, kind: str = "element") -> Change:
    """The weights, or a buffer, as those of a box."""

    def change(said: dict[str, Any]) -> None:
        next(p for p in said["pieces"] if p["kind"] == kind and p["state"] in ("weight", ""))["box"] = box

    return change


def deep(levels: int) -> Any:
    tree: Any = 1
    for _ in range(levels):
        tree = [tree]
    return tree


def twice(said: dict[str, Any]) -> None:
    said["parameters"].append(said["parameters"][0])


REMOVED = object()
INDEXES: dict[str, tuple[Change, str]] = {
    "a file outside": (named("../secret.bin"), "'../secret.bin' is not the name of a file beside it"),
    "an absolute file": (named("/etc/passwd"), "'/etc/passwd' is not the name of a file beside it"),
    "a file in a folder": (named("a/b"), "'a/b' is not the name of a file beside it"),
    "a hidden file": (named(".x"), "'.x' is not the name of a file beside it"),
    "no file": (named(""), "'' is not the name of a file beside it"),
    "a file of another list": (put("pieces/0/file", "x"), "it is in 'x', which is none of its files"),
    "no step": (put("step", REMOVED), "step is None, which is not a whole number"),
    "a step of text": (put("step", "one"), "step is 'one', which is not a whole number"),
    "a negative step": (put("step", -1), "step is -1, which is not a whole number"),
    "a step of many digits": (put("step", 10**100), "step is a number of many digits"),
    "pieces of a number": (put("pieces", 7), "pieces is not a list"),
    "a piece of text": (put("pieces/0", "x"), "pieces[0] is not an object"),
    "no parameters": (put("parameters", None), "parameters is not a list"),
    "a parameter without name": (put("parameters/0/name", REMOVED), "parameters[0]: name is missing"),
    "a parameter twice": (twice, "parameters: 'a.weight' is there twice"),
    "a negative shape": (put("parameters/0/shape", [-5, 3]), "shape is [-5, 3], which no tensor has"),
    "an absurd shape": (put("parameters/0/shape", [2**62]), "shape is [4611686018427387904], which no tensor has"),
    "a shape of halves": (put("parameters/0/shape", [1.5]), "shape is [1.5], which is not a list of up to 64 numbers"),
    "a shape of many dims": (put("parameters/0/shape", [1] * 100), "which is not a list of up to 64 numbers"),
    "an unknown dtype": (put("pieces/0/dtype", "F3"), "dtype is 'F3', which is none of F64"),
    "an unknown kind": (put("pieces/0/kind", "code"), "kind is 'code', which is none of element"),
    "a place before the file": (put("pieces/0/at", -8), "at is -8, which is not a whole number"),
    "a place behind the file": (put("pieces/0/at", 2**40), "it ends behind the"),
    "a range backwards": (put("pieces/0/range", [9, 3]), "range is [9, 3], which no tensor has"),
    "a range of one": (put("pieces/0/range", [9]), "range is [9], which is not the first element"),
    "a box outside": (boxed([[2, 0], [3, 4]]), "its box is not within its shape"),
    "a box of other dims": (boxed([[0], [12]]), "its box is not within its shape"),
    "a buffer's box": (boxed([[0], [1]], kind="buffer"), "its box is not within its shape"),
    "a box that is none": (boxed("x"), "box is not [starts, sizes]"),
    "a box of too few blocks": (boxed([[0, 0, 0], [2, 2, 4], [0, 2, 2]]), "its box is stacked as [0, 2, 2]"),
    "a box of half a word": (boxed([[0, 0], [3, 4], [1]]), "box is stacked as [1], which is not [dim, count, length]"),
    "blocks of nothing": (put("pieces/0/block", 0), "block is 0, which is not a number of elements"),
    "sums of numbers": (put("pieces/0/sums", [1]), "sums is not a list of texts"),
    "a rank of text": (put("pieces/0/rank", "x"), "rank is 'x', which is not a whole number"),
    "an optimizer of lists": (put("optimizer", []), "optimizer is not an object"),
    "a group without options": (put("optimizer/groups/0/options", REMOVED), "groups[0]: options is missing"),
    "files of no size": (put("files", {"x": -1}), "files: x is -1, which is not a whole number"),
    "a run of a number": (put("run", 1), "run is not an object"),
    "ranks of numbers": (put("ranks", [1]), "what it keeps of '0' is not an object"),
    "a deep tree": (put("run/state", deep(500)), "nested more than 200 levels deep"),
    "a list": (lambda said: [1], "is not an index of a checkpoint, or is damaged"),
}


@pytest.mark.sampled(42)
@pytest.mark.parametrize("name", INDEXES)
def test_an_index_says_what_can_not_be(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a right checksum: each command says in one sentence what is wrong, and nothing is written."""
    change, says = INDEXES[name]
    if name == "a list":
        (saved / INDEX).write_text("[1]")
    else:
        rewrite(saved, change)
    target = saved.parent / "out.pt"
    for command in (("inspect", saved), ("verify", saved), ("export", saved, target, "--to", "torch")):
        refused(capsys, "ckpt", *command, says=says)
    with pytest.raises(CheckpointError):
        Checkpoint(saved)
    assert not target.exists()


TEXTS: dict[str, tuple[bytes, str]] = {
    "nested without end": (b"[" * 200_000, "nested too deeply"),
    "a key twice": (b'{"format": 1, "step": 1, "step": 2}', "'step' is there twice"),
    "no number": (b'{"format": NaN}', "NaN is not JSON"),
    "a number of 5000 digits": (b'{"format": ' + b"1" * 5000 + b"}", "is not an index of a checkpoint"),
    "no text": (bytes(range(256)), "is not an index of a checkpoint"),
    "nothing": (b"", "is not an index of a checkpoint"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_an_index_that_is_no_json(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, whatever the bytes are."""
    (saved / INDEX).write_bytes(TEXTS[name][0])
    for command in ("inspect", "verify"):
        refused(capsys, "ckpt", command, saved, says=TEXTS[name][1])


def a_pipe(path: Path) -> str:
    os.mkfifo(path)
    return "it is a pipe, where a file is needed"


def a_socket(path: Path) -> str:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
    return "it is a socket, where a file is needed"


def a_folder(path: Path) -> str:
    path.mkdir()
    return "it is a folder, where a file is needed"


def a_device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a link that leads out of the checkpoint, to /dev/zero"


def a_link(path: Path) -> str:
    path.symlink_to("../../secret.bin")
    return "is a link that leads out of the checkpoint"


def a_circle(path: Path) -> str:
    path.symlink_to(path.name)
    return "Too many levels of symbolic links"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", [a_pipe, a_socket, a_folder, a_device, a_link, a_circle])
def test_a_file_that_is_none(saved: Path, place: Callable[[Path], str], capsys: pytest.CaptureFixture[str]) -> None:
    """A verification names it, an export refuses it and writes nothing; neither waits for it."""
    (file,) = saved.glob("*.safetensors")
    size = file.stat().st_size
    file.unlink()
    says = place(file)
    rewrite(saved, lambda said: None)
    assert call("ckpt", "verify", saved) == 1
    assert says in (out := capsys.readouterr().out) and "1 problem" in out
    refused(capsys, "ckpt", "export", saved, saved.parent / "out.pt", "--to", "torch", says=says)
    refused(capsys, "ckpt", "inspect", saved, "--finite", says=says)
    assert size and not (saved.parent / "out.pt").exists()


def test_a_link_within_a_checkpoint_is_followed(saved: Path) -> None:
    """What stays in the folder is its own."""
    (file,) = saved.glob("*.safetensors")
    file.rename(saved / "kept")
    file.symlink_to("kept")
    assert verify(saved).ok


def itself(latest: Path) -> None:
    (latest.parent / "x").symlink_to(".")
    latest.write_text("x")


def of_a_pipe(latest: Path) -> None:
    latest.unlink()
    os.mkfifo(latest)


LATEST: dict[str, tuple[Callable[[Path], Any], str]] = {
    "outside": (lambda path: path.write_text("../run/step-1"), "does not name a folder beside it"),
    "absolute": (lambda path: path.write_text("/tmp"), "does not name a folder beside it"),
    "up": (lambda path: path.write_text(".."), "does not name a folder beside it"),
    "itself": (lambda path: path.write_text("."), "does not name a folder beside it"),
    "nothing": (lambda path: path.write_text(""), "does not name a folder beside it"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "does not name a folder beside it"),
    "a long name": (lambda path: path.write_text("x" * 10**7), "does not name a folder beside it"),
    "a link to its own folder": (itself, "names 'x', but"),
    "a pipe": (of_a_pipe, "has no 'latest' file"),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", LATEST)
def test_the_latest_of_a_folder_leads_elsewhere(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One short sentence; no file outside of the folder is looked at."""
    change, says = LATEST[name]
    change(saved.parent / "latest")
    for command in ("inspect", "verify"):
        refused(capsys, "ckpt", command, saved.parent, says=says)
    with pytest.raises(CheckpointError) as error:
        Checkpoint(saved.parent)
    assert len(str(error.value)) < 600


def test_a_path_that_no_file_system_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Too long, or with a byte that ends a name elsewhere."""
    refused(capsys, "ckpt", "verify", "x" * 5000, says="is not a path of a checkpoint (File name too long)")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Checkpoint("x\0y")


TREES: dict[str, Any] = {
    "a dtype that is a module": {"$dtype": "hub"},
    "a dtype that is none": {"$dtype": ["float32"]},
    "a tensor that is not there": {"$tensor": "nowhere"},
    "a tensor without name": {"$tensor": {}},
    "a scalar without values": {"$scalar": {"dtype": "float32", "shape": []}},
    "a scalar of another shape": {"$scalar": {"dtype": "float32", "shape": [2**40], "values": [1]}},
    "a scalar of texts": {"$scalar": {"dtype": "float32", "shape": [1], "values": ["x"]}},
    "a key that is a list": {"$dict": [[[1], 2]]},
    "a dict of numbers": {"$dict": 5},
    "a tuple of nothing": {"$tuple": None},
    "bytes that are none": {"$bytes": "xy"},
    "a number that is none": {"$float": "one"},
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_no_save_writes(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the run kept is not read, in one sentence; the weights are."""
    rewrite(saved, put("run/state", {"x": TREES[name]}))
    with Checkpoint(saved) as checkpoint:
        assert checkpoint.parameter("a.weight").sum() == 66
        with pytest.raises(CheckpointError, match=r"index (of a checkpoint )?is damaged"):
            checkpoint.run()
    assert call("ckpt", "inspect", saved) == 0
    assert "\n  File" not in capsys.readouterr().err


def test_elements_that_no_file_has_are_not_made_up(saved: Path) -> None:
    """A hole in a parameter's elements, hidden by elements that are there twice, is no memory of this process."""

    def change(said: dict[str, Any]) -> None:
        piece = next(p for p in said["pieces"] if p["state"] == "weight")
        half = {**piece, "shape": [6], "range": [0, 6], "sums": []}
        said["pieces"] = [half, half, *(p for p in said["pieces"] if p["state"] != "weight")]

    rewrite(saved, change)
    with Checkpoint(saved, verify=False) as checkpoint, pytest.raises(CheckpointError, match="has 6 of the elements"):
        checkpoint.parameter("a.weight")


def test_a_shape_takes_no_memory_before_its_elements_are_there(saved: Path) -> None:
    """A parameter of a petabyte is refused for what it lacks."""
    rewrite(saved, put("parameters/0/shape", [2**50]))
    with Checkpoint(saved) as checkpoint, pytest.raises(CheckpointError, match="has 12 of the elements 0 to"):
        checkpoint.parameter("a.weight")


def test_sums_that_are_not_there_are_no_proof(saved: Path) -> None:
    """A piece without checksums is damaged."""
    rewrite(saved, lambda said: [piece.update(sums=[]) for piece in said["pieces"]] and None)
    with Checkpoint(saved) as checkpoint, pytest.raises(CheckpointError, match="differ from their checksum"):
        checkpoint.parameter("a.weight")


def test_what_is_too_deep_is_not_saved() -> None:
    """What could not be read again is refused before it is written; so is what holds itself."""
    circle: list[Any] = []
    circle.append(circle)
    for tree in (deep(300), circle):
        with pytest.raises(CheckpointError, match="nested too deeply, or holds itself"):
            encode(tree, "state", {})
    encode(deep(150), "state", {})


HEADERS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "longer than the file": (lambda data: (2**60).to_bytes(8, "little") + data[8:], "it is said to have"),
    "longer than any": (lambda data: (10**8).to_bytes(8, "little") + data[8:], "it is said to have"),
    "deep": (lambda data: data[:8] + (b"[" * 4000).ljust(len(data) - 8, b" "), "its header is damaged"),
    "with a name twice": (
        lambda data: data[:8] + b'{"a":1,"a":1}'.ljust(int.from_bytes(data[:8], "little"), b" ") + data[8:][-100:],
        "its header is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_the_header_of_a_file(saved: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A verification names the file."""
    (file,) = saved.glob("*.safetensors")
    change, says = HEADERS[name]
    file.write_bytes(change(file.read_bytes()))
    assert call("ckpt", "verify", saved) == 1
    out = capsys.readouterr().out
    assert file.name in out and says in out


CODES = "\x1b[2J\x1b]0;pwned\x07\u202ename\n"


def test_nothing_of_a_checkpoint_steers_the_terminal(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of tensors and states, what it says of its writer, and paths are printed without control codes."""

    def change(said: dict[str, Any]) -> None:
        said["parameters"][0]["name"] = said["pieces"][0]["of"] = CODES
        said["written"] = {CODES: CODES}
        said["layout"] = {CODES: CODES}
        said["run"]["schedule"] = {CODES: 1}
        said["nonfinite"] = [CODES]
        said["optimizer"]["class"] = CODES

    rewrite(saved, change)
    moved = saved.parent / "a\x1b[31mb"
    saved.rename(moved)
    for command, status in (("inspect", 0), ("verify", 1)):
        assert call("ckpt", command, moved) == status
        said = capsys.readouterr()
        assert "pwned" in said.out
        assert not [c for c in said.out + said.err if not c.isprintable() and c != "\n"]
    refused(capsys, "ckpt", "verify", f"{moved}/none", says="there is no checkpoint")
    assert read_index(moved)[1].step == 1
