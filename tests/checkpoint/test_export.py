"""Doors of checkpoints: others read what is exported, and what others wrote is imported, tensor by tensor."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardfold as sf
from shardfold.checkpoint import Checkpoint, Writer, export_to, import_from
from shardfold.errors import CheckpointError, ConfigError
from shardfold.testing import Ranks
from shardfold.tools import cli
from tests.support.models import Small

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
VOCAB = 97
Build = Callable[[], nn.Module]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, **sizes))


class Mixed(nn.Module):
    """Frozen and tied parameters, a scalar, buffers of several dtypes, one of which is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 6)
        self.again = self.head
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(6.0) / 3)
        self.register_buffer("scratch", torch.arange(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.head(self.frozen(self.norm(x)) + self.table)) * self.scale


def trained(build: Build, path: Path, *, steps: int = 0) -> nn.Module:
    """A model with random weights, perhaps trained for some steps, and its checkpoint."""
    torch.manual_seed(0)
    model = build()
    engine = sf.Engine(model, optimizer=ADAMW, layout="zero1")
    for _ in range(steps):
        engine.backward(engine(torch.randn(8, 6)).square().mean())
        engine.step()
    engine.save(path, wait=True)
    engine.close()
    return model


def check_equal(found: Any, model: nn.Module) -> None:
    """The same names, and bitwise the same values."""
    wanted = model.state_dict()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.fixture
def _no_threads_for_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers draws progress with tqdm, which otherwise leaves a thread behind."""
    from tqdm import tqdm

    monkeypatch.setattr(tqdm, "monitor_interval", 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.usefixtures("_no_threads_for_bars")
def test_transformers_reads_an_export(build: Build, tmp_path: Path):
    """`from_pretrained` finds every weight of a tied and an untied model under its name; the logits are the same."""
    from transformers import AutoModelForCausalLM

    model: Any = trained(build, tmp_path / "run" / "step")
    model.config.save_pretrained(tmp_path / "config")
    report = export_to(
        tmp_path / "run", tmp_path / "out", "hf", shard_bytes=30_000, config=tmp_path / "config" / "config.json"
    )
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    said = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert said["metadata"]["total_size"] == report.num_bytes == sum(p.nbytes for p in model.parameters())
    for shard in shards:
        tensors = load_file(shard)
        assert {name for name, file in said["weight_map"].items() if file == shard.name} == set(tensors)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 30_000
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.randint(VOCAB, (2, 9))
    assert torch.equal(again(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


@pytest.mark.usefixtures("_no_threads_for_bars")
def test_transformers_writes_what_is_imported(tmp_path: Path):
    """What `save_pretrained` wrote becomes a checkpoint that a model has no missing or surplus name for."""
    torch.manual_seed(0)
    model: Any = gpt2()
    model.save_pretrained(tmp_path / "hf")
    report = import_from(tmp_path / "hf", tmp_path / "step")
    assert report.source == "hf" and not report.optimizer
    engine = sf.Engine(gpt2(), optimizer=ADAMW, layout="zero3")
    engine.load(tmp_path / "step", weights_only=True)
    check_equal(engine.state_dict(), model)


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_out_and_in_again(form: str, tmp_path: Path):
    """Frozen and tied parameters, a scalar and persistent buffers come back as they were, with or without an engine."""
    model = trained(Mixed, tmp_path / "step", steps=2)
    report = export_to(tmp_path / "step", tmp_path / "out", form)
    assert report.num_tensors == len({t.data_ptr() for t in model.state_dict().values()})
    import_from(tmp_path / "out", tmp_path / "back")
    engine = sf.Engine(Mixed(), layout="zero3")
    engine.load(tmp_path / "back", weights_only=True)
    check_equal(engine.state_dict(), model)
    check_equal(sf.load_model(tmp_path / "back", Mixed).state_dict(), model)


def test_torch_reads_an_export(tmp_path: Path):
    """`torch.load` gives the state dict, also mapped, tied weights as one; other tools find a sound zip archive."""
    model = trained(Mixed, tmp_path / "step", steps=1)
    export_to(tmp_path / "step", tmp_path / "model.pt", "torch")
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None
    for mapped in (False, True):
        state = torch.load(tmp_path / "model.pt", mmap=mapped, weights_only=True)
        check_equal(state, model)
        assert state["head.weight"].data_ptr() == state["again.weight"].data_ptr()
        assert all(value.data_ptr() % 64 == 0 for value in state.values())
    Mixed().load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64])
def test_torch_export_of_any_dtype(dtype: torch.dtype, tmp_path: Path):
    """Dtypes that have no storage class of their own are read back too."""
    values = torch.randint(0, 256, (3, 8), dtype=torch.uint8).view(torch.uint8 if dtype == torch.bool else dtype)
    values = values > 100 if dtype == torch.bool else values
    writer = Writer(tmp_path / "step")
    writer.parameter("w", values, trainable=False)
    writer.commit()
    export_to(tmp_path / "step", tmp_path / "w.pt", "torch")
    found = torch.load(tmp_path / "w.pt")["w"]
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), values.view(torch.uint8))


def test_dcp_reads_an_export(tmp_path: Path):
    """`dcp.load` fills a model's state dict, and `dcp_to_torch_save` writes it; tied weights under both names."""
    model = trained(Mixed, tmp_path / "step", steps=1)
    export_to(tmp_path / "step", tmp_path / "dcp", "dcp")
    state = Mixed().state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    check_equal(state, model)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    check_equal(torch.load(tmp_path / "all.pt"), model)


def test_dtype_is_as_module_to(tmp_path: Path):
    """`dtype=` makes floating tensors what `module.to(dtype)` makes of them, and the copied config says so."""
    model = trained(Mixed, tmp_path / "step", steps=1)
    (tmp_path / "config.json").write_text('{"dtype": "float32", "architectures": ["Mixed"]}')
    export_to(tmp_path / "step", tmp_path / "out", dtype=torch.bfloat16, config=tmp_path)
    model.to(torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    check_equal(found | {f"again.{n}": found[f"head.{n}"] for n in ("weight", "bias")}, model)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {"dtype": "bfloat16", "architectures": ["Mixed"]}


def test_averages_are_exported(tmp_path: Path):
    """`state="average"` takes averaged weights, and the others where there is no average."""
    engine = sf.Engine(Mixed(), optimizer=ADAMW, layout="zero1")
    average = sf.Average(engine, decay=0.5)
    for _ in range(2):
        engine.backward(engine(torch.randn(8, 6)).square().mean())
        engine.step()
    engine.save(tmp_path / "step", wait=True)
    export_to(tmp_path / "step", tmp_path / "out", state="average")
    found = load_file(tmp_path / "out" / "model.safetensors")
    with average.applied():
        wanted = {name: value.clone() for name, value in engine.state_dict().items()}
    assert not torch.equal(found["head.weight"], engine.state_dict()["head.weight"])
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


# -- importing ---------------------------------------------------------------------------------------------------------


def in_torch(build: Build, named: bool, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain training."""
    torch.manual_seed(1)
    model = build()
    given = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = ADAMW(given if named else model.parameters(), weight_decay=0.1)
    for _ in range(steps):
        model(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(50, (4, 8), generator=generator), torch.randint(50, (4, 8), generator=generator)


def small() -> nn.Module:
    return Small(tied=True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["numbers", "names", "dcp numbers", "dcp names", "dcp flat"])
def test_training_goes_on_from_others(form: str, tmp_path: Path, ranks: Ranks):
    """The optimizer's state comes along, by number or by name: the next step is that of the training that was saved."""
    model, optimizer = in_torch(small, named=form in ("names", "dcp numbers"))
    options = {"flatten_optimizer_state_dict": form == "dcp flat"}
    state: Any = optimizer.state_dict()
    if form in ("dcp names", "dcp flat"):
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    whole = {"model": model.state_dict(), "optimizer": state, "epoch": 4}
    if form.startswith("dcp"):
        dcp.save(whole, checkpoint_id=tmp_path / "theirs", no_dist=True)
    else:
        torch.save(whole, tmp_path / "theirs")
    report = import_from(tmp_path / "theirs", tmp_path / "step")
    assert report.optimizer and not report.notes
    model(*batch()).backward()
    optimizer.step()
    ranks.run(_goes_on, str(tmp_path / "step"), model.state_dict(), world_size=2)


def _goes_on(path: str, wanted: dict[str, Tensor]) -> None:
    engine = sf.Engine(small(), optimizer=partial(torch.optim.AdamW, lr=1.0), layout="zero2")
    report = engine.load(path)
    assert report.state == {"epoch": 4} and engine.steps == 3
    engine.backward(engine(*batch()))
    engine.step()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_an_unnamed_optimizer_is_left_out_with_the_reason(tmp_path: Path):
    """States that cannot be told apart are not guessed: the weights come, and a note says why the rest did not."""
    model, _ = in_torch(small, named=False, steps=1)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[1:]}, {"params": parameters[:1]}])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "theirs.pt")
    report = import_from(tmp_path / "theirs.pt", tmp_path / "step")
    assert not report.optimizer and "make the optimizer of model.named_parameters()" in report.notes[0]
    sf.Engine(small(), layout="zero1").load(tmp_path / "step", weights_only=True)


