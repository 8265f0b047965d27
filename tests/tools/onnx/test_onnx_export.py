"""What is written as ONNX says what its source does, whatever the batch, the length and the past."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardfold.errors import CheckpointError, ConfigError
from shardfold.tools.cli import app
from tests.tools.tune.support import model_folder, tiny_tokenizer

pytest.importorskip("onnxruntime")
exporting: Any = pytest.importorskip("shardfold.tools.onnx.onnx_export")
sessions: Any = pytest.importorskip("shardfold.tools.onnx.onnx_session")
comparing: Any = pytest.importorskip("shardfold.tools.onnx._compared")
sources: Any = pytest.importorskip("shardfold.tools.onnx._onnx_source")
graphs: Any = pytest.importorskip("shardfold.tools.onnx._layer_graph")
rounding: Any = pytest.importorskip("shardfold.tools.onnx._few_bits")

TEXTS = "\n".join(json.dumps({"text": f"{number} birds sit in a tree and sing"}) for number in range(4))


def _asked(folder: Path, session: Any, batch: int, past: int, length: int) -> float:
    """How far logits are from plain transformers', over the largest."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(3, model.config.vocab_size, (batch, past + length))
    with torch.no_grad():
        wanted = model(ids, past_key_values=DynamicCache(config=model.config)).logits[:, past:]
    before: Any = None
    if past:
        _, before = session.step(ids[:, :past], torch.ones(batch, past, dtype=torch.int64), None)
    found, _ = session.step(ids[:, past:], torch.ones_like(ids), before)
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item()


def test_layers_are_repeated_and_rounded(tmp_path: Path) -> None:
    """Four layers of which two are exported: logits are transformers' for batches, lengths and pasts that the exporter
    has not seen. int8 costs less than half a per cent; a graph with one other weight is noticed."""
    base = model_folder(tmp_path / "base", "llama", scale=4.0, num_hidden_layers=4)
    report = exporting.export_onnx(base, tmp_path / "out", threads=1)
    assert report.layers == (4, 2) and report.error < 1e-4 and report.tokens == 32
    assert "it has all of them" in str(report)
    session = sessions.OnnxSession(tmp_path / "out/model.onnx", 1)
    assert list(session.inputs)[:4] == ["input_ids", "attention_mask", "position_ids", "past_key_values.0.key"]
    assert session.outputs[:3] == ["logits", "present.0.key", "present.0.value"] and session.num_layers == 4
    for batch, past, length in ((1, 0, 1), (2, 0, 12), (5, 3, 1), (16, 6, 2)):
        assert _asked(base, session, batch, past, length) < 1e-4
    genai = json.loads((tmp_path / "out/genai_config.json").read_text())["model"]["decoder"]
    assert genai["num_hidden_layers"] == 4 and genai["inputs"]["past_key_names"] % 3 in session.inputs
    assert {"tokenizer.json", "config.json"} <= {file.name for file in (tmp_path / "out").iterdir()}

    import onnx

    answers = comparing.SourceAnswers(sources.OnnxSource.open(base))
    assert answers.compared(session).same
    graph = onnx.load(str(tmp_path / "out/model.onnx"))
    weight = next(each for each in graph.graph.initializer if each.name.endswith("layers.3.input_layernorm.weight"))
    weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(graph, str(tmp_path / "other.onnx"))
    assert not answers.compared(sessions.OnnxSession(tmp_path / "other.onnx", 1)).same

    (tmp_path / "texts.jsonl").write_text(TEXTS)
    scored = rounding.ScoredData(tiny_tokenizer(), 128, (tmp_path / "texts.jsonl",), 1)
    cost = rounding.round_weights(tmp_path / "out", 8, answers, scored)
    assert cost.num_bytes[1] < 0.6 * cost.num_bytes[0] and cost.tokens == 32
    before, after = cost.bits_per_byte
    # A weight is off by 1/510 of its block's range at most, so logits are by some thousandths.
    assert 0 < abs(after / before - 1) < 0.005
    assert {"model.onnx", "model.onnx.data"} >= {file.name for file in (tmp_path / "out").glob("model*")}


