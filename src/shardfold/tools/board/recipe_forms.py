"""Forms of recipes: what their settings' fields say, and settings between forms, config files and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan import presets
from shardfold.tools.cli_options import argument, option_name
from shardfold.tools.named_optimizers import OPTIMIZERS
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.settings_text import as_toml
from shardfold.tools.recipes.train_config import SHAPE, SIZES, GPTConfig, RecipeSettings, TrainConfig
from shardfold.tools.tune.config import (
    KINDS,
    SECTIONS,
    SHORT,
    TuneConfig,
    config_class,
    option_fields,
    recipe_names,
)

__all__ = ["OWN", "RecipeForm"]

WORDS = {"lm": ("train",), "face": ("train", "face")}
OWN = ("resume", "out")
"""What a board gives itself."""

OTHERS = "Of this recipe"
GROUPS = {
    "Model and data": "model data eval_data size d_model layers heads context experts top_k backbone patch width "
    "embedding head channels identities shots held_out difficulty augment transforms workers teacher value",
    OTHERS: "",
    "Steps": "steps epochs micro_batch batch accumulate lr schedule optimizer matrix_lr warmup weight_decay clip_norm "
    "galore_rank galore_every galore_scale value_lr nonfinite seed",
    "Ranks and memory": "procs layout gather reduce offload tensor sequence_parallel sequence attention expert "
    "pipeline order precision memory activations elastic spares exact",
    "Evaluation and checkpoints": "eval_every eval_windows save_every keep sample temperature peak_flops far matcher "
    "cache track",
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
SECTION_GROUPS = {"adapter": "Adapter", "base": "Frozen parameters", "text": "Rows as tokens"}
RANK = {name: rank for rank, name in enumerate([*GROUPS, *SECTION_GROUPS.values()])}
ADAPTER = {short: KINDS[short] for short in SHORT}


class RecipeForm:
    """Of one recipe.

    Args:
        recipe: ``lm``, ``face``, or one of ``shardfold tune``.

    Raises:
        ConfigError: there is no such recipe.
    """

    def __init__(self, recipe: str) -> None:
        if recipe not in (names := self.names()):
            raise ConfigError(f"there is no recipe {recipe[:100]!r}.{did_you_mean(recipe[:100], names)}")
        self.recipe = recipe
        kinds: dict[str, type[RecipeSettings]] = {"lm": TrainConfig, "face": FaceConfig}
        self.settings = kinds[recipe] if recipe in kinds else config_class(recipe)
        self.words = WORDS.get(recipe, ("tune", recipe))

    @staticmethod
    def names() -> list[str]:
        return [*WORDS, *recipe_names()]

    @property
    def help(self) -> str:
        """What it trains, in a sentence."""
        return " ".join((self.settings.__doc__ or "").partition("\n\n")[0].split())

    def fields(self) -> Iterator[tuple[str, FieldInfo]]:
        """By dotted names, those of sections too; without what the recipe always refuses."""
        return ((name, field) for name, field in self._fields() if name not in self.settings.refused)

    def _fields(self) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in self.settings.model_fields.items():
            if name in SECTIONS and issubclass(self.settings, TuneConfig):
                yield from ((f"{name}.{inner}", each) for inner, each in SECTIONS[name].model_fields.items())
            elif name not in OWN:
                yield name, field

    def told(self) -> list[dict[str, Any]]:
        """The form: what is about the model and the data first."""
        return sorted((self._told(name, field) for name, field in self.fields()), key=lambda each: RANK[each["group"]])

    def _told(self, name: str, field: FieldInfo) -> dict[str, Any]:
        kind, choices = _kind(name, field)
        section, _, inner = name.rpartition(".")
        bounds = {"ge": None, "gt": None, "le": None, "lt": None}
        for each in field.metadata:
            bounds |= {word: getattr(each, word) for word in bounds if hasattr(each, word)}
        default = None if field.is_required() or name == "adapter.kind" else field.default
        return {
            "name": name,
            "kind": kind,
            "default": _form_value(name, default),
            "choices": choices and [each for each in choices if f"{name}={each}" not in self.settings.refused],
            "help": field.description or "",
            "group": SECTION_GROUPS.get(section) or GROUP_OF.get(inner, OTHERS),
            "required": field.is_required(),
            "least": bounds["ge"] if bounds["ge"] is not None else bounds["gt"],
            "most": bounds["le"] if bounds["le"] is not None else bounds["lt"],
        }

    def nested(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What a form sends, as a config file has it. Texts of numbers become numbers where they are some, else the
        settings say what is wrong; what is empty is not given."""
        fields, found = dict(self.fields()), dict[str, Any]()
        for name, value in given.items():
            if value is None or value == "":
                continue
            kind = _kind(name, fields[name])[0] if name in fields else "text"
            section, _, inner = name.rpartition(".")
            place = found.setdefault(section, {}) if section else found
            if isinstance(place, dict):
                place[inner] = _read(value, kind)
        return found

    def form_values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What of a run's ``config.json`` is not the default, as a form has it."""
        found: dict[str, Any] = {}
        for name, field in self.fields():
            section, _, inner = name.rpartition(".")
            place = config.get(section) if section else config
            if not isinstance(place, Mapping) or inner not in place:
                continue
            value = _form_value(name, place[inner])
            default = None if field.is_required() or name == "adapter.kind" else _form_value(name, field.default)
            if value != default and value is not None and value != _derived(self.settings, name, config):
                found[name] = value
        return found

    def toml(self, nested: Mapping[str, Any]) -> str:
        recipe = {"recipe": self.recipe} if self.recipe not in WORDS else {}
        return as_toml({**recipe, **nested}, SECTIONS)

    def command(self, nested: Mapping[str, Any]) -> list[str] | None:
        """The words behind `shardfold` that give these settings; None: there are no options for some of them."""
        if not issubclass(self.settings, TuneConfig):
            return [*self.words, *(argument(name, value) for name, value in nested.items())]
        left = {name: value for name, value in nested.items() if name not in SECTIONS}
        inside = {(name, inner): value for name in SECTIONS for inner, value in (nested.get(name) or {}).items()}
        options: dict[str, Any] = {}
        if nested.get("adapter") is not None:
            kind = inside.pop(("adapter", "kind"), "lora")
            short = next((short for short, known in ADAPTER.items() if known == kind), "lora")
            section, inner, _ = SHORT[short]
            options[short] = inside.pop((section, inner), SECTIONS[section].model_fields[inner].default)
        for option, (place, _) in option_fields(self.settings).items():
            if option in SHORT:
                continue
            if place is None and option in left:
                options[option] = left[option]
            elif place in inside:
                options[option] = inside.pop(place)
        if inside:
            return None
        for name in ("data", "eval_data"):
            if name in options:
                options[name] = _joined_paths(options[name])
        if "rope" in options:
            options["rope"] = _short_rope(options["rope"])
        if any(isinstance(value, Mapping | list | tuple) or value is None for value in options.values()):
            return None
        return [*self.words, *(argument(name, value) for name, value in options.items())]

    def shown_command(self, nested: Mapping[str, Any]) -> str:
        """For people: with options, or with a file where there are no options for some settings."""
        words = self.command(nested)
        return shlex.join(["shardfold", *(words if words is not None else [*self.words, "--config", "run.toml"])])

    def field_of(self, sentence: str) -> str | None:
        """The field that a refusal is about, by its words."""
        names = [name for name, _ in self.fields()]
        found = re.match(
            r"the (?:form|command line)(?:, \[(\w+)\])?: (?:there is no (?:setting ')?)?([\w.]+)", sentence
        )
        if found is not None:
            section, name = found.groups()
            name = f"{section}.{name}" if section else name
            if (
                near := next((each for each in names if name == each or name.startswith(each + ".")), None)
            ) is not None:
                return near
            return name if "there is no setting" in sentence else None
        options = {option_name(name.rpartition(".")[2]): name for name in reversed(names)}
        options |= {option_name(short): f"adapter.{inner}" for short, (_, inner, _) in SHORT.items()}
        for word in re.findall(r"--[a-z][a-z-]*", sentence):
            if word in options:
                return options[word]
        first = sentence.partition(" ")[0]
        return next((name for name in names if name.rpartition(".")[2] == first), None)


