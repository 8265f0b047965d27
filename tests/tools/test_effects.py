"""An option is followed or refused: what would do nothing under the others is told, with what is missing for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfold.checkpoint import export_to, import_from
from shardfold.errors import ConfigError
from shardfold.tools import cli
from shardfold.tools.effects import Effect, idle
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.train_config import RecipeSettings, TrainConfig, resumed_settings

IDLE: list[tuple[type[RecipeSettings], dict[str, Any], str, dict[str, Any]]] = [
    (TrainConfig, {"top_k": 1}, "--top-k has no effect here, .*: give --experts, or leave it out", {"experts": 2}),
    (TrainConfig, {"gather": "bf16", "layout": "ddp"}, "all parameters: give another --layout", {"layout": "zero1"}),
    (TrainConfig, {"sequence_parallel": True}, "of which there is 1 .*: give --tensor 2", {"tensor": 2}),
    (TrainConfig, {"attention": "ring"}, "--sequence, of which there is 1: give --sequence 2", {"sequence": 2}),
    (TrainConfig, {"order": "gpipe"}, "of which there is 1: give --pipeline 2", {"pipeline": 2}),
    (TrainConfig, {"memory": "8GiB"}, "give --micro-batch max", {"micro_batch": "max"}),
    (TrainConfig, {"matrix_lr": 0.1}, "give --optimizer muon", {"optimizer": "muon"}),
    (TrainConfig, {"warmup": 9, "steps": 9}, "the run ends before it is over: warm up for fewer", {"steps": 10}),
    (FaceConfig, {"warmup": 9, "steps": 9}, "the run ends before it is over: warm up for fewer", {"steps": 10}),
    (TrainConfig, {"nonfinite": "warn", "precision": "fp16"}, "give another --precision", {"precision": "bf16"}),
    (TrainConfig, {"sample": 9, "pipeline": 2}, "--pipeline generate no text: leave it out", {"pipeline": 1}),
    (TrainConfig, {"temperature": 1.0, "pipeline": 2}, "--temperature has no effect", {"pipeline": 1}),
    (TrainConfig, {"temperature": 1.0, "sample": 0}, "give --sample another number", {"sample": 1}),
    (TrainConfig, {"keep": 5}, "give --save-every", {"save_every": 1}),
    (TrainConfig, {"elastic": True, "tensor": 2}, "give each of --tensor, .* and --expert 1", {"tensor": 1}),
    (TrainConfig, {"elastic": True, "offload": "disk"}, "with gradients on disk: give --offload", {"offload": "host"}),
    (TrainConfig, {"spares": 1}, "give --elastic", {"elastic": True}),
    (TrainConfig, {"exact": True}, "ranks that die or come in: give --elastic", {"elastic": True}),
    (TrainConfig, {"spares": 1, "elastic": True, "micro_batch": "max"}, "-batch a number", {"micro_batch": 2}),
    (TrainConfig, {"elastic": True, "optimizer": "muon"}, "give --optimizer adamw", {"optimizer": "adamw"}),
    (FaceConfig, {"elastic": True}, "give --head replicated", {"head": "replicated"}),
    (FaceConfig, {"spares": 1, "head": "replicated"}, "give --elastic", {"elastic": True}),
    (
        FaceConfig,
        {"elastic": True, "head": "replicated", "offload": "disk"},
        "with gradients on disk: give --offload",
        {"offload": "host"},
    ),
    (FaceConfig, {"identities": 9, "data": "faces"}, "--identities has no effect here", {"data": None}),
    (FaceConfig, {"shots": 3, "data": "faces"}, "--shots has no effect here", {"data": None}),
    (FaceConfig, {"difficulty": 1.0, "data": "faces"}, "only where there is no --data", {"data": None}),
    (FaceConfig, {"patch": 4, "backbone": "timm:a"}, "--patch has no effect here", {"backbone": "vit"}),
    (FaceConfig, {"width": 32, "backbone": "timm:a"}, "--width has no effect here", {"backbone": "vit"}),
    (FaceConfig, {"layers": 1, "backbone": "timm:a"}, "--layers has no effect here", {"backbone": "vit"}),
    (FaceConfig, {"heads": 2, "backbone": "timm:a"}, "a model of timm has its own sizes", {"backbone": "vit"}),
    (FaceConfig, {"transforms": "torchvision", "augment": False}, "images are not changed", {"augment": True}),
]


@pytest.mark.parametrize(("of", "given", "says", "then"), IDLE, ids=[f"{next(iter(given))}" for _, given, *_ in IDLE])
def test_a_setting_without_effect_is_refused(
    of: type[RecipeSettings], given: dict[str, Any], says: str, then: dict[str, Any]
) -> None:
    """In a sentence that names the option and what it lacks; with that it is taken. Its default is no option."""
    with pytest.raises(ConfigError, match=says):
        of.load(given)
    with pytest.raises(ValueError, match=says):  # pydantic's own
        of(**given)
    name = next(iter(given))
    taken = of.load({**given, **then})
    assert getattr(taken, name) == given[name] and not taken.idle()
    assert of.load({**given, name: of.model_fields[name].default}).idle() == {}


def test_every_rule_of_settings_has_a_case() -> None:
    rules = [(of, each.option) for of in (TrainConfig, FaceConfig) for each in of.effects]
    assert sorted(map(str, rules)) == sorted(str((of, next(iter(given)))) for of, given, *_ in IDLE)


def test_what_a_run_inherits_may_do_nothing(tmp_path: Path) -> None:
    """A run that is resumed under other settings leaves out what these make idle; what is given with them is told."""
    first = {"size": "tiny", "steps": 9, "warmup": 0, "save_every": 3, "temperature": 1.0, "memory": "8GiB"}
    (tmp_path / "config.json").write_text(json.dumps({**first, "micro_batch": 4}))
    settings = resumed_settings(tmp_path, {"resume": str(tmp_path), "sample": "0"})
    assert "temperature" not in settings and "memory" not in settings and settings["save_every"] == 3
    assert TrainConfig.load(settings).sample == 0
    with pytest.raises(ConfigError, match="--temperature has no effect here"):
        resumed_settings(tmp_path, {"resume": str(tmp_path), "sample": "0", "temperature": "0.9"})


def test_a_run_with_fewer_steps_does_not_speak_of_the_warm_up_it_inherits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"size": "tiny", "steps": 20, "warmup": 2}))
    settings = resumed_settings(tmp_path, {"resume": str(tmp_path), "steps": "2"})
    assert "warmup" not in settings and TrainConfig.load(settings).steps == 2


def test_a_rule_is_asked_for_what_is_given() -> None:
    """By value: an option with its default, which a config file may hold, is not given; the first reason is said."""
    rules = [Effect("a", lambda all_of: all_of.b, "there is no b", "give --b"), Effect("a", lambda _: False, "of c")]
    assert idle(SimpleNamespace(a=0, b=False), {"a": 0}, rules) == {}
    assert idle(SimpleNamespace(a=1, b=False), {"a": 0}, rules) == {"a": rules[0]}
    assert idle(SimpleNamespace(a=1, b=True), {"a": 0}, rules) == {"a": rules[1]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench tensors --params 1e6", "--params has no effect here, as this job has no GPT: give the job gpt"),
        ("bench units --context 8", "--context has no effect here"),
        ("bench --timeline x.png --within 9", "--within has no effect here, as --timeline draws a picture"),
        ("bench --timeline x.png --without ddp", "--without has no effect here"),
        ("bench --timeline x.png --reference ddp", "--reference has no effect here"),
        ("bench --timeline x.png --json x.json", "--json has no effect here"),
        ("bench --timeline x.png --markdown", "--markdown has no effect here"),
        ("ckpt export from to.pt --to torch --shard-size 1GB", "only 'hf' (--to hf) is cut into files of a size"),
    ],
)
def test_an_option_of_a_command_without_effect_is_refused(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments.split())
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_where_weights_are_is_asked_of_files_that_have_places(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "there" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"it says where in a file of torch or dcp the weights are.*\(--key\)"):
        import_from(tmp_path / "there", tmp_path / "step-0", key="ema")
    assert not (tmp_path / "step-0").exists()
    with pytest.raises(ConfigError, match="leave it out"):
        export_to(tmp_path, tmp_path / "out", "dcp", shard_bytes=7)


@pytest.mark.parametrize(("given", "steps", "warmup"), [(None, 400, 40), (None, 20, 5), (30, 60, 30), (0, 60, 0)])
def test_a_warm_up_that_is_given_is_taken(given: int | None, steps: int, warmup: int) -> None:
    """Whatever part of the run it is; the default is a quarter of a run that is too short for it."""
    settings = {"steps": steps} if given is None else {"steps": steps, "warmup": given}
    assert FaceConfig.load(settings).warmup_steps() == warmup