def test_rename_and_key(tmp_path: Path):
    """Weights under an unusual key, with the prefix that DDP puts in front, are found by `key=` and `rename=`."""
    model = Mixed()
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"ema": {"shadow": weights}, "name": "x"}, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match=r"has no weights at its top or under model, .* it has ema, name"):
        import_from(tmp_path / "theirs.pt", tmp_path / "step")
    import_from(tmp_path / "theirs.pt", tmp_path / "step", key="ema.shadow", rename={r"^module\.": ""})
    check_equal(sf.load_model(tmp_path / "step", Mixed).state_dict(), model)


# -- a model without the engine, and an engine without memory ----------------------------------------------------------


def test_load_model(tmp_path: Path):
    """From a factory or into a module, in another dtype, from a checkpoint or from safetensors; in `eval()` mode."""
    model = trained(Mixed, tmp_path / "step", steps=2)
    export_to(tmp_path / "step", tmp_path / "hf")
    x = torch.randn(4, 6)
    for path in (tmp_path / "step", tmp_path / "hf"):
        for given in (Mixed, Mixed()):
            found = sf.load_model(path, given)
            check_equal(found.state_dict(), model)
            assert found.head.weight is found.again.weight and not found.training
            assert not found.frozen.weight.requires_grad and found.scratch.tolist() == [0, 1, 2]
            assert torch.equal(found(x), model.eval()(x))
    half = sf.load_model(tmp_path / "step", Mixed, dtype=torch.bfloat16)
    check_equal(half.state_dict(), model.to(torch.bfloat16))