def _kind(name: str, field: FieldInfo) -> tuple[str, list[Any] | None]:
    """What a form has for it, and what may be chosen."""
    if name == "micro_batch":
        return "max", None
    if name == "layout":
        return "choice", list(presets.NAMES)
    if field is TrainConfig.model_fields.get(name) and name == "size":
        return "choice", list(SIZES)
    if name == "optimizer":
        choices = [str(each) for each in get_args(field.annotation)]
        return "choice", choices or list(OPTIMIZERS)
    if name in ("data", "eval_data") and field.annotation not in (Path, Path | None, Union[Path, None]):  # noqa: UP007
        return "rows", None
    options = [each for each in _options(field.annotation) if each is not type(None)]
    if choices := [value for each in options if get_origin(each) is Literal for value in get_args(each)]:
        return "choice", choices
    for kind, word in ((bool, "bool"), (int, "int"), (float, "float"), (Path, "path")):
        if kind in options:
            return word, None
    return "text", None


def _derived(settings: type[RecipeSettings], name: str, config: Mapping[str, Any]) -> Any:
    """What a run writes for a setting that was not given: by its others. None: there is no such rule."""
    if settings is not TrainConfig:
        return None
    if name in SHAPE and (size := SIZES.get(str(config.get("size")))):
        return {"experts": GPTConfig.experts, "top_k": GPTConfig.top_k, **size}.get(name)
    steps, default = config.get("steps"), settings.model_fields["warmup"].default
    return steps // 10 if name == "warmup" and isinstance(steps, int) and steps <= default else None


def _options(annotation: Any) -> Sequence[Any]:
    origin = get_origin(annotation)
    return (
        (annotation,)
        if origin is Literal or not get_args(annotation) or origin in (tuple, dict)
        else get_args(annotation)
    )


def _read(value: Any, kind: str) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if kind in ("int", "max", "choice") and re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if kind == "float" and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text):
        return float(text)
    if kind == "bool" and text in ("true", "false"):
        return text == "true"
    return value


def _form_value(name: str, value: Any) -> Any:
    """As a form shows it, and as JSON has it."""
    if name in ("data", "eval_data") and isinstance(value, list | tuple):
        return _joined_paths(value) or None if value else None
    if name == "text.rope" and isinstance(value, Mapping):
        return _short_rope(value)
    if name == "micro_batch" and value == 0:
        return "max"
    return str(value) if isinstance(value, Path) else value


def _joined_paths(sources: Any) -> Any:
    """Files with commas between them, where that says all."""
    if isinstance(sources, str):
        return sources
    plain: list[str] = []
    for each in sources:
        given = {"path": each} if isinstance(each, str) else dict(each) if isinstance(each, Mapping) else {}
        extra = {key: value for key, value in given.items() if key != "path" and value not in (None, 1.0)}
        if extra or "," in str(given.get("path", ",")):
            return sources
        plain.append(str(given["path"]))
    return ",".join(plain)


def _short_rope(rope: Any) -> Any:
    if isinstance(rope, Mapping) and rope.keys() == {"type", "factor"} and isinstance(rope["factor"], int | float):
        return f"{rope['type']}:{rope['factor']:g}"
    return rope
