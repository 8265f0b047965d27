"""What the README and docs/ say runs: their code, what it prints, their commands, their links.

The ```python blocks of a page are one program, run in order. A ```text block right behind one is what it prints on rank
0. A page runs on one rank, or as a comment at its top says: `<!-- run: 2 ranks -->`, `<!-- run: as a test module -->`.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from shardfold.testing import Ranks
from shardfold.tools import cli
from shardfold.tools.cli_options import option_name
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.train_config import TrainConfig
from shardfold.tools.tune.config import config_class, option_fields, recipe_names

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOOKS = (ROOT / "docs/site/hooks.py").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    language: str
    line: int  # of its first line of content
    text: str
    prints: str | None = None


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(source):
        language, text = match.groups()
        if language == "text" and found and found[-1].language == "python" and not source[end : match.start()].strip():
            found[-1] = found[-1]._replace(prints=text)
        found.append(Block(language, source[: match.start(2)].count("\n") + 1, text))
        end = match.end()
    return found


def python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def how_to_run(page: Path) -> str:
    match = re.match(r"<!-- run: (.*) -->", page.read_text(encoding="utf-8"))
    return match[1] if match else "1 ranks"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


MADE = {"messages.md"} | {f"{module}.md" for module in re.findall(r'^    "(shardfold[.\w]*)":', HOOKS, re.MULTILINE)}
CODE = [page for page in PAGES if python(page)]
TEST_MODULES = [page for page in CODE if how_to_run(page) == "as a test module"]


def _run(title: str, program: list[tuple[int, str]]) -> list[str]:
    """What each block prints on this rank."""
    space: dict[str, object] = {"__name__": "page"}
    printed = []
    for line, text in program:
        with redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * (line - 1) + text, title, "exec"), space)
        printed.append(out.getvalue())
    return printed


@pytest.mark.parametrize("page", [page for page in CODE if page not in TEST_MODULES], ids=name)
def test_code_runs_and_prints_what_the_page_says(ranks: Ranks, page: Path) -> None:
    program = python(page)
    world = int(how_to_run(page).split()[0])
    said = ranks.run(_run, name(page), [(block.line, block.text) for block in program], world_size=world)[0]
    for block, printed in zip(program, said, strict=True):
        if block.prints is not None:
            assert printed == block.prints, f"{name(page)}:{block.line}"


@pytest.mark.parametrize("page", TEST_MODULES, ids=name)
def test_a_page_that_is_a_test_module_passes(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"page_{page.stem}.py"
    file.write_text("\n".join(block.text for block in python(page)), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # ranks import the module by its name
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    tests = [value for key, value in vars(module).items() if key.startswith("test_")]
    assert tests
    for test in tests:
        test()


def _commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        source = page.read_text(encoding="utf-8")
        lines = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
        lines += re.findall(r"`(shardfold \w[^`]*)`", source)
        for line in lines:
            words = shlex.split(line, comments=True)
            if "shardfold" in words and words[words.index("shardfold") :][1:]:
                yield name(page), words[words.index("shardfold") + 1 :]


@pytest.mark.soak
def test_commands_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`explain` is run as it is written; others take minutes, or files of yours, so their options are looked up."""
    known = {
        "train": {option_name(field) for field in TrainConfig.model_fields} | {"--procs", "--config", "--help"},
        "bench": {option_name(field) for field in inspect.signature(cli.bench).parameters} | {"--help"},
    }
    faces = {option_name(field) for field in FaceConfig.model_fields}
    known["train face"] = faces | {"--config", "--help", "--study"}
    group: Any = typer.main.get_command(cli.app)
    for name, command in group.commands["ckpt"].commands.items():
        known[f"ckpt {name}"] = {option for each in command.params for option in each.opts} | {"--help"}
    for prefix in ("tune", "plan tune"):
        for name, command in group.commands[prefix].commands.items():
            known[f"{prefix} {name}"] = {option for each in command.params for option in each.opts} | {"--help"}
        known[prefix] = {option for each in group.commands[prefix].params for option in each.opts} | {"--help"}
    for name in ("board", "chat", "demo", "doctor", "eval", "generate", "plan", "report", "runs", "serve"):
        known[name] = {option for each in group.commands[name].params for option in each.opts} | {"--help"}
    known["run"] = {option for each in group.commands["run"].params for option in each.opts} | {"--help"}
    for page, words in _commands():
        if words[0] == "ckpt" or words[:2] == ["train", "face"]:
            words = [" ".join(words[:2]), *words[2:]]
        for prefix in (words[:3], words[:2]):  # of ``plan tune sft``, ``tune sft``
            if prefix[-1] in (*recipe_names(), "demo") and " ".join(prefix) in known:
                words = [" ".join(prefix), *words[len(prefix) :]]
        if words[0] == "run":  # what stands after the script is the script's
            script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
            words = [word.partition("=")[0].replace("_", "-") for word in words[:script]]
        assert words[0] in (*known, "explain"), (page, words)
        if words[0] in known:
            assert {word for word in words if word.startswith("--")} <= known[words[0]], (page, words)
        else:
            with pytest.raises(SystemExit) as end:
                cli.main(words)
            assert end.value.code == 0, (page, words, capsys.readouterr().err)


def test_the_table_of_train_options_is_complete() -> None:
    text = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `--"))
    assert not [f for f in TrainConfig.model_fields if f"`{option_name(f)}`" not in rows]


def test_the_tables_of_tune_options_are_complete() -> None:
    """Every option of every recipe but those of rollouts, which have a page of their own."""
    text = (ROOT / "docs/tune.md").read_text(encoding="utf-8")
    for recipe in ("pt", "sft", "reward", "dpo", "orpo", "kto", "distill"):
        options = [option_name(name) for name in option_fields(config_class(recipe))]
        assert not [option for option in options if not re.search(rf"{option}\b", text)], recipe


@pytest.mark.sampled(68)
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file.parent == ROOT / "docs/reference" and file.name in MADE:  # `make docs` makes it
            continue
        assert file.exists(), f"{name(page)} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{name(page)} links to {target}, which has no such heading"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if page.stem != "index" and page.name not in index]


def test_the_table_of_run_options_is_complete() -> None:
    """Each option is in the page, by one of its names; of `--rdzv-...` the ends."""
    text = (ROOT / "docs/launch.md").read_text(encoding="utf-8").replace("_", "-")
    text = text.replace(
        "`--rdzv-backend`, `-endpoint`, `-id`, `-conf`", "--rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf"
    )
    group: Any = typer.main.get_command(cli.app)
    shown = [each for each in group.commands["run"].params if not getattr(each, "hidden", False)]
    named = {each.name: [word for word in each.opts if word.startswith("-")] for each in shown}
    missing = [name for name, words in named.items() if words and not any(re.search(rf"{w}\b", text) for w in words)]
    assert missing == []


def test_every_page_is_in_the_site() -> None:
    """`make docs` is strict about it, and is not run here."""
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f" {page}\n" not in site]
