"""Every setting of every recipe goes from a form into a file and a command, from there into a run, and back."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardfold.errors import ConfigError
from shardfold.tools.board._recipe_worker import checked
from shardfold.tools.board.recipe_forms import RecipeForm
from shardfold.tools.observe.trackers import TRACKERS
from shardfold.tools.recipes.lm import resolved
from shardfold.tools.recipes.train_config import TrainConfig, read_settings
from shardfold.tools.tune.config import TuneConfig, from_options
from tests.tools.board.support import AskedBoard, Client, board_process

TEXTS: dict[str, list[str]] = {
    "size": ["tiny", "small"],
    "gather": ["bf16", "int8"],
    "reduce": ["bf16", "int8"],
    "offload": ["host", "disk", "optimizer=host"],
    "order": ["gpipe", "interleaved:2"],
    "memory": ["8GiB", "500MB"],
    "peak_flops": ["312e12", "1e12"],
    "track": ["tensorboard", "wandb,mlflow"],
    "far": ["0.1,0.01"],
    "backbone": ["vit", "timm:resnet18"],
    "base.format": ["nf4/64", "int8/64"],
    "text.template": ["chatml", "a template.jinja"],
    "text.rope": ["yarn:4", "linear:2.5"],
    "adapter.targets": ["q_proj,v_proj", "all-linear"],
    "adapter.modules": ["embed_tokens", "lm_head"],
    "reward": ["rewards.py:has_word"],
}
PATHS = ["rows.jsonl", "a folder/with 'quotes' and \"more\"/ü.txt", "-x", "C:\\x"]


OF_KIND = {
    "adapter.pre_seq_len": {"adapter.kind": "prefix"},
    "adapter.layers": {"adapter.kind": "freeze"},
}
"""What chooses the adapter that a setting is of."""


def drawn(field: dict[str, Any], rng: random.Random, form: RecipeForm) -> Any:
    """A value as a form sends it: most are text."""
    kind, least, most = field["kind"], field["least"], field["most"]
    if kind == "bool":
        return not field["default"]
    if kind == "choice":
        return str(rng.choice(field["choices"]))
    if kind in ("int", "max"):
        low = int(least if least is not None else 1)
        return (
            "max" if kind == "max" and rng.random() < 0.3 else str(rng.randint(low + 1, int(min(most or 40, low + 40))))
        )
    if kind == "float":
        low = float(least or 0.0)
        return f"{rng.uniform(low + 1e-3, min(most if most is not None else low + 2, low + 2) - 1e-3):.4g}"
    if kind == "path":
        return rng.choice(PATHS)
    if kind == "rows":
        return ",".join(rng.sample(PATHS, rng.randint(1, 2)))
    if field["name"] == "size" and form.recipe == "face":
        return rng.choice(["48x32", "64"])
    return rng.choice(TEXTS[field["name"]])


@pytest.mark.parametrize("recipe", RecipeForm.names())
def test_each_setting_comes_back(recipe: str, tmp_path: Path) -> None:
    """Alone: what a form sends is what its file says, what its command says, and what the run's settings show."""
    form, rng = RecipeForm(recipe), random.Random(recipe)
    kinds = {field["name"]: field["kind"] for field in form.told()}
    for field in form.told():
        value = drawn(field, rng, form)
        if str(value) == str(field["default"]):
            continue
        value = _plain(value) if kinds[field["name"]] in ("int", "float", "max") else value
        given = {field["name"]: value, **OF_KIND.get(field["name"], {})}
        nested = form.nested(given)
        path = tmp_path / "run.toml"
        path.write_text(form.toml(nested), encoding="utf-8")
        read = read_settings(path)
        assert read.pop("recipe", recipe) == recipe
        assert form.form_values(read) == form.form_values(nested), field
        shown = form.form_values(read)
        assert {name: str(each) for name, each in shown.items()} == {name: str(each) for name, each in given.items()}
        words = form.command(nested)
        assert words is not None and words[: len(form.words)] == list(form.words)
        options = [re.fullmatch(r"--(no-)?([a-z-]+)(?:=(.*))?", word, re.DOTALL) for word in words[len(form.words) :]]
        said = {}
        for option in options:
            assert option is not None, words
            no, name, text = option.groups()
            said[name.replace("-", "_")] = text if text is not None else not no
        made = from_options(form.settings, said) if issubclass(form.settings, TuneConfig) else said
        back = form.form_values(form.nested(_flat(made)))
        assert {name: str(each) for name, each in back.items() if name in given} == {
            name: str(each) for name, each in given.items()
        }, (words, made)


