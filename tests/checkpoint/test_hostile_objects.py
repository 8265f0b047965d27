"""Objects in files: none of them runs, in files of ours, of the face and of others, unless the reader trusts them."""

from __future__ import annotations

import argparse
import datetime
import enum
import json
import os
import pickle
import re
import shutil
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shardfold.checkpoint import Checkpoint, import_from, trusted
from shardfold.checkpoint.trust import dump_object, load_object
from shardfold.compat.deepspeed.initialize import initialize
from shardfold.compat.deepspeed.saving import client_state_of
from shardfold.compat.deepspeed.utils.zero_to_fp32 import get_model_state_file
from shardfold.errors import CheckpointError, ConfigError
from shardfold.testing import Ranks
from tests.checkpoint.test_deepspeed import Run
from tests.checkpoint.test_deepspeed import save as save_as_theirs
from tests.checkpoint.test_hostile import refused
from tests.support.deepspeed_training import build, config

pytestmark = pytest.mark.timeout(120)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.path), 0o777, True)


class Kind(enum.Enum):
    ONE = 1


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


# -- what is harmless, and what is not


HARMLESS: list[Any] = [
    argparse.Namespace(a=1, b={"x": (2, None)}, c={3}), {1, 2}, frozenset([1]), 3 + 4j, np.float32(2.5), np.int64(7),
    np.bool_(True), np.str_("x"), OrderedDict(a=1), torch.device("cpu"), torch.bfloat16, PurePosixPath("/a/b"),
    datetime.datetime(2026, 1, 2, 3, 4), datetime.timedelta(seconds=5), [1, "x", b"y", 2**80, float("inf")],
]  # fmt: skip


@pytest.mark.parametrize("value", HARMLESS, ids=lambda value: type(value).__name__)
def test_a_value_without_code_is_read(value: Any) -> None:
    """As it was, without trust, from the bytes that earlier versions wrote too."""
    found = load_object(dump_object(value, "x"), "x")
    assert found == value and (type(found) is type(value) or isinstance(value, PurePosixPath))


def test_what_the_user_allowed_stays_allowed() -> None:
    """Classes that were named to PyTorch are read, before and after: here they are not forgotten."""
    torch.serialization.add_safe_globals([Kind, argparse.Namespace])
    try:
        assert load_object(dump_object(Kind.ONE, "x"), "x") is Kind.ONE
        assert {Kind, argparse.Namespace} <= set(torch.serialization.get_safe_globals())
    finally:
        torch.serialization.clear_safe_globals()
    with trusted():
        data = dump_object(Kind.ONE, "x")
    with pytest.raises(CheckpointError, match=rf"holds a {re.escape(__name__)}\.Kind"):
        load_object(data, "x")
    with pytest.raises(CheckpointError, match=rf"x is a Kind, .*reading a {re.escape(__name__)}\.Kind may run code"):
        dump_object(Kind.ONE, "x")


def call_of(name: str, argument: str) -> bytes:
    """A pickle that calls a function, as none of Python's own picklers writes it."""
    module, _, function = name.rpartition(".")
    return b"\x80\x02c" + f"{module}\n{function}\n".encode() + b"(X" + len(argument).to_bytes(4, "little") + (
        argument.encode() + b"tR."
    )  # fmt: skip


