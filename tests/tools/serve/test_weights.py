"""Whose weights answer: those of several ranks, a run's newest, an adapter's, or those that train; never two's."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.testing import Ranks
from shardfold.tools.answering.opened_model import OpenConfig, OpenedModel
from shardfold.tools.serve._web_app import ServedModel, WebApp
from shardfold.tools.serve.answer_loop import AnswerLoop
from shardfold.tools.serve.text_ranks import TextRanks
from shardfold.tools.serve.web_side import WebSide
from tests.tools.serve.support import CHAT, COMPLETION, NAME, alone, asked, chunks, served
from tests.tools.tune.support import TEMPLATE, VOCABULARY, model_folder, tiny_tokenizer

MOST = 12
TEXTS = ("one cat", "two", "red dogs run", "x")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def greedy(url: str, text: str, model: str = NAME, most: int = MOST) -> tuple[str, str]:
    """An answer, and which weights it is of."""
    fields = {"model": model, "prompt": f"<user>{text}<assistant>", "max_tokens": most, "temperature": 0}
    status, said = asked(url, COMPLETION, fields)
    assert status == 200, said
    return said["choices"][0]["text"], said["system_fingerprint"]


def _answers(folder: Path, layout: str, tensor: int) -> list[tuple[str, str]]:
    """What rank 0 hears of eight clients at once, one of which leaves."""
    model = OpenedModel.open(OpenConfig(model=folder, layout=layout, tensor=tensor))
    ranks = TextRanks(model.engine, cache=2**22, rows=2, context=model.context)
    ranks.start()
    found: list[tuple[str, str]] = []
    if model.engine.rank:
        ranks.follow()
    else:
        told = ServedModel((NAME,), model.tokenizer, TEMPLATE, None, VOCABULARY, ranks.capacity)
        app = WebApp(told, ranks, most=64, host="127.0.0.1")
        answers = AnswerLoop(ranks, model.tokenizer, model.stops, app.tell)
        app.connect(answers)
        web = WebSide(app, "127.0.0.1", 0)
        web.start()

        def clients() -> None:
            try:
                with ThreadPoolExecutor(8) as pool:
                    found.extend(pool.map(partial(greedy, web.url), TEXTS * 2))
                messages = [{"role": "user", "content": "one"}]
                said = chunks(web.url, CHAT, model=NAME, messages=messages, max_tokens=9, stop="\x00", n=3,
                              logprobs=True, top_logprobs=2)  # fmt: skip
                assert sum(each["choices"][0]["finish_reason"] is not None for each in said) == 3
                told = [each["choices"][0]["logprobs"] for each in said if each["choices"][0]["logprobs"]]
                assert all(len(token["top_logprobs"]) == 2 for each in told for token in each["content"])
            finally:
                answers.put("end")

        asking = threading.Thread(target=clients)
        asking.start()
        answers.run()
        asking.join()
        web.stop()
        ranks.end()
    model.close()
    return found


@pytest.mark.parametrize(("layout", "tensor"), [("zero3", 1), ("ddp", 2)])
def test_ranks_answer_together(ranks: Ranks, tmp_path: Path, layout: str, tensor: int) -> None:
    """Each client gets what the model says alone, whichever rank has its text."""
    folder = model_folder(tmp_path / "tiny", scale=4.0)
    found, other = ranks.run(_answers, folder, layout, tensor, world_size=2, timeout=200)
    assert [text for text, _ in found] == [alone(folder, f"<user>{text}<assistant>", MOST) for text in TEXTS * 2]
    assert other == []


def _swaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, clients: int) -> None:
    """Clients ask on while weights are swapped: each answer is wholly of the weights that it names."""
    monkeypatch.setattr("shardfold.tools.serve.answer_loop.LOOK", 0.0)
    base = model_folder(tmp_path / "w0", scale=4.0)
    folders, saved = [base], []
    for seed in range(1, 4):
        folders.append(model_folder(tmp_path / f"w{seed}", seed=seed, scale=4.0))
        other = OpenedModel.open(OpenConfig(model=folders[-1]))
        other.engine.save(tmp_path / f"c{seed}", wait=True)
        saved.append(tmp_path / f"c{seed}")
        other.close()
    expected = {(which, text): alone(folder, f"<user>{text}<assistant>", MOST) for which, folder in enumerate(folders)
                for text in TEXTS}  # fmt: skip
    given = itertools.count(1)
    due = threading.Event()

    def newest() -> Path | None:
        """The next one, once some answers were given with the last."""
        if not due.is_set():
            return None
        due.clear()
        return saved[(next(given) - 1) % 3]

    heard: list[tuple[str, str, str]] = []
    with served(base, newest=newest) as server:

        def ask(client: int) -> None:
            for turn in itertools.count():
                if server.ranks.weights >= number:
                    return
                text = TEXTS[(client + turn) % 4]
                heard.append((text, *greedy(server.url, text)))
                due.set()

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, range(clients)))
        assert server.ranks.used_pages == 0
    which = {text: int(text.removeprefix("weights-")) for text in {each[2] for each in heard}}
    for text, answer, weights in heard:
        swaps = which[weights]
        assert answer == expected[(swaps - 1) % 3 + 1 if swaps else 0, text], (text, weights)
    assert len(which) > 2 and server.ranks.weights >= number


def test_newer_weights_come_between_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _swaps(tmp_path, monkeypatch, 4, 4)


@pytest.mark.soak
def test_fifty_swaps_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _swaps(tmp_path, monkeypatch, 50, 12)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_adapters_take_turns(tmp_path: Path) -> None:
    """By their names, asked all at once: each answer is what peft's model says with that adapter."""
    peft: Any = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = model_folder(tmp_path / "base", scale=4.0)
    adapters = {name: tmp_path / name for name in ("polite", "rude")}
    for seed, path in enumerate(adapters.values()):
        torch.manual_seed(seed)
        plain = AutoModelForCausalLM.from_pretrained(folder)
        config = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
        wrapped = peft.get_peft_model(plain, config)
        wrapped.save_pretrained(path)
        wrapped.merge_and_unload().save_pretrained(path / "merged")
        tiny_tokenizer().save_pretrained(path / "merged")
    places = {NAME: folder, **{name: path / "merged" for name, path in adapters.items()}}
    expected = {name: alone(place, "<user>one<assistant>", MOST) for name, place in places.items()}
    assert len(set(expected.values())) == 3
    with served(folder, adapters=adapters) as server:
        order = ["polite", NAME, "rude", "rude", NAME, "polite", "polite", NAME]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda name: greedy(server.url, "one", name)[0], order))
    assert found == [expected[name] for name in order]


