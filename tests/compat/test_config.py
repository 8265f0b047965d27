"""DeepSpeed's JSON: every key is honoured, listed once or refused; what it becomes is what DeepSpeed documents."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardfold.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, read, said
from shardfold.compat.deepspeed.config_check import BY_NAME, SECTIONS
from shardfold.compat.deepspeed.config_hyper import OPTIMIZERS, SCHEDULERS
from shardfold.compat.deepspeed.config_keys import HONOURED, KEYS, NOTED, REFUSED
from shardfold.compat.deepspeed.config_text import effective, markdown
from shardfold.errors import ConfigError
from shardfold.numerics.scaling import Scaler
from shardfold.plan.layout import Precision
from shardfold.plan.presets import named, zero3
from shardfold.tools import cli

DOCS = Path(__file__).parents[2] / "docs" / "from-deepspeed.md"
PERSISTENT = "stage3_param_persistence_threshold"


def nested(path: str, value: Any, **more: Any) -> dict[str, Any]:
    """A config with this key, and a batch size."""
    config: dict[str, Any] = {"train_batch_size": 8, **more}
    *sections, name = path.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return config


def refused(config: Any, *words: str, **options: Any) -> str:
    """The one sentence of the error, which has these words."""
    with pytest.raises(DeepSpeedConfigError) as error:
        read(config, **options)
    text = str(error.value)
    assert not [word for word in words if word not in text], text
    assert "\n" not in text and text.endswith((".", "?"))
    return text


# -- the table


def test_the_table_of_the_docs_is_the_one_that_is_read():
    assert markdown().strip() in DOCS.read_text(encoding="utf-8"), (
        "docs/from-deepspeed.md is behind: paste what shardfold.compat.deepspeed.config_text.markdown() returns"
    )


def test_every_row_is_whole():
    for path, key in KEYS.items():
        assert path == key.path and key.kind in (HONOURED, NOTED, REFUSED) and key.why, path
        if key.choices:
            assert key.default is None or str(key.default).lower() in key.choices, path


WRONG = {
    "integer": "8.5", "number": "a lot", "boolean": "perhaps", "string": 3, "path": 3,
    "list of strings": [1], "list of integers": ["a"], "object": 3,
}  # fmt: skip


@pytest.mark.sampled(229)
@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.type != "any"])
def test_a_wrong_type_names_key_value_and_type(path: str):
    key = KEYS[path]
    refused(nested(path, WRONG[key.type]), path, repr(WRONG[key.type]), "expected a", key.type)


@pytest.mark.parametrize("section", ["", *sorted(SECTIONS)])
def test_a_misspelt_key_is_an_error_in_every_section(section: str):
    prefix = f"{section}." if section else ""
    names = [path for path in KEYS if path.startswith(prefix) and "." not in path.removeprefix(prefix)]
    for path in names[:3]:
        refused(nested(path + "x", 1), repr(path + "x"), f"Did you mean {path!r}?")


@pytest.mark.parametrize(
    "config, meant",
    [
        ({"gradient_clipp1ng": 1.0}, "gradient_clipping"),
        ({"optimzer": {}}, "optimizer"),
        ({"bfloat_16": {}}, "bf16"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stage"),
        ({"stage": 3}, "zero_optimization.stage"),
        ({"zero_optimization": {"offload_param": {"dev1ce": "cpu"}}}, "zero_optimization.offload_param.device"),
    ],
)
def test_unknown_keys_are_told_what_was_meant(config: dict[str, Any], meant: str):
    refused({"train_batch_size": 8, **config}, f"Did you mean {meant!r}?")


def test_a_key_under_two_names_is_an_error():
    config = nested("zero_optimization.prefetch_bucket_size", 5)
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 5
    refused(config, "two names")


@pytest.mark.sampled(127)
@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.kind == NOTED])
def test_keys_without_effect_are_listed_with_the_reason(path: str):
    key = KEYS[path]
    candidates = {"boolean": (True, False), "integer": (7,), "number": (0.5,), "path": ("/x",), "any": (["a"],)}
    candidates |= {"list of strings": (["a"],), "object": ({"a": 1},), "string": key.choices or ("x",)}
    value = next(value for value in candidates[key.type] if value not in key.off) if path not in QUIET else None
    stage = {"zero_optimization": {"stage": 3}}  # for which some of them are only
    notes = read(nested(path, value, **stage if path.startswith("zero_optimization.") else {})).notes
    found = [note for note in notes if note.key == path]
    if path in QUIET:
        assert not found
        return
    assert [(note.value, note.why) for note in found] == [(value, key.why)]
    assert path in said(notes) and key.why in said(notes)


QUIET = {path for path, key in KEYS.items() if key.kind == NOTED and True in key.off and False in key.off}
"""Switches whose both positions are what happens anyway."""


@pytest.mark.parametrize("path", [path for path, key in KEYS.items() if key.kind == REFUSED])
def test_what_would_change_the_training_is_refused(path: str):
    key = KEYS[path]
    on = {key.switch: 2 if "size" in key.switch else True} if key.switch else {"x": 1}
    value = {"boolean": True, "integer": 2, "object": on, "any": on, "string": "sum", "list of strings": ["autosp"]}
    refused(nested(path, value[key.type]), path, key.why)
    for harmless in key.off:  # what asks for nothing
        assert read(nested(path, harmless)).train_batch_size == 8
    if key.switch:
        assert read(nested(path, {key.switch: False})).train_batch_size == 8


def test_every_refusal_is_in_one_error():
    refused(nested("amp", {"enabled": True}, eigenvalue={"enabled": True}), "amp = ", "eigenvalue = ")
    assert read(nested("amp", {"enabled": False})).notes


def test_a_section_that_is_off_is_not_listed():
    assert not [
        note for note in read(nested("autotuning", {"enabled": False, "fast": True})).notes if "auto" in note.key
    ]


def test_dotted_keys_are_listed_as_read_by_nobody():
    notes = read(nested("zero_optimization.stage", 3, **{"zero_optimization.reduce_bucket_size": 1.5})).notes
    assert "zero_optimization.reduce_bucket_size" in [note.key for note in notes]


# -- the batch triad


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sets(st.sampled_from(range(3)), min_size=1))
def test_any_two_numbers_give_the_third(micro: int, accumulate: int, ranks: int, known: set[int]):
    whole = (micro * accumulate * ranks, micro, accumulate)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {names[i]: whole[i] for i in known}
    if known == {2}:
        refused(config, "neither", world_size=ranks)
        return
    got = read(config, world_size=ranks)
    if known == {0}:
        whole = (whole[0], micro * accumulate, 1)
    elif known == {1}:
        whole = (micro * ranks, micro, 1)
    assert (got.train_batch_size, got.micro_batch, got.accumulate) == whole
    assert {got.origins[name] for name in config} == {"given"}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 99), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_numbers_that_do_not_multiply_up_are_all_named(train: int, micro: int, accumulate: int, ranks: int):
    config = {
        "train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulate,
    }  # fmt: skip
    if train == micro * accumulate * ranks:
        assert read(config, world_size=ranks).accumulate == accumulate
        return
    text = refused(config, f"{ranks} ranks (as given)", str(micro * accumulate * ranks), world_size=ranks)
    assert all(f"{name} = {number} (given)" in text for name, number in config.items())


def test_a_batch_that_does_not_divide_is_an_error():
    refused({"train_batch_size": 7}, "7 is not a multiple of 1 x 2", world_size=2)
    refused({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4}, "2 is not a multiple of 4 x 1", world_size=1)


def test_the_number_of_ranks_is_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert read({"train_batch_size": 8}).micro_batch == 2
    refused({"train_batch_size": 6}, "from WORLD_SIZE")


# -- the batch that most numbers of ranks can train with

ELASTIC = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 3], "max_gpus": 16}


def test_elastic_batches_are_those_of_deepspeed():
    """As `benchmarks/deepspeed_elasticity.py` recorded them; what has no batch there is refused."""
    cases = json.loads((DOCS.parents[1] / "tests" / "golden" / "deepspeed_elasticity.json").read_text())["cases"]
    for section, ranks, answer in cases:
        if answer is None:
            refused({"elasticity": section}, "elasticity", world_size=ranks)
            continue
        got = read({"elasticity": section}, world_size=ranks)
        assert [got.train_batch_size, got.micro_batch] == answer, (section, ranks)
        assert got.train_batch_size == got.micro_batch * got.accumulate * ranks


def test_an_elastic_batch_is_the_same_on_every_number_of_ranks_that_it_is_for():
    """And no number of ranks is left out that a micro-batch allows."""
    counts = [1, 2, 3, 4, 6, 8, 12, 16]
    assert counts == [n for n in range(1, 17) if 96 % (2 * n) == 0 or 96 % (3 * n) == 0]
    section = {**ELASTIC, "version": 0.1}
    for ranks in range(1, 17):
        if ranks in counts:
            got = read({"elasticity": section}, world_size=ranks)
            assert got.train_batch_size == 96 and got.micro_batch in (2, 3)
            assert "96 samples, on 1, 2, 3, 4, 6, 8, 12 or 16 ranks alike" in said(got.notes)
            assert got.origins["train_batch_size"] == "derived" and got["elasticity.enabled"]
        else:
            refused({"elasticity": section}, "no batch for", "1, 2, 3, 4, 6, 8, 12 or 16 ranks", world_size=ranks)


@pytest.mark.parametrize(
    "section, beside, words",
    [
        ({}, {"train_batch_size": 8}, ("chooses", "train_batch_size is given", "ignore_non_elastic_batch_info")),
        ({"max_train_batch_size": None}, {}, ("elasticity.max_train_batch_size is not given",)),
        ({"micro_batch_sizes": []}, {}, ("elasticity.micro_batch_sizes is not given",)),
        ({"micro_batch_sizes": [2, 0]}, {}, ("[2, 0]", "1 at least", "100 at most")),
        ({"micro_batch_sizes": [60], "num_gpus_per_node": 2}, {}, ("50 at most", "one rank of each node")),
        ({"version": 0.15}, {}, ("0.15", "0.1 and 0.2")),
        ({"min_gpus": 17}, {}, ("min_gpus is 17", "max_gpus 16")),
        ({"model_parallel_size": 2}, {}, ("model_parallel_size = 2", "twice")),
        ({"min_gpu": 2}, {}, ("Did you mean 'elasticity.min_gpus'?",)),
        ({"max_train_batch_size": 12}, {}, ("12 samples are too few for them",)),
    ],
)
def test_an_elastic_section_that_cannot_be(section: dict[str, Any], beside: dict[str, Any], words: tuple[str, ...]):
    refused({"elasticity": {**ELASTIC, **section}, **beside}, *words, world_size=13)


def test_sizes_beside_an_elastic_section_are_passed_over_if_it_says_so():
    config = {"train_batch_size": 7, "elasticity": {**ELASTIC, "ignore_non_elastic_batch_info": True}}
    got = read(config, world_size=2)
    assert got.train_batch_size == 96 and "train_batch_size = 7" in said(got.notes)


# -- auto, and where a config comes from


def test_auto_is_an_error_at_initialize_and_absent_before():
    config = nested("optimizer", {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}, fp16={"enabled": "auto"})
    config |= {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    text = refused(config, "train_batch_size", "optimizer.params.lr", "fp16.enabled")
    assert "zero_optimization.reduce_bucket_size" in text and "eps" not in text
    early = read(config, early=True)
    assert early.stage == 3 and early.raw is config and early.optimizer == ("AdamW", {"eps": 1e-6})
    assert early.train_batch_size is None and early.precision.compute == "fp32"
    refused(nested("zero_optimization.stge", "auto"), "stge", early=True)


def test_a_file_may_have_comments_and_infinity(tmp_path: Path):
    path = tmp_path / "ds.json"
    path.write_text('{\n // one\n "train_batch_size": 8, # two\n /* three */ "steps_per_print": Infinity,\n'
                    ' "csv_monitor": {"output_path": "a//b#c,}"},\n}')  # fmt: skip
    for given_as in (path, str(path)):
        got = read(given_as)
        assert got.steps_per_print == float("inf") and got["csv_monitor.output_path"] == "a//b#c,}"


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"train_batch_size": 8,\n "fp16" {}}', ("not JSON", "line 2", "column 9")),
        ('{"train_batch_size": 8, "fp16": {"enabled": true, "enabled": false}}', ("'enabled'", "more than once")),
        ("[1, 2]", ("JSON list", "an object")),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, words: tuple[str, ...]):
    path = tmp_path / "ds.json"
    path.write_text(text)
    refused(path, str(path), *words)


def test_a_config_may_come_in_base64():
    text = json.dumps({"train_batch_size": 8, "csv_monitor": {"job_name": "ÿ?>"}})
    got = read(base64.urlsafe_b64encode(text.encode()).decode())
    assert got.train_batch_size == 8 and got["csv_monitor.job_name"] == "ÿ?>"
    refused(base64.urlsafe_b64encode(b'{"train_batch_size": }').decode(), "base64", "column 22")


@pytest.mark.parametrize("config, word", [("no/such.json", "no config file"), (7, "int"), (None, "NoneType")])
def test_what_is_no_config_is_told(config: Any, word: str):
    refused(config, word)


def test_the_error_is_also_what_scripts_catch():
    for kind in (ConfigError, ValueError, AssertionError):
        with pytest.raises(kind):
            read({})


def test_reading_imports_no_torch():
    code = (
        "import sys; from shardfold.compat.deepspeed.config import read\n"
        "read({'train_batch_size': 8, 'fp16': {'enabled': True}, 'optimizer': {'type': 'Adam', 'params': {}}})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- precision


@pytest.mark.parametrize(
    "stage, sections, wanted",
    [
        (0, {}, Precision()),
        (2, {"bf16": {"enabled": True}}, Precision(compute="bf16")),
        (2, {"bfloat16": {"enabled": True}}, Precision(compute="bf16")),
        (1, {"fp16": {"enabled": True}, "bf16": {"enabled": False}}, Precision(compute="fp16")),
        (3, {"bf16": {"enabled": True}, "communication_data_type": "bf16"}, Precision(compute="bf16", reduce="bf16")),
        (1, {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
         Precision(compute="bf16", grads="bf16", reduce="bf16")),
        (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
         Precision(compute="bf16", grads="bf16", reduce="bf16")),
        (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"},
         Precision(compute="bf16")),
        (2, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}, "fp32_allreduce": True},
         Precision(compute="bf16", grads="bf16")),
        (2, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
         Precision(compute="bf16", grads="bf16", reduce="bf16", master="bf16", moments="bf16")),
        (1, {"torch_autocast": {"enabled": True}}, Precision(autocast="bf16")),
        (1, {"torch_autocast": {"enabled": True, "dtype": "float16"}}, Precision(autocast="fp16")),
        (1, {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
         Precision(compute="bf16", buffers="compute")),
    ],
)  # fmt: skip
def test_precision(stage: int, sections: dict[str, Any], wanted: Precision):
    """And inputs and outputs keep the dtype that they have, as DeepSpeed casts none."""
    kept = replace(wanted, inputs="own", outputs="compute")
    assert read(nested("zero_optimization.stage", stage, **sections)).precision == kept


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_inputs_are_cast_under_auto_cast_of_fp16_only(mode: str):
    sections = {"fp16": {"enabled": mode == "fp16", "auto_cast": True}, "bf16": {"enabled": mode == "bf16"}}
    assert read({"train_batch_size": 8, **sections}).precision.inputs == ("compute" if mode == "fp16" else "own")


@pytest.mark.parametrize(
    "sections, word",
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"fp16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16.bf16_optimizer_states is not"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}, "stage 0"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_master_weights_and_grads"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale"),
        ({"communication_data_type": "int8"}, "communication_data_type"),
    ],
)
def test_precision_that_contradicts_itself(sections: dict[str, Any], word: str):
    refused({"train_batch_size": 8, **sections}, word)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.lists(st.booleans(), max_size=60))
def test_dynamic_loss_scales_are_deepspeeds(window: int, hysteresis: int, refill: bool, overflows: list[bool]):
    """DeepSpeed: the scale doubles in an update before which a multiple of the window, not 0, had gone well since the
    last overflow; an overflow halves it once the hysteresis, refilled then, is used up."""
    section = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": window, "hysteresis": hysteresis}
    got = read(nested("fp16", section | {"consecutive_hysteresis": refill, "min_loss_scale": 2}))
    assert got.loss_scale is not None
    scaler = Scaler(got.loss_scale)
    scale, left, good = 2.0**20, hysteresis, 0
    for overflow in overflows:
        scaler.update(overflow)
        if overflow:
            scale, left, good = (max(scale / 2, 2.0), left, 0) if left == 1 else (scale, left - 1, 0)
        else:
            left = hysteresis if refill else left
            if good and good % window == 0:
                scale, left = scale * 2, hysteresis
            good += 1
        assert scaler.scale == scale


def test_a_dynamic_scale_at_its_floor_ends_the_run_and_a_static_one_stays():
    rule = read(nested("fp16", {"enabled": True, "initial_scale_power": 1, "hysteresis": 2})).loss_scale
    assert rule is not None
    scaler = Scaler(rule)
    for scale, exhausted in ((2.0, False), (1.0, False), (1.0, True)):
        scaler.update(True)
        assert (scaler.scale, scaler.exhausted) == (scale, exhausted)
    static = read(nested("fp16", {"enabled": True, "loss_scale": 128.0})).loss_scale
    assert static is not None and (static.initial, static.growth, static.backoff) == (128.0, 1.0, 1.0)
    assert read(nested("bf16", {"enabled": True, "check_grad_overflow": False})).loss_scale is None


# -- layout, clipping, notes


@pytest.mark.parametrize("stage, layout", [(0, "ddp"), (1, "zero1"), (2, "zero2"), (3, "zero3")])
def test_stages_are_layouts(stage: int, layout: str):
    assert read(nested("zero_optimization.stage", stage)).layout == layout


def test_other_forms_of_zero_optimization():
    assert read({"train_batch_size": 8}).layout == "ddp"
    assert read({"train_batch_size": 8, "zero_optimization": True}).layout == "zero1"
    assert read({"train_batch_size": 8, "zero_optimization": False}).layout == "ddp"
    refused(nested("zero_optimization.stage", 4), "stage is 4")
    older = read(nested("zero_optimization", {"stage": 2, "cpu_offload": True}))
    assert older["zero_optimization.offload_optimizer.device"] == "cpu" and set(older.offload.values()) == {"host"}
    refused(nested("zero_optimization.offload_optimizer.device", "gpu"), "'none', 'cpu', 'nvme'")


def test_groups_of_ranks_are_a_mesh():
    config = nested("zero_optimization", {"stage": 3, "zero_hpz_partition_size": 2})
    got = read(config, world_size=4)
    assert (got.layout, got.mesh) == ("hpz", {"intra": 2})
    refused(config, "does not divide the 1 ranks", world_size=1)
    mics = read(nested("zero_optimization", {"stage": 3, "mics_shard_size": 4}), world_size=8)
    assert (mics.layout, mics.mesh) == ("hsdp", {"intra": 4})
    assert "the stage is 0" in said(read(nested("zero_optimization.zero_hpz_partition_size", 2)).notes)


def test_zeropp_is_formats_of_the_table():
    quantized = {"zero_quantized_weights": True, "zero_quantized_gradients": True, PERSISTENT: 0}
    got = read(nested("zero_optimization", {"stage": 3, "zero_hpz_partition_size": 2, **quantized}), world_size=4)
    assert got.table == named("zeropp") and got.mesh == {"intra": 2}
    loco = {**quantized, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    got = read(nested("zero_optimization", {"stage": 3, **loco}))
    assert got.table == zero3.replace(gather="int8x2", reduce="int4x2+error") and "err_beta" in said(got.notes)
    got = read(nested("zero_optimization", {"stage": 2, **loco}))
    assert got.table == "zero2" and "it is for stage 3, and the stage is 2" in said(got.notes)
    assert all(name in said(got.notes) for name in loco if name != PERSISTENT)
    alone = read(nested("zero_optimization", {"stage": 3, PERSISTENT: 0, "zeropp_loco_param": {"err_beta": 0.8}}))
    assert alone.table == "zero3" and "zero_quantized_gradients, which is not set" in said(alone.notes)


def test_timing():
    assert read(nested("zero_optimization", {"overlap_comm": False})).overlap.reduces_in_flight == 0
    assert read(nested("zero_optimization", {"stage3_prefetch_bucket_size": 0})).overlap.prefetch == 0
    assert read(nested("zero_optimization", {"overlap_comm": True})).overlap == read({"train_batch_size": 1}).overlap


def test_defaults_that_surprise_are_said():
    got = read(nested("scheduler", {"type": "WarmupLR", "params": {}}))
    assert got.clip_norm == 1.0
    assert [note.key for note in got.notes] == ["gradient_clipping", "scheduler.params.warmup_type"]
    quiet = nested("scheduler", {"type": "WarmupLR", "params": {"warmup_type": "linear"}}, gradient_clipping=0)
    assert read(quiet).clip_norm is None and not read(quiet).notes and said(read(quiet).notes) == ""


def test_what_clients_send_is_read():
    """The dict that a client hands over, with its null paths, its disabled fp16 and its infinite steps_per_print."""
    none = {"device": "none", "nvme_path": None}
    zero = {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 1024,
        "stage3_prefetch_bucket_size": 921, "stage3_param_persistence_threshold": 320,
        "stage3_gather_16bit_weights_on_model_save": True, "offload_optimizer": none, "offload_param": none,
    }  # fmt: skip
    got = read(nested("zero_optimization", zero, gradient_accumulation_steps=2, gradient_clipping=1.0,
                      bf16={"enabled": True}, fp16={"enabled": False, "auto_cast": True},
                      zero_allow_untested_optimizer=True, steps_per_print=float("inf")))  # fmt: skip
    assert got.gather_16bit_on_save and got.micro_batch == 4 and got.precision.compute == "bf16"
    assert {note.key.rpartition(".")[2] for note in got.notes} == {
        "reduce_bucket_size", "stage3_prefetch_bucket_size",
    }  # fmt: skip
    assert got.table == zero3.edit("params", small=320)


def test_small_parameters_stay_whole_at_stage_3_only():
    """By DeepSpeed's default those of 100,000 elements or fewer, by its older name too."""
    for zero, small in (({}, 100_000), ({PERSISTENT: 7}, 7), ({"param_persistence_threshold": 1e4}, 10_000)):
        assert read(nested("zero_optimization", {"stage": 3, **zero})).table == zero3.edit("params", small=small)
    assert read(nested("zero_optimization", {"stage": 3, PERSISTENT: 0})).table == "zero3"
    assert read(nested("zero_optimization", {"stage": 2, PERSISTENT: 7})).table == "zero2"