def in_an_archive(path: Path, data: bytes) -> Path:
    """The pickle in an archive such as torch.save writes."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as old:
        kept = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in kept.items():
            new.writestr(name, data if name.endswith("data.pkl") else content)
    return path


CALLS = {
    "posix.mkdir": "{canary}",
    "os.system": "mkdir {canary}",
    "builtins.eval": "__import__('os').mkdir('{canary}')",
    "builtins.exec": "import os; os.mkdir('{canary}')",
    "builtins.getattr": "{canary}",
    "subprocess.getoutput": "mkdir {canary}",
    "importlib.import_module": "antigravity",
    "runpy.run_path": "{canary}.py",
    "pickle.loads": "x",
    "torch.hub.load": "{canary}",
    "torch.load": "{canary}",
    "numpy.load": "{canary}",
    "shardfold.tools.cli.main": "x",
    f"{__name__}.Kind": "x",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_pickle_that_calls(name: str, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of torch.save is refused in one sentence; the same in DeepSpeed's files is data, or refused."""
    (tmp_path / "canary.py").write_text(f"import os; os.mkdir({str(canary)!r})")
    path = in_an_archive(tmp_path / "x.pt", call_of(name, CALLS[name].format(canary=canary)))
    refused(capsys, "ckpt", "import", path, tmp_path / "new", says="reading that may run code")
    (tmp_path / "raw.pt").write_bytes(call_of(name, CALLS[name].format(canary=canary)))
    refused(capsys, "ckpt", "import", tmp_path / "raw.pt", tmp_path / "new", says=str(tmp_path / "raw.pt"))
    step = tmp_path / "run" / "step"
    step.mkdir(parents=True)
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        shutil.copy(path, step / file)
    refused(capsys, "ckpt", "import", step, tmp_path / "new", says="instead of a dict")
    assert not canary.exists() and not (tmp_path / "new").exists()


# -- the face


def face_saves(folder: str, canary: str) -> tuple[Any, ...]:
    """What loading says of an object of the client's, without trust and with it."""
    engine, _, _, _ = initialize(model=build(), config=config(0))
    before = [p.detach().clone() for p in engine.module.parameters()]
    with trusted():
        engine.save_checkpoint(folder, tag="a", client_state={"epoch": 3, "mischief": Touch(Path(canary))})
    with torch.no_grad():
        for p in engine.module.parameters():
            p.add_(1)
    now = [p.detach().clone() for p in engine.module.parameters()]
    engine._core.sharded.gate.meet("the test")
    said = ""
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        said = str(error)
    kept = all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), now, strict=True))
    ran = Path(canary).exists()
    engine._core.sharded.gate.meet("the test")
    with trusted():
        _, client = engine.load_checkpoint(folder)
    loaded = all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), before, strict=True))
    engine.destroy()
    return said, kept, ran, Path(canary).exists(), loaded, sorted({"epoch", "mischief"} & set(client or {}))


@pytest.mark.parametrize("world_size", [1, 2])
def test_client_state_runs_nothing(ranks: Ranks, world_size: int, tmp_path: Path, canary: Path) -> None:
    """It is refused on all ranks before anything is changed, with how to read it; it runs for those who trust it."""
    answers = ranks.run(face_saves, str(tmp_path / "ck"), str(canary), world_size=world_size)
    said, kept, ran, ran_then, loaded, client = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert f"client_state['mischief'] of {tmp_path / 'ck' / 'a'} holds a os.makedirs" in said
    assert "with shardfold.checkpoint.trusted():" in said and said.count("\n") == 0
    assert kept and not ran and ran_then and loaded and client == ["epoch", "mischief"]


def face_refuses(folder: str, canary: str) -> list[tuple[str, list[str]]]:
    """What saving says of objects of the client's on rank 0, and what lies in the folder then."""
    engine, _, _, _ = initialize(model=build(), config=config(0))
    told: list[tuple[str, list[str]]] = []
    for value in ({"deep": [1, Touch(Path(canary))]}, torch.Generator(), lambda: 0, threading.Lock()):
        client = {"epoch": 3, "x": value} if engine.global_rank == 0 else {}
        for inside in (False, True):
            with trusted() if inside else nullcontext():
                try:
                    engine.save_checkpoint(folder, tag="a", client_state=client)
                except (CheckpointError, ConfigError) as error:
                    told.append((str(error), sorted(p.name for p in Path(folder).glob("*"))))
                else:
                    told.append(("saved", []))
                    engine._core.sharded.gate.meet("the test")
                    if engine.global_rank == 0:
                        shutil.rmtree(folder)
                    engine._core.sharded.gate.meet("the test")
    engine.destroy()
    return told


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_would_not_be_read_is_not_saved(ranks: Ranks, world_size: int, tmp_path: Path, canary: Path) -> None:
    """On all ranks, before a file is written, with the keys of what is to blame: what reading would refuse is refused
    outside of ``trusted()``, what cannot be pickled everywhere."""
    for rank, told in enumerate(ranks.run(face_refuses, str(tmp_path / "ck"), str(canary), world_size=world_size)):
        names = ["['x']['deep'][1] is a Touch", "['x'] is a Generator", "['x'] is a function", "['x'] is a lock"]
        expected = [(name, inside) for name in names for inside in (False, True)]
        for (name, inside), (said, left) in zip(expected, told, strict=True):
            assert left == []
            if inside and ("Touch" in name or "Generator" in name):
                assert said == "saved"
                continue
            assert f"client_state{name}, which a checkpoint does not take" in said and "\n" not in said
            assert rank == 0 or "rank 0: client_state" in said
    assert not canary.exists()


