"""`shardfold generate` and `shardfold chat`: answers are those of the model alone, and nothing is asked twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfold.errors import ConfigError
from shardfold.tools.answering._chat_session import ChatSession
from shardfold.tools.answering.answer_config import ChatConfig, GenerateConfig
from shardfold.tools.answering.batch_answers import answer_prompts
from shardfold.tools.answering.byte_tokenizer import ByteTokenizer
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.recipes.lm import train
from shardfold.tools.recipes.train_config import TrainConfig
from shardfold.tools.tune.data.templates import TEMPLATES
from tests.tools.tune.support import model_folder

PROMPTS: list[Any] = [
    "Once",
    {"prompt": "A longer text, "},
    {"messages": [{"role": "user", "content": "Hello."}]},
    {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello."}]},
    "z",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA over bytes with random weights, whose tokenizer begins texts with byte 0, and a chat template that does
    not."""
    from tokenizers import processors
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer = ByteTokenizer().whole
    first = tokenizer.convert_ids_to_tokens(0)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, 0)]
    )
    tokenizer.chat_template = TEMPLATES["plain"]
    tokenizer.save_pretrained(place)
    return place


def _prompts(tmp_path: Path, rows: list[Any]) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _alone(folder: Path, row: Any, tokens: int) -> list[int]:
    """What transformers' own generate gives, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = row if isinstance(row, str) else row.get("messages", row.get("prompt"))
    if isinstance(said, list):
        asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        ids = tokenizer.apply_chat_template(said, **asked)["input_ids"]
        assert ids[0, 0] != 0
    else:
        ids = tokenizer(said, return_tensors="pt").input_ids
        assert ids[0, 0] == 0
    whole = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return [token for token in whole[0, ids.shape[1] :].tolist() if token != 0]


def _answers(path: Path) -> dict[tuple[int, int], dict[str, Any]]:
    return {(each["line"], each["sample"]): each for each in map(json.loads, path.read_text().splitlines())}


def test_answers_are_those_of_each_prompt_alone_and_are_not_asked_twice(folder: Path, tmp_path: Path) -> None:
    """Also where the run was ended in the middle of a line."""
    out = tmp_path / "out" / "a.jsonl"
    settings: dict[str, Any] = {"model": folder, "prompts": _prompts(tmp_path, PROMPTS), "max_tokens": 12, "out": out}
    answer_prompts(GenerateConfig.load(settings))
    first, text = _answers(out), out.read_text()
    decode = ByteTokenizer().decode
    for number, row in enumerate(PROMPTS, 1):
        assert first[number, 0]["text"] == decode(_alone(folder, row, 12))
    lines = text.splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:20])
    answer_prompts(GenerateConfig.load({**settings, "n": 2, "cache": "200KB"}))
    again = _answers(out)
    assert out.read_text().startswith("".join(lines[:2])) and len(out.read_text().splitlines()) == 2 * len(PROMPTS)
    assert all(again[line, sample]["text"] == first[line, 0]["text"] for line, sample in again)
    for name, other in (("max_tokens", 13), ("temperature", 0.5), ("seed", 1), ("stop", "x")):
        with pytest.raises(ConfigError, match=rf"answers of other settings \({name} was"):
            answer_prompts(GenerateConfig.load({**settings, name: other}))
    with pytest.raises(ConfigError, match="answers to other prompts"):
        answer_prompts(GenerateConfig.load({**settings, "prompts": _prompts(tmp_path, ["other"])}))


LEFT_OUT = (
    "torch._meta_registrations",
    "torch._refs",
    "torch._dynamo",
    "torch.distributed.tensor",
    "sympy",
    "scipy",
    "accelerate",
    "trl",
)
BEGUN = f"""
import gc, runpy, sys
read = []
sys.addaudithook(lambda event, given: event == "open" and "modeling_albert.py" in str(given[0]) and read.append(1))
try:
    runpy.run_module("shardfold", run_name="__main__")
finally:
    print("\\n", [name for name in {LEFT_OUT} if name in sys.modules], gc.isenabled(), gc.get_freeze_count() > 10**5)
    import torch, transformers.masking_utils as masks
    with masks.TransformGetItemToIndex():
        print(torch.vmap(lambda place: torch.arange(4)[place])(torch.tensor([3, 1])).tolist())
    torch.compiler.disable(print)("compiler", "torch._dynamo" in sys.modules, "read", len(read))