# -- optimizer and scheduler


@pytest.mark.parametrize(
    "section, words",
    [
        ({"type": "AdaW"}, ("'AdaW'", "Did you mean 'AdamW'?")),
        ({"type": "LBFGS"}, ("LBFGS", "refused")),
        ({"type": "Adam", "params": {"lrr": 1}}, ("optimizer.params.lrr", "Did you mean 'lr'?")),
        ({"type": "Adam", "params": {"lr": "fast"}}, ("optimizer.params.lr", "'fast'", "a number")),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, ("optimizer.params.betas", "pair of numbers")),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, ("max_grad_norm", "gradient_clipping")),
        ({"params": {"lr": 1}}, ("optimizer.type",)),
    ],
)
def test_optimizers_that_are_not_known(section: dict[str, Any], words: tuple[str, ...]):
    refused(nested("optimizer", section), *words)


def test_types_are_found_in_any_letter_case():
    for section, known in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        for name in known:
            got = read(nested(section, {"type": name.lower(), "params": {}}))
            assert getattr(got, section) == (name, {})
    assert read(nested("scheduler", {"type": "StepLR", "params": {"step_size": 2}})).scheduler[0] == "StepLR"  # pyright: ignore
    refused(nested("scheduler", {"type": "WarmpLR"}), "Did you mean 'WarmupLR'?")


