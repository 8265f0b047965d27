"""``deepspeed.init_inference`` and configs of ZeRO-Inference, beside transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold.compat.deepspeed as deepspeed
from shardfold.compat.deepspeed import comm
from shardfold.errors import ConfigError, ModelError
from shardfold.plan.formats import FORMATS
from shardfold.testing import Ranks
from tests.generation.models import made
from tests.support.clients import needs

pytestmark = needs("transformers")

PROMPTS = torch.tensor([[5, 6, 7, 8], [40, 41, 42, 43]])
NEW = 8


def _tokens(model: Any) -> list[list[int]]:
    """Greedy ones, by transformers' own generate()."""
    mask = torch.ones_like(PROMPTS)
    whole = model.generate(PROMPTS, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return whole[:, PROMPTS.shape[1] :].tolist()


def _coded(form: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model with the values that codes of its blocks' matrices stand for."""
    model = made()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            values = module.weight.data.flatten()
            payload = torch.empty(FORMATS[form].nbytes(values.numel()), dtype=torch.uint8)
            FORMATS[form].encode_tensor(values, payload)
            FORMATS[form].decode(payload.view(1, -1), values.view(1, -1))
    return model.to(dtype)


def _served(**config: Any) -> dict[str, Any]:
    model = made()
    engine = deepspeed.init_inference(model, **config)
    engine.profile_model_time()
    found = {"tokens": _tokens(engine), "held": engine._core.memory().tiers, "dtype": str(engine(PROMPTS).logits.dtype)}
    found["times"] = len(engine.model_times())
    assert engine.module is model and engine.config.hidden_size == 32
    engine.destroy()
    comm.destroy_process_group()
    return found


def test_a_model_says_what_transformers_says_alone(ranks: Ranks) -> None:
    """In fp32 and bf16, on one rank and cut over two; what the model gives is in the dtype that was asked for."""
    plain = {dtype: _tokens(made().to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    for world in (1, 2):
        for dtype in plain if world == 1 else (torch.float32,):
            for found in ranks.run(
                _served,
                world_size=world,
                dtype=dtype,
                tensor_parallel={"tp_size": world},
                replace_with_kernel_inject=True,
            ):
                assert found["tokens"] == plain[dtype] and found["dtype"] == str(dtype)


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({"dtype": torch.int8}, "int8/64"),
        ({"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}}, "int4/64"),
        (
            {
                "dtype": "fp32",
                "quant": {"weight": {"post_init_quant": {"mlp": {"num_bits": 4}, "attn": {"num_bits": 4}}}},
            },
            "int4/64",
        ),
    ],
    ids=["int8", "int4", "by name"],
)
def test_weights_rest_in_fewer_bits(ranks: Ranks, how: dict[str, Any], form: str) -> None:
    """The tokens of a model that has the values that the codes stand for; less is held than of 16 bits."""
    (found,) = ranks.run(_served, world_size=1, **how)
    model = _coded(form)
    assert found["tokens"] == _tokens(model)
    assert sum(found["held"].values()) < 4 * sum(p.numel() for p in model.parameters())


def _zero_inference(folder: str, **more: Any) -> tuple[list[list[int]], dict[str, int]]:
    """As the scripts of ZeRO-Inference do: initialize() without an optimizer, and the module's own generate()."""
    param = {"device": "nvme", "nvme_path": folder} if folder else {"device": "cpu"}
    zero = {"stage": 3, "offload_param": param, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 2, "zero_optimization": zero, **more}
    engine = deepspeed.initialize(model=made(), config=config)[0]
    engine.module.eval()
    with torch.no_grad():
        found = _tokens(engine.module)
    held = engine._core.memory().tiers
    engine.destroy()
    comm.destroy_process_group()
    return found, held


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_configs_of_zero_inference_generate(ranks: Ranks, tmp_path: Path, where: str) -> None:
    """Weights in host memory and in files, split over two ranks; as codes too."""
    folder = str(tmp_path) if where == "nvme" else ""
    rule = {"weight_quantization": {"quantized_initialization": {"num_bits": 4, "group_size": 64}}}
    for more, expected in (({}, _tokens(made())), (rule, _tokens(_coded("int4/64")))):
        for found, held in ranks.run(_zero_inference, folder, world_size=2, **more):
            assert found == expected
            assert held["disk" if folder else "host"] > 0


def _from_checkpoint(checkpoint: Any, **more: Any) -> list[list[int]]:
    from transformers import LlamaForCausalLM

    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model = LlamaForCausalLM(made().config)
    engine = deepspeed.init_inference(model.eval(), dtype="fp32", checkpoint=checkpoint, **more)
    found = _tokens(engine)
    engine.destroy()
    comm.destroy_process_group()
    return found


def _written(folder: Path) -> dict[str, Any]:
    """One model in the forms that a checkpoint may have."""
    model = made()
    model.save_pretrained(folder / "safe")
    torch.save({"module": {f"module.{k}": v for k, v in model.state_dict().items()}}, folder / "all.pt")
    values = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    names = sorted(values)
    for part in (0, 1):
        torch.save({name: values[name] for name in names[part::2]}, folder / f"part{part}.bin")
    listed = {"type": "ds_model", "checkpoints": ["part0.bin", "part1.bin"], "version": 1.0}
    (folder / "listed.json").write_text(json.dumps(listed))
    return {"folder": str(folder / "safe"), "file": str(folder / "all.pt"), "json": str(folder / "listed.json")}


def test_a_model_without_memory_gets_its_values_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """A folder of safetensors, a file of torch.save, and a list of files of the inner model's names; one cut over two
    ranks as it is read, one in memory already."""
    expected = _tokens(made())
    forms = _written(tmp_path)
    for form in forms.values():
        assert ranks.run(_from_checkpoint, form, world_size=1) == [expected]
    assert ranks.run(_from_checkpoint, forms["json"], world_size=2, mp_size=2) == [expected, expected]


def test_a_checkpoint_that_does_not_fit_raises(tmp_path: Path) -> None:
    """What is missing, or too much, or of another shape, is named; nothing is loaded in silence."""
    state = made().state_dict()
    cases = {
        "missing": ({k: v for k, v in state.items() if "layers.1" not in k}, r"missing .*model\.layers\.1"),
        "other names": ({f"x.{k}": v for k, v in state.items()}, r"unexpected .*x\.model"),
        "another shape": ({**state, "model.norm.weight": torch.ones(7)}, r"model\.norm\.weight"),
    }
    for name, (values, said) in cases.items():
        torch.save(values, tmp_path / "wrong.pt")
        with pytest.raises((ModelError, ConfigError), match=said):
            deepspeed.init_inference(made(), dtype="fp32", checkpoint=str(tmp_path / "wrong.pt"))
        assert name
    comm.destroy_process_group()


def test_what_cannot_be_honoured_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for given, said in (
        ({"dtpye": "fp16"}, "dtpye=...): this key is unknown. Did you mean 'dtype'"),
        ({"dtype": "int3"}, "it is torch.float32, torch.float16, torch.bfloat16 or torch.int8"),
        ({"mp_size": 2, "tensor_parallel": {"tp_size": 4}}, "they are the same number, so give one of them"),
        ({"tensor_parallel": {"tp_sise": 2}}, "tensor_parallel.tp_sise=...): this key is unknown. Did you mean"),
        ({"tensor_parallel": {"tp_size": 3}}, "the 1 ranks that there are cannot be shared out"),
        ({"ep_size": 2}, "experts over ranks are not here"),
        ({"save_mp_checkpoint_path": "x"}, "files with parts of single ranks are not written"),
        ({"quant": {"weight": {"num_bits": 3}}}, "weights rest in 8 bits or in 4"),
        ({"quant": {"wieght": {}}}, "quant.wieght=...): this key is unknown"),
        ({"checkpoint": str(tmp_path / "none.pt")}, "which is no file"),
        ({"checkpoint": str(tmp_path)}, "has no .safetensors, .bin or .pt"),
        ({"zero": {"stage": 2, "offload_param": {"device": "cpu"}}}, "it is for stage 3"),
    ):
        with pytest.raises(ConfigError) as error:
            deepspeed.init_inference(made(), **given)
        assert said in str(error.value), given
    with pytest.raises(ConfigError, match="there is an optimizer"):
        rule = {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}}
        adam = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}}
        deepspeed.initialize(model=made(), config={**rule, **adam})
    comm.destroy_process_group()


def test_what_has_no_effect_is_said_once() -> None:
    config = deepspeed.DeepSpeedInferenceConfig(
        {"kernel_inject": True, "enable_cuda_graph": True, "max_tokens": 512, "dtype": "bf16"}
    )
    assert {note.key for note in config.notes} == {"replace_with_kernel_inject", "enable_cuda_graph", "max_out_tokens"}
    assert deepspeed.default_inference_config()["dtype"] is torch.float16