"""


def test_a_command_that_answers_begins_without_what_only_trainings_use(folder: Path) -> None:
    """Which takes longer to import than the rest; it is there for who asks for it all the same."""
    command = [sys.executable, "-c", BEGUN, "chat", str(folder), "--max-tokens", "8"]
    done = subprocess.run(command, input="Hello.\n", capture_output=True, text=True, timeout=240, check=True)
    turns = {"messages": [{"role": "user", "content": "Hello."}]}
    said = ByteTokenizer().decode(_alone(folder, turns, 8))
    assert done.stdout.startswith(said) and done.stdout.splitlines()[-3:] == [
        " [] True True",
        "[3, 1]",
        "compiler True read 1",
    ]


def test_a_run_of_train_is_answered_without_transformers(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the cat sits here and the dog runs there. " * 60)
    train(TrainConfig.load({"size": "tiny", "data": text, "steps": 2, "procs": 1, "save_every": 1, "out": run}))
    code = "import runpy, sys\ntry: runpy.run_module('shardfold', run_name='__main__')\n"
    code += "finally: print([name for name in ('transformers', 'torch._refs') if name in sys.modules])"
    words = ["generate", str(run), "--prompts", str(_prompts(tmp_path, ["the c"])), "--max-tokens", "3"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240, check=True)
    answer, left = done.stdout.splitlines()
    assert json.loads(answer)["tokens"] == 3 and left == "[]"


WITHOUT_RULES = """
from shardfold.tools.quick_start import QuickStart
QuickStart.only_answers = True
QuickStart.import_torch()
import torch
from shardfold.tools.answering.opened_model import OpenedModel
def made(cls, config, adapters):
    print("opening")
    return torch.dot(*torch.ones(2, 4, device="meta"))
OpenedModel._open = classmethod(made)
print(OpenedModel.open(None).device, QuickStart.complete_torch(), torch._meta_registrations.__name__)
"""


def test_a_model_that_needs_rules_which_were_left_out_is_opened_with_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RULES], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines() == ["opening", "opening", "meta False torch._meta_registrations"]


FIRST = """
from importlib import import_module
from os import _exit, fork, waitpid
from shardfold.tools.quick_start import NEEDS_RULES, QuickStart
QuickStart.only_answers = True
QuickStart.import_torch()
import torch
for name in (*NEEDS_RULES, "torch.distributed.tensor"):
    child = fork()
    if not child:
        found = import_module(name)
        file = found.__spec__.origin.endswith(("__init__.py", "_content_store.py"))
        _exit(not (file and torch._meta_registrations and torch.empty(2, device="meta").sum().device.type == "meta"))
    print(name, waitpid(child, 0)[1])
