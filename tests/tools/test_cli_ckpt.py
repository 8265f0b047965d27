"""`shardfold ckpt inspect` and `verify`: what is in a checkpoint, and each kind of damage, named."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardfold as sf
from shardfold.checkpoint.folders import INDEX
from shardfold.checkpoint.index import SUM_BYTES, Index, Parameter, Piece
from shardfold.checkpoint.inspect import _count, inspect
from shardfold.checkpoint.verify import Verification, gaps, read_index, verify
from shardfold.errors import CheckpointError
from shardfold.plan.placement import Box
from shardfold.testing import Ranks
from shardfold.tools import cli
from tests.support.saving import engine, train

FILES = [f"rank-{rank:05d}-of-00002.safetensors" for rank in range(2)]


def write(root: str) -> None:
    trained = engine("zero2", precision="bf16")
    trained.module.register_buffer("seen", torch.tensor([1.0, float("inf"), float("nan")]))
    train(trained, 2)
    big = torch.arange(SUM_BYTES // 4 + 5, dtype=torch.float32)  # more than one block of checksums
    trained.save(Path(root) / "step-2", state={"sampler": {"epoch": 3}, "table": big}, wait=True)
    trained.close()


@pytest.fixture(scope="module")
def made(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ckpt") / "run"
    ranks.run(write, str(root), world_size=2)
    return root


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """A checkpoint of two ranks, to be damaged."""
    shutil.copytree(made / "step-2", tmp_path / "run" / "step-2")
    shutil.copy(made / "latest", tmp_path / "run" / "latest")
    return tmp_path / "run" / "step-2"


def call(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main([str(each) for each in arguments])
    return int(end.value.code or 0)


def a_piece(folder: Path, key: str) -> Piece:
    return next(piece for piece in read_index(folder)[1].pieces if piece.key == key)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.soak
def test_verify_says_that_a_checkpoint_is_whole(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0 and one line; the same of the folder around it; each file opens with safetensors itself."""
    for path in (saved, saved.parent):
        assert call("ckpt", "verify", path) == 0
        assert capsys.readouterr().out.endswith("in 2 files: whole\n")
    assert call("ckpt", "verify", saved, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["damage"] == []
    index = read_index(saved)[1]
    assert said["bytes"] == sum(piece.nbytes for piece in index.pieces) and said["tensors"] == len(index.pieces)
    tensors = [load_file(saved / name) for name in FILES]
    assert sum(len(each) for each in tensors) == len(index.pieces)
    assert {name.split("/")[0] for each in tensors for name in each} >= {"weight", "exp_avg", "exp_avg_sq", "buffer"}


def cut_short(folder: Path) -> list[str]:
    path = folder / FILES[1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 100])
    return [f"{FILES[1]}: has {len(data) - 100} bytes instead of {len(data)}", "the file ends before"]


def absent(folder: Path) -> list[str]:
    (folder / FILES[0]).unlink()
    return [f"{FILES[0]}: is missing"]