def test_load_model_says_what_does_not_fit(tmp_path: Path):
    """Missing and unexpected names and other shapes are all listed; `strict=False` takes what is there."""
    trained(Mixed, tmp_path / "step")

    class Other(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(2))
            del self.scale

    with pytest.raises(CheckpointError, match=r"nothing was changed: missing: extra; unexpected: scale\.$"):
        sf.load_model(tmp_path / "step", Other())
    assert sf.load_model(tmp_path / "step", Other(), strict=False).extra.tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="missing: extra"):
        sf.load_model(tmp_path / "step", Other, strict=False)  # nothing gives it values
    model = Mixed()
    model.frozen = nn.Linear(5, 6)
    with pytest.raises(CheckpointError, match=r"frozen\.weight is 6x6 there and 6x5 in the model"):
        sf.load_model(tmp_path / "step", model)


@pytest.mark.soak
def test_load_model_needs_no_engine(tmp_path: Path):
    """Inference does without the engine's modules and without a process group."""
    trained(Mixed, tmp_path / "step")
    script = (
        "import sys, torch, shardfold as sf\n"
        f"m = sf.load_model({str(tmp_path / 'step')!r}, lambda: torch.nn.Linear(6, 6), strict=False, "
        "rename={'^head.': ''})\n"
        "assert not torch.distributed.is_initialized() and not m.weight.is_meta\n"
        "rooms = ('engine', 'runner', 'hooks', 'actions', 'optim.sharded')\n"
        "loaded = [room for room in rooms if f'shardfold.{room}' in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_engine_reads_a_checkpoint_as_weights(tmp_path: Path):
    """`Init(weights=...)` fills a model without memory from a checkpoint, its buffers and tied weights too."""
    model = trained(Mixed, tmp_path / "step", steps=1)
    with sf.meta_init():
        empty = Mixed()
    engine = sf.Engine(empty, layout="zero3", init=sf.Init(weights=tmp_path / "step"))
    check_equal(engine.state_dict(), model)


# -- limits ------------------------------------------------------------------------------------------------------------

MEMORY = """
import sys, threading
from pathlib import Path
import torch
import torch.distributed.checkpoint.format_utils
from shardfold.checkpoint import Writer, export_to, import_from

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

def growth(work):
    before = most = anonymous()
    over = threading.Event()
    def watch():
        nonlocal most
        while not over.wait(0.001):
            most = max(most, anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    over.set()
    thread.join()
    return most - before

root = Path(sys.argv[1])
writer = Writer(root / "step")
for number in range(50):
    writer.parameter(f"w{number}", lambda: torch.ones(1024, 1024), shape=(1024, 1024), dtype=torch.float32)
print("write", growth(writer.commit))
for to in ("hf", "torch", "dcp"):
    print("export", to, growth(lambda: export_to(root / "step", root / to, to)))
print("import", growth(lambda: import_from(root / "hf", root / "again")))
"""


@pytest.mark.soak
def test_memory_is_that_of_a_few_tensors(tmp_path: Path):
    """200 MiB in tensors of 4 go out and in with at most 60 MiB of memory more than before."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], check=True, timeout=200, capture_output=True, text=True
    )
    figures = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}
    assert len(figures) == 5 and max(figures.values()) < 60, figures


def test_errors_are_one_sentence_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A size-0 parameter, a target that exists, unknown forms, files of nobody: nothing is written."""
    writer = Writer(tmp_path / "empty")
    writer.parameter("hollow", torch.empty(0, 3))
    writer.commit()
    with pytest.raises(CheckpointError, match="hollow has no elements"):
        export_to(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty").rename(tmp_path.parent / f"{tmp_path.name}-empty")
    trained(Mixed, tmp_path / "step")
    before = sorted(tmp_path.iterdir())
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "list.pt").write_bytes(b"")
    torch.save([1], tmp_path / "list.pt")
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: export_to(tmp_path / "step", tmp_path / "step"), CheckpointError, "exists: nothing was written"),
        (lambda: export_to(tmp_path / "step", tmp_path / "o", "hff"), ConfigError, "Did you mean 'hf'"),
        (lambda: export_to(tmp_path / "step", tmp_path / "o", "dcp", config=tmp_path), ConfigError, "only 'hf'"),
        (lambda: export_to(tmp_path / "step", tmp_path / "o", config=tmp_path), ConfigError, "has no config.json"),
        (lambda: export_to(tmp_path / "step", tmp_path / "o", state="exp"), CheckpointError, "has no state 'exp'"),
        (lambda: export_to(tmp_path / "step", tmp_path / "o", rename={"^.*$": "x"}), CheckpointError, "the name 'x'"),
        (lambda: import_from(tmp_path / "note.txt", tmp_path / "o"), CheckpointError, "file of torch.save"),
        (lambda: import_from(tmp_path / "list.pt", tmp_path / "o"), CheckpointError, "holds a list"),
        (lambda: import_from(tmp_path / "step", tmp_path / "o"), CheckpointError, "of Shardfold already"),
        (lambda: import_from(tmp_path / "none", tmp_path / "o"), CheckpointError, "there is no"),
        (lambda: import_from(tmp_path / "a.safetensors", tmp_path / "note.txt"), CheckpointError, "note.txt"),
        (lambda: sf.load_model(tmp_path / "none", Mixed), CheckpointError, "there is no checkpoint"),
    ]
    for call, kind, text in calls:
        with pytest.raises(kind, match=text):
            call()
    left = {p.name for p in tmp_path.iterdir()} - {p.name for p in before}
    assert left == {"note.txt", "list.pt", "a.safetensors"}
    assert [p for p in (tmp_path / "step").rglob(".*")] == []


