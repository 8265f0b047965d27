"""Which tokens are the assistant's, in any template, and that its stop token is one of them."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardfold.errors import ConfigError
from shardfold.tools.tune.data.encoding import ByteTokens, EncodedRow, Encoder, tokens_of
from shardfold.tools.tune.data.row_formats import Message, read_example
from shardfold.tools.tune.data.sources import Raw
from shardfold.tools.tune.data.templates import TEMPLATES, ChatTemplate, Rendered
from tests.tools.tune.support import TEMPLATE, tiny_tokenizer

pytest.importorskip("transformers")

ASKED: Message = {"role": "user", "content": "Hi there"}
TOLD: Message = {"role": "assistant", "content": "Hello you"}
CALL: Message = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
SOAK = pytest.mark.soak
TALKS: dict[str, list[Message]] = {
    "single": [ASKED, TOLD],
    "system": [{"role": "system", "content": "Be good"}, ASKED, TOLD],
    "multi": [ASKED, TOLD, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "So it is"}],
    "thoughts": [ASKED, {**TOLD, "reasoning_content": "He greets"}],
    "tools": [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ],
}
SPECIAL = re.compile(
    r"<[|｜][^<>'{}\n]{1,40}[|｜]>|<(?:start|end)_of_(?:turn|utterance)>|</s>|</?(?:think|tool_call|tool_response)>"
)


def _folder() -> Path | None:
    found = importlib.util.find_spec("trl")
    return Path(found.origin).parent / "chat_templates" if found is not None and found.origin else None


FOLDER = _folder()
TWINS = sorted(each.name.removesuffix("_training.jinja") for each in FOLDER.glob("*_training.jinja")) if FOLDER else []
OTHER_TEXT = {"glm4moe"}
"""Twins that render all conversations otherwise than the template they are of."""
OPENED = {("diffusion_gemma", "tools")}
"""Where the assistant's turn, rendered last, also opens the answer of the tool."""


def tokenizer_of(*sources: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<s>"
    names = sorted({name for source in sources for name in SPECIAL.findall(source)})
    if names:
        tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


def compare(name: str) -> dict[str, str]:
    """For each conversation how our spans in the template stand to those that its twin marks."""
    assert FOLDER is not None
    own, twin = ((FOLDER / f"{name}{end}.jinja").read_text(encoding="utf-8") for end in ("", "_training"))
    tokenizer, found = tokenizer_of(own, twin), {}
    for talk, messages in TALKS.items():
        try:
            wanted = ChatTemplate(tokenizer, twin).conversation(messages, 0, "assistant", where="twin")
            template = ChatTemplate(tokenizer, own)
            mine = template.conversation(messages, 0, "assistant", where="own")
        except ConfigError:  # one of the two knows no such turns
            continue
        if mine.text != wanted.text:
            found[talk] = "other text"
            continue
        marked = [each for each in wanted.spans if each[0] < each[1]]
        turns = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
        same = len(marked) == len(mine.spans) == len(turns) and all(
            start >= first
            and mine.text[:start] == template.render(messages[:number], where="own", prompt=True)[:start]
            and not mine.text[min(stop, last) : max(stop, last)].strip()
            for (start, stop), (first, last), number in zip(mine.spans, marked, turns, strict=True)
        )
        found[talk] = "equal" if mine.spans == tuple(marked) else "equal behind the prompt" if same else "apart"
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TWINS)
def test_masks_equal_those_of_training_twins(name: str) -> None:
    """Where a twin marks more, it is what the prompt for an answer holds already, which a model never writes; or blanks
    behind the stop token."""
    found = compare(name)
    assert found
    if name in OTHER_TEXT:
        assert set(found.values()) == {"other text"}
        return
    assert found["single"].startswith("equal")
    assert {(name, talk) for talk, how in found.items() if how == "apart"} <= OPENED
    assert all(how != "other text" for talk, how in found.items() if talk in ("single", "system", "thoughts"))


def encoded(tokenizer: Any, row: dict[str, Any], train_on: Any = "assistant", length: int = 512) -> EncodedRow:
    example = read_example(Raw("rows.jsonl:7", row), None, "chat")
    return Encoder(tokenizer, "chat", "model", train_on, length).encode([example])[0]