def values_come_back(folder: str) -> bool:
    given = {f"{i} {type(value).__name__}": value for i, value in enumerate(HARMLESS)}
    engine, _, _, _ = initialize(model=build(), config=config(0))
    engine.save_checkpoint(folder, tag="a", client_state=given)
    _, client = engine.load_checkpoint(folder)
    engine.destroy()
    return client is not None and {name: client[name] for name in given} == given


def test_client_state_of_values_needs_no_trust(ranks: Ranks, tmp_path: Path) -> None:
    """What frameworks give comes back: numbers of NumPy, ordered dicts, sets, namespaces, times."""
    assert ranks.run(values_come_back, str(tmp_path), world_size=1) == [True]
    assert torch.load(get_model_state_file(str(tmp_path / "a"), 0), weights_only=False)["0 Namespace"] == HARMLESS[0]


FACES: dict[str, tuple[Any, str]] = {
    "a state that is a list": ([1], "is not a mapping"),
    "a face that is a number": ({"deepspeed": 7}, "is not a mapping"),
    "counters of text": ({"deepspeed": {"global_steps": "x"}}, "global_steps of its run is not a number"),
    "pickles that are numbers": ({"deepspeed": {}, "pickled": {"x": 7}}, "client_state['x'] is no bytes"),
    "pickles in a list": ({"deepspeed": {}, "pickled": []}, "its client_state is not a mapping"),
    "a schedule of a number": ({"deepspeed": {"lr_scheduler": {"pickled": {"state": 1}}}}, "is no bytes"),
}


@pytest.mark.parametrize("name", FACES)
def test_what_the_face_keeps_is_checked(name: str, tmp_path: Path) -> None:
    """A run's own state of another form is damage, said in one sentence."""
    from shardfold.checkpoint import Writer

    writer = Writer(tmp_path / "a")
    writer.parameter("w", torch.ones(2))
    writer.run({"state": FACES[name][0]})
    with pytest.raises(CheckpointError) as error:
        client_state_of(writer.commit())
    assert FACES[name][1] in str(error.value)


# -- DeepSpeed's own files


class Scripted(nn.Module):
    """What an archive of TorchScript is made of."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self) -> str:
        return self.path


def test_torchscript_in_the_place_of_a_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load hands such an archive on to torch.jit.load, which runs its code: it is not opened that far."""
    source = save_as_theirs(Run(), tmp_path / "ds", 2, 1)
    (file,) = source.glob("*/mp_rank_00_model_states.pt")
    opened: list[Any] = []
    monkeypatch.setattr(torch.jit, "load", lambda *given, **_: opened.append(given))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Scripted("x")), str(file))
        with pytest.raises(CheckpointError, match="but got a torchscript checkpoint"):
            import_from(source, tmp_path / "new")
    assert not opened


@pytest.mark.parametrize("place", ["client", "lr_scheduler", "ds_config", "param_shapes", "buffer_names"])
def test_objects_in_a_run_of_deepspeed_are_data(place: str, tmp_path: Path, canary: Path) -> None:
    """Wherever they are: left out, or one sentence."""
    source = save_as_theirs(Run(), tmp_path / "ds", 2, 1)
    (file,) = source.glob("*/mp_rank_00_model_states.pt")
    said = torch.load(file, weights_only=False)
    said[place] = Touch(canary)
    torch.save(said, file)
    try:
        import_from(source, tmp_path / "new")
    except CheckpointError as error:
        assert place in ("param_shapes", "buffer_names") and "\n" not in str(error)
    else:
        assert Checkpoint(tmp_path / "new").run()["state"].get(place) is None
    assert not canary.exists()