def _refused(error: type[Exception], *arguments: Any, **options: Any) -> str:
    with pytest.raises(error) as caught:
        exporting.export_onnx(*arguments, **options)
    return str(caught.value)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    """In one sentence, with nothing left behind: a target that exists, a reward model, a quantized base, a model of
    another kind, options that would do nothing."""
    base, out = model_folder(tmp_path / "base"), tmp_path / "out"
    config = json.loads((base / "config.json").read_text())

    def changed(**changes: Any) -> Path:
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    assert "exists" in _refused(CheckpointError, base, base)
    assert "8 or 4 bits" in _refused(ConfigError, base, out, bits=3)
    assert "without --bits" in _refused(ConfigError, base, out, data=[tmp_path])
    assert "is quantized" in _refused(ConfigError, changed(quantization_config={"quant_method": "awq"}), out)
    assert "rates texts" in _refused(ConfigError, changed(architectures=["LlamaForSequenceClassification"]), out)
    t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    assert "is an encoder with a decoder" in _refused(ConfigError, changed(**t5), out)
    reward = tmp_path / "reward"
    reward.mkdir()
    (reward / "config.json").write_text(json.dumps({"recipe": "reward"}))
    assert "is a reward model" in _refused(ConfigError, reward, out)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base", "changed", "reward"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "onnx", "--dtype", "bf16"), "--dtype says nothing of --to onnx"),
        (("--to", "onnx", "--shard-size", "1GB"), "--shard-size says nothing of --to onnx"),
        (("--to", "hf", "--bits", "4"), "--bits is for --to onnx"),
        (("--to", "hf", "--data", "texts"), "--data is for --to onnx"),
    ],
)
def test_options_of_other_forms_are_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    found = CliRunner().invoke(app, ["ckpt", "export", str(tmp_path), str(tmp_path / "out"), *options])
    assert said in str(found.exception) or said in found.output


def test_layers_of_one_kind() -> None:
    """What differs from another layer is a kind of its own; a layer's number makes no other kind. The nodes of the
    first layer are nobody's template."""
    from torch import nn

    def layer(number: int, width: int, scale: float) -> nn.Module:
        made = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
        made.layer_idx, made.scale = number, scale
        return made

    layers = [
        layer(0, 8, 1.0),
        layer(1, 8, 2.0),
        layer(2, 8, 1.0),
        layer(3, 8, 2.0),
        layer(4, 6, 1.0),
        layer(5, 8, 1.0),
    ]
    kinds = graphs.layer_kinds(layers)
    assert kinds == [0, 1, 0, 1, 4, 0]
    assert graphs.templates_of(kinds) == [0, 1, 2, 1, 4, 2]


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaForSequenceClassification", {}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}),
}