def a_bit(folder: Path) -> list[str]:
    piece = a_piece(folder, "exp_avg/head.weight")
    flip(folder / piece.file, piece.at + piece.nbytes // 2, 5)
    return [f"{piece.file}: {piece.key}: bytes {piece.at} to {piece.at + piece.nbytes}: differs from its checksum"]


def a_bit_of_the_second_block(folder: Path) -> list[str]:
    piece = a_piece(folder, "run/run.state.table")
    flip(folder / piece.file, piece.at + SUM_BYTES + 3)
    return [f"{piece.key}: bytes {piece.at + SUM_BYTES} to {piece.at + SUM_BYTES + 20}: differs"]


def a_bit_of_the_header(folder: Path) -> list[str]:
    data = (folder / FILES[0]).read_bytes()
    flip(folder / FILES[0], data.index(b"exp_avg/head.weight"), 1)
    return [f"{FILES[0]}: exp_avg/head.weight: is not in the header", f"{FILES[0]}: gxp_avg/head.weight: is not"]


def the_length_of_the_header(folder: Path) -> list[str]:
    flip(folder / FILES[1], 6)
    return [f"{FILES[1]}: bytes 0 to ", "its header is damaged"]


def a_folder(folder: Path) -> list[str]:
    (folder / FILES[1]).unlink()
    (folder / FILES[1]).mkdir()
    return [f"{FILES[1]}: cannot be read: it is a folder, where a file is needed"]


def other_files(folder: Path) -> list[str]:
    first, second = ((folder / name).read_bytes() for name in FILES)
    (folder / FILES[0]).write_bytes(second)
    (folder / FILES[1]).write_bytes(first)
    return [f"{FILES[0]}: has {len(second)} bytes instead of {len(first)}", f"{FILES[1]}: "]


DAMAGES = [cut_short, absent, a_bit, a_bit_of_the_second_block, a_bit_of_the_header, the_length_of_the_header, a_folder,
           other_files]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_verify_names_the_damage(
    saved: Path, damage: Callable[[Path], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The file, the tensor and the bytes are named, the status is 1, and JSON says the same."""
    words = damage(saved)
    assert call("ckpt", "verify", saved) == 1
    text = capsys.readouterr().out
    assert all(word in text for word in words), text
    assert "problem" in text.splitlines()[-1]
    assert call("ckpt", "verify", "--json", saved) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["ok"] and len(said["damage"]) == len(text.splitlines()) - 1


def test_every_bit_of_a_file_counts(saved: Path) -> None:
    """Wherever a bit flips, in a header, in padding or in data: verify finds it, in that file."""
    choose = random.Random(0)
    sizes = {name: (saved / name).stat().st_size for name in FILES}
    places = [(FILES[0], place) for place in (0, 7, 8, 40, 4000)]
    places += [(name, choose.randrange(sizes[name])) for name in FILES for _ in range(20)]
    for name, place in places:
        bit = choose.randrange(8)
        flip(saved / name, place, bit)
        found = verify(saved)
        assert {each.file for each in found.damage} == {name}, (place, bit)
        flip(saved / name, place, bit)
    assert verify(saved).ok


def test_every_bit_of_the_index_counts(saved: Path) -> None:
    """A flipped bit of index.json is found before a byte of a tensor is read, or changes nothing that it says."""
    choose = random.Random(0)
    data = (saved / INDEX).read_bytes()
    index = Index.from_bytes(data, "here")
    found = 0
    for _ in range(300):
        changed = bytearray(data)
        changed[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        try:
            assert Index.from_bytes(bytes(changed), "here") == index
        except CheckpointError as error:
            found += 1
            assert "here" in str(error)
    assert found > 290  # the case of a letter in an escape or an exponent says nothing
    flip(saved / INDEX, data.index(b'"pieces"') + 200)
    for check in (verify, inspect, sf.Checkpoint):
        with pytest.raises(CheckpointError, match=r"index\.json (is damaged|is not an index)"):
            check(saved)


@pytest.mark.soak
def test_a_damaged_index_or_none_is_one_sentence(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and a sentence on standard error."""
    flip(saved / INDEX, 200)
    for command in ("verify", "inspect"):
        assert call("ckpt", command, saved) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("Error: ") and error.count("\n") == 1 and "damaged" in error
    assert call("ckpt", "verify", saved, "--json") == 2
    assert "damaged" in json.loads(capsys.readouterr().out)["damage"][0]["what"]
    assert call("ckpt", "inspect", saved.parent / "step-9") == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_inspect_shows_what_is_there(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modules as a tree, layers that are alike as one, states, layout and run; what is not finite when asked."""
    assert call("ckpt", "inspect", saved.parent) == 0
    text = capsys.readouterr().out
    for word in ("step 2", "embedding", "0-1  2 alike", "96x24", "seen  buffer", "exp_avg_sq", "F32", "2 ranks",
                 "AdamW", "sampler", "random numbers", "when written: seen"):  # fmt: skip
        assert word in text, (word, text)
    assert "moments" in text and "NaN" not in text
    assert call("ckpt", "inspect", saved, "--finite") == 1
    assert "buffer seen: 1 NaN, 1 inf" in capsys.readouterr().out
    assert call("ckpt", "inspect", saved, "--finite", "--json") == 1
    said = json.loads(capsys.readouterr().out)
    model = engine("ddp")
    assert said["elements"] == sum(p.numel() for p in model.module.parameters())
    shapes = {name: list(p.shape) for name, p in model.module.named_parameters()}
    model.close()
    assert {t["name"]: t["shape"] for t in said["tensors"] if not t["buffer"]} == shapes
    assert said["states"]["exp_avg"] == {"bytes": said["elements"] * 4, "dtypes": ["F32"]}
    assert said["not_finite"] == [{"tensor": "buffer seen", "nan": 1, "inf": 1}]
    assert said["layout"]["ranks"] == 2 and said["step"] == 2


@pytest.mark.soak
def test_looking_needs_no_torch(saved: Path) -> None:
    """Both commands answer without importing torch."""
    script = (
        "import sys\n"
        "from shardfold.tools import cli\n"
        "from shardfold.checkpoint import Contents, Verification\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules)\n"
    )
    for command, *options in (("verify",), ("inspect", "--finite")):
        run = subprocess.run(
            [sys.executable, "-c", script, "ckpt", command, str(saved), *options],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert run.stdout.splitlines()[-1] == "False", run.stderr


@pytest.mark.parametrize("command", [["ckpt", "inspect"], ["ckpt", "verify"]])
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*command, "--help") == 0
    assert "For example: shardfold ckpt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("F64", torch.float64), ("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16),
     ("F8_E5M2", torch.float8_e5m2), ("F8_E4M3", torch.float8_e4m3fn)],
)  # fmt: skip
def test_inf_and_nan_are_told_by_their_bits(name: str, dtype: torch.dtype) -> None:
    """As many as torch finds, in every floating dtype."""
    values = torch.tensor([0.0, -1.5, float("inf"), float("-inf"), float("nan"), 240.0]).to(dtype)
    data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
    wide = values.float()
    assert _count(data, name) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert _count(memoryview(b"\xff" * 8), "I64") == (0, 0)


def an_index(*pieces: Piece) -> Index:
    return Index(files={"f": 0, "g": 0}, parameters=[Parameter("w", (4, 6), "F32")], pieces=list(pieces))


def a_range(start: int, stop: int, **other: Any) -> Piece:
    named = {
        "state": "weight",
        "kind": "element",
        "dtype": "F32",
        "shape": (stop - start,),
        "sums": ("x",),
        "file": "f",
    }
    return Piece("w", start=start, stop=stop, **(named | other))


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([a_range(0, 10), a_range(12, 24)], "weight/w: has no elements 10 to 12 of 24"),
        ([a_range(0, 10), a_range(10, 20)], "weight/w: has no elements 20 to 24 of 24"),
        ([a_range(0, 10), a_range(8, 24)], "weight/w: has the elements 8 to 10 twice"),
        ([], "weight/w: has no elements 0 to 24 of 24"),
        ([a_range(0, 24), a_range(0, 24, state="exp_avg"), a_range(0, 24)], "f: weight/w: is there 2 times"),
        ([a_range(0, 24), a_range(0, 30, state="exp_avg")], "has 30 values for the elements 0 to 30 of 24"),
        ([a_range(0, 24), a_range(0, 24, state="q", kind="block", block=10, shape=(2,))], "has 2 values for"),
        ([a_range(0, 12, box=Box((0, 0), (4, 3)))], "weight/w: has no elements 3 to 6 of 24"),
        ([a_range(0, 16, box=Box((0, 0), (4, 4))), a_range(0, 8, box=Box((0, 2), (4, 2)))], "elements 2 to 4 twice"),
        ([a_range(0, 10), a_range(10, 24, dtype="F16")], "weight/w: has parts of F16 and F32"),
        ([a_range(0, 24), Piece("v", "", "run", "F32", (1,), file="f", sums=("x",))], "run/v: is there, but nothing"),
    ],
)
def test_an_index_that_is_not_whole(pieces: list[Piece], says: str) -> None:
    """Elements that no file has, or two have, are named; a save never makes a checkpoint of such an index."""
    assert any(says in str(each) for each in gaps(an_index(*pieces))), [str(each) for each in gaps(an_index(*pieces))]


def test_boxes_of_absurd_sizes_are_told_without_a_look_at_each_row() -> None:
    """One value may stand for 2**40 elements in as many rows."""
    box = Box((0, 0), (2**40, 1))
    piece = a_range(0, 2**40, state="s", kind="block", block=2**40, shape=(1,), box=box)
    index = an_index(piece)
    index.parameters = [Parameter("w", (2**40, 2), "F32", digest="x")]
    assert [each.what for each in gaps(index)] == [f"has boxes that do not have each of its {2**41} elements once"]


def test_an_index_that_is_whole() -> None:
    """Ranges and boxes together, in any order."""
    left, right = Box((0, 0), (4, 3)), Box((0, 3), (4, 3))
    boxes = [a_range(5, 12, box=left), a_range(0, 12, box=right, file="g"), a_range(0, 5, box=left)]
    moment = [a_range(8, 24, state="m"), a_range(0, 8, state="m")]
    codes = a_range(0, 24, state="s", kind="block", block=10, shape=(3,))
    assert gaps(an_index(*boxes, *moment, codes)) == []


def test_progress_is_told(saved: Path) -> None:
    """The bytes done so far, up to those there are."""
    seen: list[tuple[int, int]] = []
    found = verify(saved, lambda done, total: seen.append((done, total)))
    assert isinstance(found, Verification) and seen[-1] == (found.num_bytes, found.num_bytes)
    assert seen == sorted(seen) and len(seen) > found.num_files