"""


@pytest.mark.soak
def test_whichever_module_asks_first_for_rules_that_were_left_out_gets_them() -> None:
    """They are in a circle with others of PyTorch: peft asks for one of these, and others may."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=240, check=True)
    assert "torch._prims 0" in done.stdout
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"0"}, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_is_answered_from_by_the_command(tmp_path: Path) -> None:
    """In a process of the command line, which begins without what only trainings use: peft needs some of it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, adapter = model_folder(tmp_path / "base"), tmp_path / "adapter"
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(target_modules=["q_proj"], base_model_name_or_path=str(base))
    get_peft_model(model, lora).save_pretrained(str(adapter))
    words = ["generate", str(adapter), "--prompts", str(_prompts(tmp_path, ["a"])), "--max-tokens", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "shardfold", *words], capture_output=True, text=True, timeout=240, check=True
    )
    assert json.loads(done.stdout)["tokens"] == 3


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(folder: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    settings: dict[str, Any] = {"model": folder, "prompts": _prompts(tmp_path, ["Once", "z"]), "max_tokens": 20}
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_k": 40}
    answer_prompts(GenerateConfig.load({**settings, **drawn, "out": out, "log_probs": True}))
    whole = _answers(out)
    stop = whole[1, 0]["text"][6:8]
    answer_prompts(GenerateConfig.load({**settings, **drawn, "out": other, "stop": stop}))
    for key, answer in _answers(other).items():
        before, found, _ = whole[key]["text"].partition(stop)
        assert answer["text"] == before
        assert answer["finish"] == ("stop" if found else whole[key]["finish"])
        assert len(whole[key]["log_probs"]) == whole[key]["tokens"]


@pytest.mark.parametrize(
    "rows, words",
    [
        (["", "x"], r"p.jsonl:1 is an empty prompt"),
        ([{"question": "x"}], "p.jsonl:1 is no prompt"),
        (["x" * 300], "p.jsonl:1 has 301 tokens, and the model reads 256"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(folder: Path, tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answer_prompts(GenerateConfig.load({"model": folder, "prompts": _prompts(tmp_path, rows), "max_tokens": 4}))


def test_a_conversation_goes_on_from_the_pages_that_it_has(folder: Path) -> None:
    """Each turn is answered as the whole conversation alone, and only what is new goes through the model."""
    config = ChatConfig.load({"model": folder, "max_tokens": 16, "system": "Be short."})
    model = OpenedModel.open(config)
    session = ChatSession(model, config)
    turns: list[dict[str, str]] = [{"role": "system", "content": "Be short."}]
    for words in ("Hello, who are you?", "And what else is there to say?"):
        before = session.seen
        said = "".join(session.say(words))
        turns.append({"role": "user", "content": words})
        expected = ByteTokenizer().decode(_alone(folder, {"messages": turns}, 16))
        assert said == expected
        turns.append({"role": "assistant", "content": said})
        asked = sum(len(turn["content"].encode()) for turn in turns)
        went = session.seen - before
        assert went > asked or len(turns) > 3
    assert went < asked - len("Be short.") + 2 * 16  # the first page at least was there
    session.reset()
    assert "".join(session.say("Hello, who are you?")) == turns[2]["content"]
    session.close()
    model.close()


def test_without_a_template_a_chat_goes_on_with_the_text(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template*"))
    config = ChatConfig.load({"model": bare, "max_tokens": 16})
    model = OpenedModel.open(config)
    session = ChatSession(model, config)
    assert "".join(session.say("Once")) == ByteTokenizer().decode(_alone(bare, "Once", 16))
    session.close()
    model.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_chat_on_a_terminal(folder: Path) -> None:
    """Through a pseudo-terminal: an answer, /help, an unknown command, Ctrl-C within an answer, Ctrl-D."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "shardfold", "chat", str(folder), "--max-tokens", "200", "--temperature", "1"]
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    seen = b""

    def until(words: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 200
        while words not in seen:
            assert time.monotonic() < end, seen
            seen += os.read(ours, 4096)
        seen = seen.partition(words)[2]

    until(b"> ")
    os.write(ours, b"/help\n")
    until(b"Ctrl-D         ends the chat")
    until(b"> ")
    os.write(ours, b"/reste\n")
    until(b"there is no /reste")
    os.write(ours, b"Hello\n")
    until(b"Hello\r\n")
    os.kill(running.pid, signal.SIGINT)
    until(b"\r\n> ")
    os.write(ours, b"\x04")
    assert running.wait(100) == 0
    os.close(ours)


@pytest.mark.soak
@pytest.mark.skipif(
    "SHARDFOLD_TEST_DATA" not in os.environ, reason="SHARDFOLD_TEST_DATA names no folder of real models"
)
def test_the_published_text_of_stories260k(tmp_path: Path) -> None:
    """Greedily, from the token that begins a text: what llama2.c's doc/stories260K.md prints, by both commands."""
    model = Path(os.environ["SHARDFOLD_TEST_DATA"]) / "stories260K"
    published = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    out = tmp_path / "a.jsonl"
    prompts = _prompts(tmp_path, ["<s>"])
    answer_prompts(GenerateConfig.load({"model": model, "prompts": prompts, "max_tokens": 60, "out": out}))
    assert _answers(out)[1, 0]["text"].strip().startswith(published)
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template*"))
    command = [sys.executable, "-m", "shardfold", "chat", str(bare), "--max-tokens", "60"]
    said = subprocess.run(command, input="<s>\n", capture_output=True, text=True, timeout=300, check=True)
    assert said.stdout.strip().startswith(published)