# -- folders of others


def dcp_saved(folder: Path, **more: Any) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.arange(6.0)}, **more}, checkpoint_id=folder, no_dist=True)
    return folder


def test_dcp_runs_nothing(tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither its description nor a value in it, unless it is trusted; what is harmless is read."""
    fine = dcp_saved(tmp_path / "fine", step=3, names=["a"])
    import_from(fine, tmp_path / "new")
    with Checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.parameter("w").sum() == 15 and checkpoint.run()["state"]["step"] == 3
    value = dcp_saved(tmp_path / "value", mischief=Touch(canary))
    description = dcp_saved(tmp_path / "description")
    (description / ".metadata").write_bytes(pickle.dumps(Touch(canary)))
    for source in (value, description):
        refused(capsys, "ckpt", "import", source, tmp_path / "no", says="os.makedirs, and reading that may run code")
        assert not canary.exists() and not (tmp_path / "no").exists()
    import_from(value, tmp_path / "trusted", trust=True)
    assert canary.exists()


def moved(folder: Path, name: str) -> None:
    """The description says that the tensors are in another file."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_dcp_reads_no_file_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path, a link that leads out and a pipe are refused."""
    for number, name in enumerate(("../outside", "/etc/passwd", "pipe", "link")):
        folder = dcp_saved(tmp_path / str(number))
        os.mkfifo(folder / "pipe")
        (folder / "link").symlink_to("/etc/passwd")
        moved(folder, name)
        says = {"pipe": "it is a pipe", "link": "leads out of the checkpoint"}.get(name, "not the name of a file in it")
        refused(capsys, "ckpt", "import", folder, tmp_path / "no", says=says)


def hf(folder: Path, weight_map: Any) -> Path:
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "a.safetensors")
    save_file({"w": torch.ones(2)}, folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    )
    return folder


MAPS: dict[str, tuple[Any, str]] = {
    "outside": ({"w": "../outside.safetensors"}, "which is not the name of a file beside it"),
    "absolute": ({"w": "/etc/passwd"}, "which is not the name of a file beside it"),
    "a number": ({"w": 7}, "is damaged"),
    "a list": (["a"], "is damaged"),
    "none": ("{}", "is damaged"),
    "deep": ("[" * 100_000, "is damaged"),
    "missing": ({"w": "b.safetensors"}, "not be read"),
}


@pytest.mark.parametrize("name", MAPS)
def test_an_index_of_safetensors(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in it are of files beside it."""
    folder = hf(tmp_path / "hf", MAPS[name][0])
    refused(capsys, "ckpt", "import", folder, tmp_path / "new", says=MAPS[name][1])


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


SOURCES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a pipe": ("x.pt", a_pipe, "it is a pipe"),
    "a pipe of safetensors": ("x.safetensors", a_pipe, "it is a pipe"),
    "no archive": ("x.pt", lambda path: path.write_bytes(b"\x80\x02garbage"), "x.pt"),
    "half an archive": ("x.pt", lambda path: path.write_bytes(b"PK\x03\x04" + b"\0" * 100), "it is damaged"),
    "a header without end": (
        "x.safetensors", lambda path: path.write_bytes((2**62).to_bytes(8, "little") + b"{}"), "not be read"
    ),
    "a deep header": (
        "x.safetensors",
        lambda path: path.write_bytes((50_000).to_bytes(8, "little") + b"[" * 50_000),
        "not be read",
    ),
    "a hole in the file": (
        "x.safetensors",
        lambda path: path.write_bytes((100).to_bytes(8, "little") + json.dumps(
            {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).ljust(100).encode()),
        "not be read",
    ),
    "weights of numbers": ("x.pt", lambda path: torch.save({"model": 7}, path), "has no weights"),
    "an optimizer of numbers": (
        "x.pt",
        lambda path: torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"param_groups": [7], "state": {}}}, path),
        "does not hold what files of 'torch' do",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_of_others(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and nothing is waited for or written."""
    file, make, says = SOURCES[name]
    make(tmp_path / file)
    refused(capsys, "ckpt", "import", tmp_path / file, tmp_path / "new", says=says)
    assert not (tmp_path / "new").exists()