def _train(folder: Path, layout: str, serves: bool) -> tuple[dict[str, Any], list[Any]]:
    """Five steps, with a server or without: the weights, and what the client got beside what was generated."""
    model = _plain(folder)
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout)
    tokenizer = tiny_tokenizer()
    prompt = tokenizer("<user>one<assistant>", add_special_tokens=False)["input_ids"]
    heard: list[Any] = []

    def step(number: int) -> None:
        seed = torch.Generator().manual_seed(number * 10 + engine.rank)
        batch = torch.randint(5, VOCABULARY, (2, 12), generator=seed)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    if not serves:
        for number in range(5):
            step(number)
        return {name: value.clone() for name, value in engine.state_dict().items()}, heard
    with sf.serving(engine, tokenizer, name=NAME, cache="4MiB") as server:
        for number in range(5):
            step(number)
            if number % 2:
                continue
            expected = next(iter(sf.generate(engine, [prompt], max_tokens=MOST, temperature=0, stop=[1]))).tokens
            client = None
            if server.url is not None:
                client = threading.Thread(target=lambda: heard.append(greedy(server.url or "", "one")))
                client.start()
                while server.waiting == 0:
                    time.sleep(0.005)
            server.answer()
            if client is not None:
                client.join()
                heard.append((tokenizer.decode(expected, skip_special_tokens=True), f"weights-{number + 1}"))
            model.train()
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return weights, heard


def _plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero3", "ddp"])
def test_what_trains_answers_and_trains_on_as_without(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    folder = model_folder(tmp_path / "tiny", scale=4.0)
    results = ranks.run(_train, folder, layout, True, world_size=2, timeout=200)
    without = ranks.run(_train, folder, layout, False, world_size=2, timeout=200)
    for (weights, _), (plain, _) in zip(results, without, strict=True):
        assert all(torch.equal(value, plain[name]) for name, value in weights.items())
    heard = results[0][1]
    assert len(heard) == 6 and heard[::2] == heard[1::2]