# -- as clients see it, and as text


def test_deepspeed_config_has_the_documented_attributes():
    config = DeepSpeedConfig(
        nested("zero_optimization", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, bf16={"enabled": True},
               optimizer={"type": "Adam", "params": {"lr": 1.0}}, gradient_accumulation_steps=2)
    )  # fmt: skip
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (
        8,
        4,
        2,
    )
    assert config.zero_enabled and config.zero_optimization_stage == config.zero_config.stage == 2
    assert config.zero_config.offload_optimizer.device == "cpu" and config.zero_config.offload_param is None
    assert config.zero_config.prefetch_bucket_size == 50_000_000
    assert config.bfloat16_enabled and not config.fp16_enabled and config.bfloat16_config.enabled
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == ("adam", {"lr": 1.0}, None)
    assert config.gradient_clipping == 1.0 and config.steps_per_print is None and not config.monitor_config.enabled
    assert not config.comms_config.comms_logger_enabled and not config.comms_config.comms_logger.enabled
    for unknown in ("nothing", "settingz"):
        with pytest.raises(AttributeError, match=unknown):
            getattr(config, unknown)
    with pytest.raises(AttributeError, match="stage"):
        _ = config.zero_config.stge


def test_every_effective_value_has_an_origin():
    text = effective(read({"train_batch_size": 8, "flops_profiler": {"enabled": True}}, world_size=2))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["train_batch_size"] == ["8", "given"]
    assert rows["train_micro_batch_size_per_gpu"] == ["4", "derived"]
    assert rows["gradient_accumulation_steps"] == ["1", "default"]
    assert rows["wall_clock_breakdown"] == ["true", "derived"]
    assert {path for path, key in KEYS.items() if key.kind == HONOURED} <= set(rows)


def test_explain_shows_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(nested("zero_optimization", {"stage": 3, "mics_shard_size": 2, "reduce_bucket_size": 5e8}))
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", "--config", str(path), "--ranks", "4"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    for word in (
        "layout hsdp",
        "mesh: inter=2 x intra=2",
        "gradient_clipping",
        "default",
        KEYS["zero_optimization.reduce_bucket_size"].why,
    ):
        assert word in out
    path.write_text('{"train_batch_size": 8, "amp": {"enabled": true}}')
    with pytest.raises(SystemExit) as end:
        cli.main(["explain", "--config", str(path)])
    assert end.value.code == 2 and "amp" in capsys.readouterr().err


def test_names_of_the_table_are_unique():
    assert len(BY_NAME) == sum(1 + len(key.aliases) for key in KEYS.values())