def test_files_of_a_folder_keep_their_names_and_a_file_is_the_config(tmp_path: Path):
    """A tokenizer's files are none of the model's config; a config of any name becomes config.json."""
    trained(Mixed, tmp_path / "run" / "step")
    given, names = tmp_path / "given", ("config.json", "generation_config.json", "tokenizer.json", "vocab.json")
    given.mkdir()
    for name in names:
        (given / name).write_text(json.dumps({"name": name}))
    export_to(tmp_path / "run", tmp_path / "out", config=given)
    said = {path.name: json.loads(path.read_text())["name"] for path in (tmp_path / "out").glob("*.json")}
    assert said == {name: name for name in names}
    (given / "my_config.json").write_text("{}")
    export_to(tmp_path / "run", tmp_path / "other", config=given / "my_config.json")
    assert [path.name for path in (tmp_path / "other").glob("*.json")] == ["config.json"]


def test_writer_refuses_what_can_not_be(tmp_path: Path):
    """Names given twice, states of nobody, values without shape: said when they are given."""
    writer = Writer(tmp_path / "step")
    writer.parameter("w", torch.ones(2, 3), also=["v"])
    writer.state("w", "exp_avg", torch.ones(6))
    for call, text in [
        (lambda: writer.parameter("v", torch.ones(1)), "'v' is given twice"),
        (lambda: writer.state("w", "exp_avg", torch.ones(6)), "exp_avg of 'w' is given twice"),
        (lambda: writer.state("x", "exp_avg", torch.ones(6)), "not a parameter given before"),
        (lambda: writer.state("w", "exp_avg_sq", torch.ones(5)), "another size"),
        (lambda: writer.parameter("x", lambda: torch.ones(1)), "give its shape= and dtype= now"),
        (lambda: writer.parameter("x", torch.ones(1, dtype=torch.complex128)), "cast it"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            call()


def test_a_failed_read_leaves_the_checkpoint_that_was_there(tmp_path: Path):
    """What cannot be read while it is written removes the draft, and the old checkpoint stays."""
    trained(Mixed, tmp_path / "step")
    before = (tmp_path / "step" / "index.json").read_bytes()

    def fails() -> Tensor:
        raise CheckpointError("damaged.")

    writer = Writer(tmp_path / "step")
    writer.parameter("w", fails, shape=(3,), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="damaged"):
        writer.commit()
    assert (tmp_path / "step" / "index.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step"]


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_a_damaged_checkpoint_is_not_exported(form: str, tmp_path: Path):
    """A flipped byte is found while it is read; neither the target nor a part of it stays."""
    trained(Mixed, tmp_path / "step")
    (file,) = (tmp_path / "step").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    with Checkpoint(tmp_path / "step") as checkpoint:
        (piece,) = (p for p in checkpoint.index.pieces if p.of == "head.weight" and p.state == "weight")
    data[piece.at + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"head\.weight differ from their checksum"):
        export_to(tmp_path / "step", tmp_path / "out", form)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step"]


@pytest.mark.parametrize("form", ["hf", "torch", "dcp"])
def test_a_damaged_file_of_others_is_not_imported(form: str, tmp_path: Path):
    """A file that is cut short is an error that names it, not a checkpoint."""
    trained(Mixed, tmp_path / "step")
    export_to(tmp_path / "step", tmp_path / "out", form)
    file = max((tmp_path / "out").iterdir(), key=lambda p: p.stat().st_size) if form != "torch" else tmp_path / "out"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"cannot be read|is not a file of torch\.save, or it is damaged"):
        import_from(tmp_path / "out", tmp_path / "back", form)
    assert not (tmp_path / "back").exists()


def test_files_are_split_between_tensors(tmp_path: Path):
    """A writer begins another file where one would be too big."""
    writer = Writer(tmp_path / "step", file_bytes=1000)
    for number in range(6):
        writer.parameter(f"w{number}", torch.full((100,), float(number)))
    writer.commit()
    with Checkpoint(tmp_path / "step") as checkpoint:
        assert len(checkpoint.index.files) == 3
        assert [checkpoint.parameter(f"w{n}")[0].item() for n in range(6)] == [0, 1, 2, 3, 4, 5]


# -- the command -------------------------------------------------------------------------------------------------------


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    return int(end.value.code or 0)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Export and import by command, with sizes, dtypes and renames; what is wrong is one sentence and status 2."""
    model = trained(Mixed, tmp_path / "run" / "step", steps=1)
    run, out, back = str(tmp_path / "run"), str(tmp_path / "out"), str(tmp_path / "back")
    assert call("ckpt", "export", run, out, "--to", "hf", "--shard-size", "100B", "--rename", "^head=tail") == 0
    assert "in 6 files" in capsys.readouterr().out
    assert call("ckpt", "import", out, back, "--rename", "^tail=head") == 0
    assert "11 tensors" in capsys.readouterr().out
    check_equal(sf.load_model(back, Mixed).state_dict(), model)
    for bad, text in [
        (("export", run, out, "--to", "hf"), "exists"),
        (("export", run, str(tmp_path / "x"), "--to", "hf", "--dtype", "bf61"), "Did you mean 'bf16'"),
        (("export", run, str(tmp_path / "x"), "--to", "hf", "--shard-size", "big"), "not a number of bytes"),
        (("import", out, back, "--rename", "tail"), "has no '='"),
        (("import", out, back, "--from", "hff"), "Did you mean 'hf'"),
    ]:
        assert call("ckpt", *bad) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["export"], ["import"]])
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]):
    """Each command shows one use of itself."""
    assert call("ckpt", *command, "--help") == 0
    assert f"For example: shardfold ckpt {' '.join(command)}".strip() in capsys.readouterr().out


def test_refusals_need_no_torch(tmp_path: Path):
    """Help and what is wrong with the options are said before torch is imported."""
    script = (
        "import sys\nfrom shardfold.tools import cli\n"
        "for words in (['ckpt', 'export', '--help'], ['ckpt', 'export', 'a', 'b', '--to', 'hf', '--dtype', 'x']):\n"
        "    try:\n        cli.main(words)\n    except SystemExit:\n        pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True)
