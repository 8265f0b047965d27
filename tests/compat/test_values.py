"""Values of a config: what DeepSpeed takes for a value of a type is taken; what changes nothing is said."""

from __future__ import annotations

import base64
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from shardfold.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, read, said
from shardfold.compat.deepspeed.config_keys import KEYS
from shardfold.compat.deepspeed.config_source import load


def nested(path: str, value: Any) -> dict[str, Any]:
    """A config with this key, and a batch size."""
    config: Any = value
    for name in reversed(path.split(".")):
        config = {name: config}
    return {"train_batch_size": 8, **config}


STAGE, BUCKET = "zero_optimization.stage", "zero_optimization.reduce_bucket_size"

# As DeepSpeed 0.19.8 reads them: the sections that it checks are pydantic models.
TAKEN: list[tuple[str, Any, Any]] = [
    *(("fp16.enabled", value, True) for value in (1, 1.0, "true", "TRUE", "yes", "on", "T", "1", "y")),
    *(("fp16.enabled", value, False) for value in (0, 0.0, "False", "no", "off", "f", "0", "N")),
    ("zero_optimization.overlap_comm", "true", True),
    (STAGE, "2", 2),
    (STAGE, 2.0, 2),
    (STAGE, "2.0", 2),
    (BUCKET, "1000", 1000),
    (BUCKET, "5.0", 5),
    (BUCKET, 5e8, 500_000_000),
    ("fp16.loss_scale", "128", 128),
    ("fp16.loss_scale_window", "100", 100),
    ("zero_optimization.leaf_module.classes", "torch.nn.Linear", ["torch.nn.Linear"]),
    ("zero_optimization.leaf_module.names", ("a", "b"), ["a", "b"]),
    ("csv_monitor.enabled", "false", False),
    ("comms_logger.enabled", 1, True),
    ("wall_clock_breakdown", 1, True),
    ("dataloader_drop_last", 0, False),
    ("gradient_allreduce_op", "SUM", "sum"),
    ("communication_data_type", "BF16", "bf16"),
    # It keeps these as strings, which fails where they are used.
    ("gradient_clipping", "0.5", 0.5),
    ("steps_per_print", "5", 5),
    ("steps_per_print", "inf", math.inf),
    ("wall_clock_breakdown", "false", False),
    ("comms_logger.prof_ops", "all_reduce", ["all_reduce"]),
]


@pytest.mark.parametrize("path, given, value", TAKEN)
def test_what_stands_for_a_value_is_taken_for_it(path: str, given: Any, value: Any) -> None:
    """The effective value is of its type; the dict that was given stays as it is."""
    config = nested(path, given)
    settings = read(config)
    assert settings[path] == value and type(settings[path]) is type(value)
    assert settings.raw is config and config == nested(path, given)


@pytest.mark.parametrize(
    "path, given",
    [
        *(("fp16.enabled", value) for value in (2, "x", -1, 0.5, [], "")),
        *((BUCKET, value) for value in ("many", 5.5, "5.5", True, "nan", "inf", -1, 0, [5])),
        *(("fp16.loss_scale_window", value) for value in (True, "x", math.inf)),
        ("fp16.loss_scale", True),
        (STAGE, "two"),
        (STAGE, 5),
        ("zero_optimization.leaf_module.classes", 3),
        ("csv_monitor.job_name", 5),
    ],
)
def test_what_stands_for_nothing_is_an_error(path: str, given: Any) -> None:
    """One sentence with the key and the value."""
    with pytest.raises(DeepSpeedConfigError) as error:
        read(nested(path, given))
    assert path in str(error.value) and str(given) in str(error.value) and "\n" not in str(error.value)


def test_a_section_is_off_in_every_form_of_false() -> None:
    """What is switched off is neither noted nor refused."""
    for off in (False, 0, "false", "off"):
        assert not [
            note for note in read(nested("autotuning", {"enabled": off, "fast": 1})).notes if "auto" in note.key
        ]
        assert read(nested("hybrid_engine", {"enabled": off})).train_batch_size == 8
    for on in (1, "true"):
        with pytest.raises(DeepSpeedConfigError, match="hybrid_engine"):
            read(nested("hybrid_engine", {"enabled": on}))


def test_arguments_of_optimizers_and_schedules_are_taken_likewise() -> None:
    """Numbers and booleans as strings, as YAML leaves ``1e-3``."""
    params = {"lr": "1e-3", "betas": ["0.9", 0.99], "weight_decay": "0", "adam_w_mode": "false"}
    settings = read(
        {
            **nested("optimizer", {"type": "Adam", "params": params}),
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "10", "warmup_max_lr": ["1e-3", 2]}},
        }
    )
    assert settings.optimizer == (
        "Adam", {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0, "adam_w_mode": False},
    )  # fmt: skip
    assert settings.scheduler == ("WarmupLR", {"warmup_num_steps": 10, "warmup_max_lr": [1e-3, 2]})