@pytest.mark.parametrize("name", ["bert", *[pytest.param(name, marks=pytest.mark.soak) for name in ENCODERS][1:]])
def test_layers_of_encoders_have_no_padding(tmp_path: Path, name: str) -> None:
    """A batch of texts of unequal lengths: each gets what transformers gives it alone, without any padding."""
    import transformers

    torch.manual_seed(0)
    kind, sizes = ENCODERS[name]
    usual = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
    config: Any = transformers.AutoConfig.for_model(
        name, **{**usual, "num_attention_heads": 4, "max_position_embeddings": 40, "initializer_range": 0.3, **sizes}
    )
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(tmp_path / "model")
    report = exporting.export_onnx(tmp_path / "model", tmp_path / "out", threads=1)
    assert report.packed and report.layers == (3, 2) and "without padding" in str(report)
    session = sessions.OnnxSession(tmp_path / "out/model.onnx", 1)
    texts = [torch.randint(3, 60, (length,)) for length in (5, 1, 9, 3)]
    ids, mask = torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, 9, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    found = session.run({"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)})
    for row, text in enumerate(texts):
        with torch.no_grad():
            alone = model(input_ids=text[None])
        for output, value in found.items():
            wanted = alone[output][0]
            torch.testing.assert_close(value[row][: len(wanted)], wanted, atol=1e-4, rtol=1e-4)


def test_padding_in_front_changes_nothing() -> None:
    """Positions count the tokens that are there."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert sessions.positions_of(mask, 3).tolist() == [[0, 1, 2], [2, 3, 4]]


def test_operators_of_tensorrt() -> None:
    from shardfold.tools.onnx._tensorrt_operators import missing_operators

    assert missing_operators(["MatMul", "MatMulNBits", "Softmax"]) == ["MatMulNBits"]


STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high."
)
"""As llama2.c's documentation prints it: the greedy text of a model of 260K parameters (MIT)."""


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bits", [None, 8])
def test_a_trained_model_tells_its_story(tmp_path: Path, bits: int | None) -> None:
    """A small trained LLaMA gives the published text through ONNX Runtime, in fp32 and in int8."""
    data = Path(os.environ.get("SHARDFOLD_TEST_DATA", "/nowhere")) / "stories260K"
    if not data.is_dir():
        pytest.skip("SHARDFOLD_TEST_DATA names no folder with stories260K")
    from transformers import AutoTokenizer

    report = exporting.export_onnx(data, tmp_path / "out", bits=bits, threads=1)
    assert report.layers == (5, 2)
    session = sessions.OnnxSession(tmp_path / "out/model.onnx", 1)
    (tokens,), _ = sessions.continuations(session, [[1]], 90)
    told = AutoTokenizer.from_pretrained(tmp_path / "out").decode(tokens, skip_special_tokens=True)
    assert told.strip().startswith(STORY)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_are_merged(tmp_path: Path) -> None:
    """The graph of an adapter says what peft's model does."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = model_folder(tmp_path / "base", "qwen2", scale=4.0, num_hidden_layers=3)
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    made.peft_config["default"].base_model_name_or_path = str(base)
    made.save_pretrained(str(tmp_path / "adapter"))
    exporting.export_onnx(tmp_path / "adapter", tmp_path / "out", threads=1)
    session = sessions.OnnxSession(tmp_path / "out/model.onnx", 1)
    ids = torch.arange(3, 15)[None]
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    with torch.no_grad():
        wanted = model.eval()(ids).logits
    found, _ = session.step(ids, torch.ones_like(ids), None)
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-4


@pytest.mark.soak
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_is_a_llama(tied: bool) -> None:
    """Our GPT and the LLaMA that it is written as give the same logits."""
    from shardfold.tools.recipes.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    gpt = GPT(GPTConfig(d_model=32, layers=3, heads=4, context=64, tied=tied))
    ids = torch.randint(256, (2, 64))
    with torch.no_grad():
        wanted, found = gpt.eval()(ids), sources.as_llama(gpt)(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "shardfold", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_runs_are_exported(tmp_path: Path) -> None:
    """Runs of the recipes: a GPT with its tokenizer of bytes, and a face model, whose embeddings are those of the
    trained one for batches of any size."""
    text = tmp_path / "text.txt"
    text.write_text("a bird sings in a tree. " * 400)
    small = ("--procs", "1", "--steps", "3", "--save-every", "3")
    gpt = ("--size", "tiny", "--data", str(text), "--out", str(tmp_path / "gpt"))
    faces = ("--layers", "3", "--width", "32", "--out", str(tmp_path / "face"))
    for arguments in (("lm", *gpt), ("face", *faces)):
        _command("train", *arguments, *small)
    for name, inputs in (("gpt", "input_ids"), ("face", "images")):
        told = _command("ckpt", "export", str(tmp_path / name), str(tmp_path / f"{name}-onnx"), "--to", "onnx")
        assert "Compared with the source" in told
        assert inputs in sessions.OnnxSession(tmp_path / f"{name}-onnx/model.onnx", 1).inputs
    images = torch.rand(5, *sources.OnnxSource.open(tmp_path / "face").inputs["images"].shape[1:])
    session = sessions.OnnxSession(tmp_path / "face-onnx/model.onnx", 1)
    together = session.run({"images": images})["embeddings"]
    alone = session.run({"images": images[:1]})["embeddings"]
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-4)  # statistics are not those of the batch