def _plain(value: Any) -> Any:
    """Numbers as they are read: 0.10 is 0.1."""
    try:
        return (
            int(value) if re.fullmatch(r"\d+", str(value)) else float(value) if "." in value or "e" in value else value
        )
    except (ValueError, TypeError):
        return value


def _flat(made: dict[str, Any]) -> dict[str, Any]:
    return {
        (f"{name}.{inner}" if inner else name): each
        for name, value in made.items()
        for inner, each in (value.items() if isinstance(value, dict) else [("", value)])
    }


BESIDE: dict[str, dict[str, str]] = {
    "adapter.prefix_projection": {"adapter.kind": "prefix", "adapter.pre_seq_len": "4"},
    "attention": {"sequence": "2"},
    "base.bits": {"adapter.rank": "8"},
    "base.format": {"adapter.rank": "8"},
    "d_model": {"heads": "1"},
    "eval_every": {"eval_data": "held-out.jsonl"},
    "expert": {"experts": "80", "expert": "2"},
    "galore_every": {"optimizer": "galore"},
    "galore_rank": {"optimizer": "galore"},
    "galore_scale": {"optimizer": "galore"},
    "heads": {"heads": "8"},
    "keep": {"save_every": "2"},
    "matrix_lr": {"optimizer": "muon"},
    "memory": {"micro_batch": "max"},
    "order": {"pipeline": "2"},
    "peak_flops": {"peak_flops": "12500000.5"},
    "sequence_parallel": {"tensor": "2"},
    "tensor": {"tensor": "2"},
    "width": {"width": "128"},
}
"""What a setting has an effect with, or the value that it is given where one that is drawn does not fit."""
OF_RECIPE: dict[str, dict[str, str]] = {
    "lm": {},
    "face": {},
    "distill": {"teacher": "large"},
    "grpo": {"reward": "rewards.py:has_word"},
    "ppo": {"reward": "rewards.py:has_word", "reference": "copy"},
}


@pytest.mark.parametrize("recipe", RecipeForm.names())
def test_each_setting_is_in_the_form_that_a_run_makes(recipe: str) -> None:
    """A run that takes it, as its config.json says what it was given."""
    form, rng = RecipeForm(recipe), random.Random(recipe)
    files = {} if recipe in ("lm", "face") else {"model": "base", "data": "a.jsonl"}
    for field in form.told():
        name, value = field["name"], drawn(field, rng, form)
        if str(value) == str(field["default"]):
            continue
        beside = {**files, **OF_RECIPE.get(recipe, {}), name: value, **OF_KIND.get(name, {}), **BESIDE.get(name, {})}
        if name == "eval_every" and not files:
            del beside["eval_data"]
        if name == "top_k" and recipe == "lm":
            beside["experts"] = "80"
        if name == "beta" and recipe == "grpo":
            beside["reference"] = "copy"
        if name in ("spares", "exact"):
            beside["elastic"] = True
        if name in ("elastic", "spares") and recipe == "face":
            beside["head"] = "replicated"
        shown = form.form_values(_config(form, beside))
        if "adapter.kind" not in beside:
            shown.pop("adapter.kind", None)  # which a config.json says
        assert {each: str(it) for each, it in shown.items()} == {each: str(_plain(it)) for each, it in beside.items()}


@pytest.mark.parametrize("recipe", RecipeForm.names())
def test_what_a_form_does_not_offer_is_refused(recipe: str) -> None:
    form, offered = RecipeForm(recipe), {field["name"]: field for field in RecipeForm(recipe).told()}
    given = {"sequence": "2", "attention": "ring", "pipeline": "2", "order": "gpipe", "adapter.kind": "prefix"}
    given |= {"adapter.pre_seq_len": "4", "adapter.prefix_projection": "true"}
    assert bool(form.settings.refused) == (recipe in ("grpo", "ppo"))
    for each in form.settings.refused:
        name = each.partition("=")[0]
        assert name not in offered or given[name] not in offered[name]["choices"]
        beside = {"adapter.kind": "prefix"} if name.startswith("adapter.") else BESIDE.get(name, {})
        with pytest.raises(ConfigError, match="answers are not drawn"):
            _config(form, {"model": "base", "data": "a.jsonl", **OF_RECIPE[recipe], **beside, name: given[name]})