def trained_text(tokenizer: Any, row: EncodedRow) -> list[str]:
    """Runs of trained tokens, as text."""
    [tokens] = row.sequences
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.trained.astype(int), [0]])))
    return [tokenizer.decode(tokens.ids[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


LETTERS = "aab bc  .\nöÖéé語言🙂e\u0301"


def test_places_in_tokens_of_bytes_are_those_that_the_tokenizer_says() -> None:
    """Whose tokens may be parts of characters, or of two; texts that it changes first are left to it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    draw = random.Random(0)
    texts = ["".join(draw.choice(LETTERS) for _ in range(draw.randrange(1, 40))) for _ in range(300)]
    found, left = 0, 0
    for normalizer, prefix in (
        (None, False),
        (normalizers.NFC(), False),
        (None, True),
        (normalizers.Lowercase(), False),
    ):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        made.decoder = decoders.ByteLevel()
        if normalizer is not None:
            made.normalizer = normalizer
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            texts[:150], trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        )
        made.add_special_tokens([AddedToken("<é>", special=True)])
        known = ByteTokens.of(made)
        assert (known is None) == isinstance(normalizer, normalizers.Lowercase)
        if known is None:
            continue
        for text in texts[150:]:
            text = f"<é>{text}<é>"
            edges = [draw.randrange(len(text) + 1) for _ in range(4)]
            spans = [(min(pair), max(pair)) for pair in zip(edges[::2], edges[1::2], strict=True)]
            encoding = made.encode(text)
            ids, at = np.array([7, *encoding.ids, 7], np.int32), np.array([1])  # among those of other texts
            alone = Rendered(text, tuple(spans), ())
            [places] = known.places([alone], ids, at, np.array([len(ids) - 2]), np.array([0]))
            if places is None:
                left += 1
                assert prefix or normalizer is not None
                continue
            found += 1
            for span, (first, stop) in zip(spans, places, strict=True):
                assert span[0] == span[1] or (first, max(first, stop)) == tokens_of(encoding, *span)
    assert found > 150 and left > 100, (found, left)


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A <eos>"])
def test_tokens_around_texts_are_none_of_theirs(single: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in front is passed over; where others stand behind, the tokenizer is asked for places."""
    from tokenizers import processors

    from shardfold.tools.tune.data import encoding

    asked: list[Any] = []
    monkeypatch.setattr(encoding, "tokens_of", lambda *given: asked.append(given) or tokens_of(*given))
    tokenizer = tokenizer_of("<s>")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    names = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)
    row = encoded(tokenizer, {"prompt": "two and ", "completion": "two"})
    assert row.sequences[0].ids[0] == tokenizer.bos_token_id
    assert trained_text(tokenizer, row) == ["two<eos>"]
    assert bool(asked) == single.endswith("<eos>")


def test_what_is_trained() -> None:
    tokenizer, row = tiny_tokenizer(), {"messages": TALKS["multi"]}
    assert trained_text(tokenizer, encoded(tokenizer, row)) == ["Hello you<eos>", "So it is<eos>"]
    assert trained_text(tokenizer, encoded(tokenizer, row, "last")) == ["So it is<eos>"]
    assert trained_text(tokenizer, encoded(tokenizer, row, "completion")) == ["So it is<eos>"]
    [everything] = trained_text(tokenizer, encoded(tokenizer, row, "all"))
    assert everything.startswith("<user>Hi there")
    plain = {"prompt": "two and ", "completion": "two"}
    assert trained_text(tokenizer, encoded(tokenizer, plain)) == ["two<eos>"]


def test_marks_of_a_template_are_taken() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ '<eos>' }}", "{% generation %}{{ '!<eos>' }}{% endgeneration %}")
    assert trained_text(tokenizer, encoded(tokenizer, {"messages": TALKS["single"]})) == ["!<eos>"]


def test_padding_that_is_the_stop_token_changes_nothing() -> None:
    """The mask is one of places, so the stop token is trained, and padding never."""
    from shardfold.tools.tune.data.batches import collate

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    long, short = ({"messages": TALKS[name]} for name in ("multi", "single"))
    rows = [encoded(tokenizer, each).sequences for each in (long, short)]
    batch = collate([[(0, rows[0])], [(1, rows[1])]], padded=True, pad=tokenizer.pad_token_id)
    stops = (batch.labels == tokenizer.eos_token_id).sum(1).tolist()
    assert stops == [2, 1]
    assert batch.trained == sum(each.targets for row in rows for each in row)
    assert (batch.labels[batch.documents < 0] == -100).all()


def test_a_template_that_never_stops_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ '<eos>' }}", "")
    with pytest.raises(ConfigError, match=r"rows.jsonl:7: the assistant's turn ends with .*eos_token"):
        encoded(tokenizer, {"messages": TALKS["single"]})


