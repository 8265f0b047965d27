"""A process that a board asks what needs PyTorch: whether settings hold, and what a plan says of them.

It reads one JSON object per line, ``{"asked": "check", "recipe": ..., "settings": {...}}``, and answers each with one.
It ends with its input, so with its board.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from shardfold.errors import ConfigError, ShardfoldError
from shardfold.tools.board.recipe_forms import RecipeForm
from shardfold.tools.observe.trackers import tracker_names
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.train_config import RecipeSettings, TrainConfig, resumed_settings
from shardfold.tools.tune.config import TuneConfig
from shardfold.tools.tune.config import resumed_settings as resumed_tuning

__all__ = ["checked", "main"]

MOST_ERRORS = 8
WHERE = "the form"


def main() -> None:
    """Answer lines until there are none, or nobody wants an answer any more, which SIGTERM says."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that temporary files go
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what packages print is no answer
    with suppress(KeyboardInterrupt):
        _answer(answers)


def _answer(answers: TextIO) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        said = StringIO()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                if asked["asked"] == "plan":
                    answer = _planned(asked["recipe"], asked["settings"], asked["gpus"])
                else:
                    answer = checked(asked["recipe"], asked["settings"])
        except ShardfoldError as error:
            answer = {"refused": str(error)}
        except Exception as error:
            answer = {"refused": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        answers.write(json.dumps(answer) + "\n")


def checked(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a command with these settings would begin to run, and how it reads."""
    form, left = RecipeForm(recipe), dict(given)
    nested = form.nested(given)
    errors: list[dict[str, Any]] = []
    while len(errors) < MOST_ERRORS:
        try:
            loaded(form, form.nested(left))
            break
        except ConfigError as error:
            field = form.field_of(str(error))
            errors.append({"field": field, "sentence": str(error)})
            if field not in left:
                break
            del left[field]
    return {"command": form.shown_command(nested), "toml": form.toml(nested), "errors": errors}


def loaded(form: RecipeForm, nested: dict[str, Any]) -> RecipeSettings:
    """
    Raises:
        ConfigError: the command would refuse them.
    """
    settings = _loaded(form, nested)
    tracker_names(settings.track, installed=True)
    return settings


def _loaded(form: RecipeForm, nested: dict[str, Any]) -> TrainConfig | FaceConfig | TuneConfig:
    if form.settings is TrainConfig:
        given = resumed_settings(Path(nested["resume"]), nested) if "resume" in nested else nested
        settings = TrainConfig.load(given, where=WHERE)
        settings.check_start()
        return settings
    if form.settings is FaceConfig:
        settings = FaceConfig.load(nested, where=WHERE)
        settings.check_start(study=False)
        return settings
    from shardfold.tools.cli_tune import check_paths

    kind: Any = form.settings
    kind.checked(nested, where=WHERE)
    given = resumed_tuning(kind, Path(nested["resume"]), nested) if "resume" in nested else nested
    tuning: TuneConfig = kind.load(given, where=WHERE)
    check_paths(tuning)
    return tuning


def _planned(recipe: str, given: Mapping[str, Any], gpus: str | None) -> dict[str, Any]:
    from shardfold.tools.board._run_plan import planned

    form = RecipeForm(recipe)
    return planned(loaded(form, form.nested(given)), gpus)


if __name__ == "__main__":
    main()