def _config(form: RecipeForm, given: dict[str, Any]) -> dict[str, Any]:
    """The settings as a run writes them."""
    settings = form.settings.load(form.nested(given))
    return settings.plain() if isinstance(settings, TuneConfig) else settings.model_dump(mode="json")


CASES: dict[str, dict[str, Any]] = {
    "lm": {"size": "tiny", "steps": "3", "procs": "1", "lr": "1e-3", "eval_every": "0", "save_every": "2", "keep": "3"},
    "face": {"identities": "20", "steps": "3", "procs": "1", "channels": "3", "augment": False, "size": "48x32"},
    "sft": {"adapter.rank": "8", "adapter.variant": "dora", "base.bits": "4", "text.pack": True, "text.rope": "yarn:4"},
    "dpo": {"adapter.kind": "lora", "beta": "0.2", "loss": "hinge", "lr": "1e-5", "micro_batch": "max"},
    "grpo": {
        "reward": "rewards.py:has_word",
        "n": "4",
        "adapter.kind": "freeze",
        "adapter.layers": "1",
        "epochs": "0.5",
    },
}


@pytest.mark.parametrize("recipe", CASES)
def test_what_a_run_writes_is_the_form_that_started_it(recipe: str, tmp_path: Path) -> None:
    """The settings of a run as its config.json has them, all of them, make the form again."""
    form, given = RecipeForm(recipe), dict(CASES[recipe])
    if recipe not in ("lm", "face"):
        given |= {"model": "base", "data": "a.jsonl,b.jsonl"}
    settings = form.settings.load(form.nested(given))
    shown = form.form_values(_config(form, given))
    if given.get("adapter.kind") is None and "adapter.rank" in given:
        assert shown.pop("adapter.kind") == "lora"  # which a config.json says
    assert {name: str(value) for name, value in shown.items()} == {
        name: str(_plain(value)) for name, value in given.items()
    }
    again = form.settings.load(form.nested(shown))
    assert again == settings


@pytest.mark.parametrize(
    "given",
    [
        {"size": "tiny", "steps": 20},
        {"size": "small", "steps": 300, "warmup": 20, "d_model": 768, "experts": 4, "top_k": 1},
        {"steps": 50, "warmup": 3, "context": 256},
    ],
)
def test_a_run_is_repeated_by_the_settings_that_it_was_given(given: dict[str, Any]) -> None:
    """Without those that its config.json has besides: the widths of its size, and a warm-up that is a share of it."""
    config = TrainConfig.load({"procs": 3, **given})
    run: Any = SimpleNamespace(config=config, shape=config.model_shape())
    run.engine = SimpleNamespace(world_size=3, device="cpu")
    assert RecipeForm("lm").form_values(resolved(run)) == {"procs": 3, **given}


def test_sources_that_options_cannot_name_are_kept_in_a_file() -> None:
    form = RecipeForm("sft")
    rows = [{"path": "a.jsonl", "weight": 0.5}, {"path": "b,c.jsonl"}]
    assert form.command({"model": "base", "data": rows}) is None
    assert form.shown_command({"model": "base", "data": rows}) == "shardfold tune sft --config run.toml"
    assert form.form_values({"data": [{"path": "a", "weight": 1.0, "format": None}, "b"]}) == {"data": "a,b"}
    assert form.command({"data": rows[:1], "adapter": {"kind": "prefix"}}) is None
    assert form.command({"adapter": {"kind": "prefix", "pre_seq_len": 4}}) == ["tune", "sft", "--pre-seq-len=4"]
    assert form.command({"adapter": {"kind": "lora", "layers": 3}}) is None  # which a file says, and then is refused
    assert form.command({"adapter": {}}) == ["tune", "sft", "--lora=16"]


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("lm", {"steps": "many"}, "steps", "integer"),
    ("lm", {"step": "3"}, "step", "Did you mean 'steps'"),
    ("lm", {"keep": "3"}, "keep", "--save-every"),
    ("lm", {"tensor": "3"}, "tensor", "divide"),
    ("lm", {"memory": "much", "micro_batch": "max"}, "memory", "8GiB"),
    ("lm", {"data": "/nothing/here"}, "data", "there is no file"),
    ("face", {"width": "63"}, "width", "divide"),
    ("face", {"identities": "2", "procs": "4"}, "head", "split"),
    ("sft", {"data": "a"}, "model", "there is no model"),
    ("sft", {"model": "base", "data": "a", "adapter.rank": "0"}, "adapter.rank", "greater than"),
    ("sft", {"model": "base", "data": "a", "adapter.rnk": "1"}, "adapter.rnk", "Did you mean 'rank'"),
    ("sft", {"model": "base", "data": "a", "text.noise": "loud"}, "text.noise", "number"),
    ("sft", {"model": "base", "data": "a", "base.bits": "4"}, "adapter.rank", "--lora"),
]