def test_turns_that_a_template_alters_are_not_trained() -> None:
    """An earlier turn without the thoughts that the model wrote there is no example of what it is to write."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "message['content'] }}", "('~' if loop.last and message['role'] == 'assistant' else '') + message['content'] }}"
    )
    row = encoded(tokenizer, {"messages": TALKS["multi"]})
    assert trained_text(tokenizer, row) == ["~So it is<eos>"]
    assert row.facts["altered_turns"] == 1


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_by_name(name: str) -> None:
    tokenizer = tiny_tokenizer()
    example = read_example(Raw("a:1", {"messages": TALKS["multi"]}), None, "chat")
    [row] = Encoder(tokenizer, "chat", name, "assistant", 512).encode([example])
    assert trained_text(tokenizer, row) == ["Hello you<eos>", "So it is<eos>"]


def test_rows_are_cut_and_counted() -> None:
    tokenizer = tiny_tokenizer()
    cut = encoded(tokenizer, {"messages": TALKS["single"]}, length=14)
    assert (len(cut.sequences[0]), cut.facts["cut"]) == (14, 1)
    lost = encoded(tokenizer, {"messages": TALKS["single"]}, length=6)
    assert (len(lost.sequences[0]), lost.facts["too_long"], lost.facts["cut"]) == (0, 1, 0)


NOTES = """\
{%- for message in messages -%}
{{ '<' + message['role'] + '>' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' + ('one ' if CONDITION else '') }}{% endif -%}
"""
"""A prompt for an answer has a word more, where a condition on the question holds; the text of all turns has it not."""
OWN = {
    "tiny": TEMPLATE,
    "trimmed": TEMPLATE.replace("message['content'] }}", "message['content'] | trim }}"),
    "altered": TEMPLATE.replace(
        "message['content'] }}", "('~' if loop.last and message['role'] == 'assistant' else '') + message['content'] }}"
    ),
    "asked for words": NOTES.replace("CONDITION", "'/no' in messages[-1]['content']"),
    "asked for more": NOTES.replace("CONDITION", "messages[-1]['content'] | length > 20"),
    **TEMPLATES,
}
SAID = [
    "one two", "x", " blanks\n", "one two three four five", "one /no", "two</think>three", "<think>a</think>\n\nb",
    "{{ x }}\n<|im_end|>", "0", "<tool_response>a</tool_response>",
]  # fmt: skip


EACH = "{% for m in messages %}NODES{% endfor %}"
READ = {
    "{{ messages[0].content | trim }}": (),
    EACH.replace("NODES", "{% set c = m.content %}{% if '</a>' in c %}{{ c.split('</a>')[-1] }}{% endif %}"): ("</a>",),
    "{{ messages[0].content.replace('a', 'b') }}": ("a",),
    "{{ messages[0].content[:3] }}": None,
    "{{ messages[0].content | upper }}": None,
    "{{ messages[0].content.strip('x') }}": None,
    "{{ messages[0].content | length }}": None,
    "{{ messages[0] }}": None,
    "{{ messages[0].content == messages[1].content }}": None,
    "{% set ns = namespace(a='') %}" + EACH.replace("NODES", "{{ ns.a | upper }}{% set ns.a = m.content %}"): None,
    "{% macro say(x) %}{{ x | upper }}{% endmacro %}{{ say(messages[0].content) }}": None,
    EACH.replace("NODES", "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0] }}{% endif %}"): (),
    "{% if messages[0].content.x is string %}{% else %}{{ messages[0].content[0] }}{% endif %}": None,
    EACH.replace("NODES", "{{ loop.previtem.content | upper }}"): None,
    "{% for c in messages[0].content %}{{ c }}{% endfor %}": None,
    "{{ strftime_now('%d') }}": None,
}
"""What templates look for in words; None: more, or the time."""


@pytest.mark.parametrize("source", READ)
def test_what_a_template_does_with_words_is_read(source: str) -> None:
    from shardfold.tools.tune.data._template_words import words_looked_for

    wanted = READ[source]
    assert words_looked_for(source) == (None if wanted is None else frozenset(wanted))


def drawn(number: int, seed: int) -> list[list[Message]]:
    """Conversations of a few shapes."""
    draw, found = random.Random(seed), []
    for _ in range(number):
        first = [{"role": "system", "content": "Be good"}] if draw.random() < 0.1 else []
        turns = [
            {"role": role, "content": draw.choice(SAID if role == "user" else [*SAID, *["one two"] * 7])}
            for _ in range(draw.choice((1, 1, 1, 2)))
            for role in ("user", "assistant")
        ]
        found.append(first + turns)
    return found


@pytest.mark.parametrize(
    ("name", "asked"), [("asked for more", [*["one"] * 8, "one two three four five six"]), ("trimmed", [" one\n"] * 8)]
)
def test_words_are_not_taken_for_others_of_their_shape(name: str, asked: list[str]) -> None:
    """What is learned of short words is not believed of long ones where a template measures them, nor are blanks
    thought to be written where it trims them."""
    tokenizer, source = tiny_tokenizer(), OWN[name]
    known = ChatTemplate(tokenizer, source)
    for each in asked:
        messages = [{"role": "user", "content": each}, {"role": "assistant", "content": "one two"}]
        wanted = ChatTemplate(tokenizer, source).conversation(messages, 1, "assistant", where="a:1")
        assert known.conversation(messages, 1, "assistant", where="a:1") == wanted


@pytest.mark.parametrize("train_on", ["assistant", pytest.param("completion", marks=SOAK)])
def test_most_conversations_of_other_templates_are_rendered_once(train_on: Any) -> None:
    """Where it cannot be told what a template does with words, each text is rendered and compared with its shape."""
    counts = same_as_alone(NOTES.replace("CONDITION", "messages[-1]['content'] | upper == 'ONE'"), train_on, 100)
    assert counts[-30:].count(1) >= 6 and 0 not in counts, counts


def same_as_alone(source: str, train_on: Any, number: int) -> list[int]:
    """Renderings that each conversation took; each has the spans that a template finds which has seen no other."""
    tokenizer, counts = tokenizer_of(source), []
    known = ChatTemplate(tokenizer, source)
    render = known.render

    def counted(*args: Any, **kwargs: Any) -> str:
        counts[-1] += 1
        return render(*args, **kwargs)

    known.render = counted  # type: ignore[method-assign]
    for messages in drawn(number, 3):
        begin = max(k for k, each in enumerate(messages) if each["role"] == "assistant")
        counts.append(0)
        try:
            wanted = ChatTemplate(tokenizer, source).conversation(messages, begin, train_on, where="a:1")
        except ConfigError:  # it knows no such turns
            continue
        assert known.conversation(messages, begin, train_on, where="a:1") == wanted, messages
    return counts


@pytest.mark.parametrize("train_on", ["assistant", *(pytest.param(k, marks=SOAK) for k in ("last", "completion"))])
@pytest.mark.parametrize("name", [*OWN])
def test_few_conversations_are_rendered(name: str, train_on: Any) -> None:
    """Text and what is trained in it are what rendering them turn by turn finds; many are not rendered, as soon as
    their shape is known, where the template writes words as they are."""
    counts = same_as_alone(OWN[name], train_on, 100)
    assert counts[-30:].count(0) >= (0 if name == "asked for more" else 6), counts


@pytest.mark.parametrize("train_on", ["assistant", pytest.param("completion", marks=SOAK)])
def test_shapes_are_tried(train_on: Any) -> None:
    """A template that does to each real question what it does not do to the words by which its shape is learned."""
    tokenizer = tiny_tokenizer()
    source = NOTES.replace("CONDITION", "messages[-1]['content'][:3] == 'one'")
    known = ChatTemplate(tokenizer, source)
    for number in range(12):
        messages = [{"role": "user", "content": f"one {number}"}, {"role": "assistant", "content": "one two"}]
        wanted = ChatTemplate(tokenizer, source).conversation(messages, 1, train_on, where="a:1")
        assert known.conversation(messages, 1, train_on, where="a:1") == wanted


@pytest.mark.soak
@pytest.mark.parametrize("train_on", ["assistant", "last", "completion"])
@pytest.mark.parametrize("name", [each.stem for each in sorted(FOLDER.glob("*.jinja"))] if FOLDER else [])
def test_few_conversations_are_rendered_in_templates_of_others(name: str, train_on: Any) -> None:
    assert FOLDER is not None
    same_as_alone((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), train_on, 300)


PARTS = [
    *("<|im_end|>", "{{ x }}", "{% if %}", "\n", "0", "None", "<think>", "</think>", "<tool_call>", "'", '"', "\\"),
    *("é", "🙂", "</s>", "<|eot_id|>", "user", "assistant", "/no_think", "<tool_response>", "a", "1.5", "[", "}"),
    *("image", "<eos>", "[INST]", "#", "-", "true"),
]


@pytest.mark.soak
@pytest.mark.parametrize("more", [0, 2])
def test_texts_that_are_not_rendered_are_those_of_the_template(more: int) -> None:
    """Of words that look like what templates are made of, in all templates of TRL that are read to write them as they
    are."""
    assert FOLDER is not None
    draw, calls = random.Random(5), list[Any]()
    speakers, quick = ["system"] * (more > 0) + ["user", "assistant"] * (1 + more // 2), 0

    class Counted(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            calls.append(args)
            return super().render(*args, **kwargs)

    for file in sorted(FOLDER.glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        known, fresh = (kind(tokenizer_of(source), source) for kind in (Counted, ChatTemplate))
        for _ in range(40 if known.plain else 0):
            words = ["".join(draw.choices(PARTS, k=draw.randrange(1, 6))).strip() or "x" for _ in speakers]
            talk: list[Message] = [{"role": r, "content": w} for r, w in zip(speakers, words, strict=True)]
            try:
                wanted = fresh.render(talk, where="a:1")
            except ConfigError:  # it knows no such turns
                break
            calls.clear()
            assert known.conversation(talk, len(talk) - 1, "assistant", where="a:1").text == wanted, (file.stem, talk)
            quick += not calls
    assert quick > 300