HJSON = """
# a config
train_batch_size: 8
zero_optimization: {
  stage: 2  // a number
  overlap_comm: true
}
csv_monitor: {
  enabled: false
  job_name: a run of mine
}
"""


def test_a_config_may_be_hjson(tmp_path: Path) -> None:
    """By its name, in any file, and in base64: DeepSpeed reads every config as HJSON."""
    for name in ("ds.hjson", "ds.json"):
        path = tmp_path / name
        path.write_text(HJSON)
        settings = read(path)
        assert settings.stage == 2 and settings["csv_monitor.job_name"] == "a run of mine"
    assert DeepSpeedConfig(base64.urlsafe_b64encode(HJSON.encode()).decode()).zero_optimization_stage == 2


@pytest.mark.parametrize(
    "name, text, words",
    [
        # HJSON takes the rest of the line for a string.
        ("ds.json", '{"train_batch_size": 8 "fp16": {"enabled": true}}', "not JSON.*delimiter at line 1, column 24"),
        ("ds.json", "", "not JSON.*line 1"),
        ("ds.json", "{fp16: {enabled: true, enabled: false}}", "'enabled' more than once"),
        ("ds.hjson", "fp16: {enabled: true", "an object"),
        ("ds.hjson", "{fp16", "not HJSON.*line 1"),
        ("ds.hjson", "fp16: {\n enabled: true\n enabled: false\n}", "'enabled' more than once"),
        ("ds.hjson", "fp16: 7", "fp16 is 7: it is a section"),
    ],
)
def test_what_is_neither_is_one_sentence(tmp_path: Path, name: str, text: str, words: str) -> None:
    """A slip in JSON is told as such, with its place, although HJSON reads it as something else."""
    (tmp_path / name).write_text(text)
    with pytest.raises(DeepSpeedConfigError, match=words) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_hjson_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON is read without it."""
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "ds.hjson").write_text(HJSON)
    (tmp_path / "bad.json").write_text(HJSON)
    assert read(tmp_path / "ds.json").train_batch_size == 8
    with pytest.raises(DeepSpeedConfigError, match="pip install hjson"):
        read(tmp_path / "ds.hjson")
    with pytest.raises(DeepSpeedConfigError, match="not JSON"):
        read(tmp_path / "bad.json")


IDLE: list[tuple[str, dict[str, Any], str]] = [
    ("Adam", {"fp32_optimizer_states": False}, "fp32_optimizer_states"),
    ("AdamW", {"fp32_optimizer_states": False}, "fp32_optimizer_states"),
    ("Lion", {"fp32_optimizer_states": "false"}, "fp32_optimizer_states"),
    ("Adam", {"bias_correction": False, "foreach": True}, "foreach"),
    ("Adam", {"bias_correction": False, "fused": False}, "fused"),
    ("Muon", {"torch_adam": True}, "torch_adam"),
    ("Muon", {"ns_method": "gram"}, "ns_method"),
]


@pytest.mark.parametrize("kind, params, name", IDLE)
def test_arguments_without_effect_are_noted(kind: str, params: dict[str, Any], name: str) -> None:
    """At start, with the reason; values that ask for nothing are not."""
    notes = read(nested("optimizer", {"type": kind, "params": params})).notes
    assert f"optimizer.params.{name} = " in said(notes)
    quiet = {"fp32_optimizer_states": True, "torch_adam": False, "ns_method": "standard"}
    keys = {key: value for key, value in quiet.items() if key == name}
    notes = read(nested("optimizer", {"type": kind, "params": keys})).notes
    assert not [note for note in notes if note.key.startswith("optimizer.params")]


@pytest.mark.parametrize(
    "config, words",
    [
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "'sum'.*not supported with ZeRO stage 3"),
        ({"zero_optimization": {"stage": 3, "compute_grad_norm": False}}, "only with ZeRO stage 1 or 2"),
        ({"zero_optimization": {"stage": 0, "compute_grad_norm": 0}}, "only with ZeRO stage 1 or 2"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "[Pp]artial offl"),
        (
            {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 1, "overlap_comm": True}},
            "overlap_c",
        ),
    ],
)
def test_what_a_stage_does_not_have_is_refused(config: dict[str, Any], words: str) -> None:
    """As in DeepSpeed, whose errors are a ValueError or an AssertionError: this one is both."""
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=words):
            read({"train_batch_size": 8, **config})


def test_defaults_are_deepspeed_s() -> None:
    """Of what has no effect, too: scripts print them."""
    assert KEYS["zero_optimization.stage3_model_persistence_threshold"].default == sys.maxsize
    assert len(DeepSpeedConfig({"train_batch_size": 8}).zero_config.leaf_module.classes) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe\x00bad", "is not UTF-8 text"), (b'{"a":' * 100_000, "is nested too deeply")],
)
def test_a_config_that_no_reader_takes_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "ds.json").write_bytes(content)
    with pytest.raises(DeepSpeedConfigError, match=words):
        load(str(tmp_path / "ds.json"))