@pytest.mark.parametrize(("recipe", "given", "field", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_refusal_stands_at_its_field(recipe: str, given: dict[str, Any], field: str | None, words: str) -> None:
    found = checked(recipe, given)["errors"]
    assert found[0]["field"] == field and re.search(words, found[0]["sentence"]), found


def test_a_tracker_that_is_not_installed_is_refused_at_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "no_such_package", TRACKERS["wandb"])
    for recipe in ("lm", "face"):
        (error,) = checked(recipe, {"track": "no_such_package"})["errors"]
        assert error["field"] == "track" and "pip install no_such_package" in error["sentence"]


def test_each_wrong_field_is_told() -> None:
    found = checked("lm", {"steps": "x", "lr": "-1", "seed": "y", "size": "tiny"})["errors"]
    assert {each["field"] for each in found} == {"steps", "lr", "seed"}


def test_a_form_says_what_its_fields_are(tmp_path: Path) -> None:
    told = AskedBoard(tmp_path).get("/api/forms")["recipes"]
    assert list(told) == RecipeForm.names()
    for recipe, form in told.items():
        kind = RecipeForm(recipe).settings
        names = {field["name"].partition(".")[0] for field in form["fields"]}
        assert names == kind.model_fields.keys() - {"resume", "out", *kind.refused} and form["help"]
        for field in form["fields"]:
            assert field["help"] and field["group"] and (field["kind"] != "choice" or field["choices"]), field
        groups = list(dict.fromkeys(field["group"] for field in form["fields"]))
        assert len(groups) > 2 and groups[0] == "Model and data"
        sizes = next((field for field in form["fields"] if field["name"] == "size"), {"kind": "choice"})
        assert sizes["kind"] == ("text" if recipe == "face" else "choice")
    assert AskedBoard(tmp_path, read_only=True).get("/api/forms") == {"recipes": {}}


@pytest.mark.soak
def test_a_plan_says_what_fits_how_long_and_what_is_faster(tmp_path: Path) -> None:
    """By a process that has PyTorch; the rows of the command `shardfold plan` for the same run, and its peak."""
    settings = {"size": "small", "procs": "4", "steps": "100", "micro_batch": "2", "precision": "bf16"}
    (tmp_path / "runs").mkdir()
    with board_process(tmp_path / "runs", "--gpus=A100-40G") as (_, url):
        client = Client(url)
        told = client.told("/api/plan", {"recipe": "lm", "settings": settings})
        assert told["fits"] and "zero3 fits" in told["text"] and "for 100 steps" in told["text"], told
        rows = told["layouts"]
        assert {"ddp", "zero1", "zero2", "zero3"} <= {row["layout"] for row in rows}
        assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
        peaks = {row["layout"]: row["bytes"] for row in rows if row["fits"]}
        assert peaks["zero3"] < peaks["zero1"] < peaks["ddp"]
        large = {**settings, "size": "xl", "micro_batch": "1024", "layout": "ddp", "context": "16384"}
        told = client.told("/api/plan", {"recipe": "lm", "settings": large})
        assert not told["fits"] and "does not fit" in told["text"], told
        refused = client.ask("/api/plan", {"recipe": "lm", "settings": {"steps": "x"}})
        assert refused.status_code == 400 and "steps" in refused.json()["error"]["message"]
        refused = client.ask("/api/plan", {"recipe": "face", "settings": {}})
        assert refused.status_code == 400 and "--study" in refused.json()["error"]["message"]
