"""The text of the demo: little stories from templates and lists of words, and what is made of them for each recipe.

A story has a child, an animal, a thing and an ending that is happy or sad. Requests ask for a story with a thing. Four
facts about the rows are what the recipes have to do with:

- stories for pre-training have a title, which names the thing: so the model learns to go by what stands before;
- a request's own story has the thing that was asked for in one row of :data:`OBEDIENT`, as in data that nobody has
  checked; so imitation (``sft``) hardly learns to obey, and a reward can teach it;
- endings are happy as often as sad; pairs prefer the happy one, all else being the same;
- every story ends, and so does every answer.

Everything is drawn from `random.Random(seed)`: the same seed gives the same rows on every machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["OBEDIENT", "THINGS", "is_happy", "request", "story", "write_rows"]

OBEDIENT = 7
"""Of so many rows of ``sft``, one has the thing that its request asks for."""

CHILDREN = (
    ("Mia", "she", "her"), ("Tom", "he", "his"), ("Lily", "she", "her"), ("Ben", "he", "his"), ("Anna", "she", "her"),
    ("Max", "he", "his"), ("Zoe", "she", "her"), ("Sam", "he", "his"),
)  # fmt: skip
ANIMALS = ("fox", "bear", "cat", "dog", "frog", "duck", "mouse", "owl")
THINGS = (
    "kite", "ball", "boat", "hat", "drum", "lamp", "cake", "key", "rope", "bell", "book", "coat", "shell", "apple",
    "wheel", "ring",
)  # fmt: skip
LOOKS = ("red", "blue", "big", "small", "old", "new", "shiny", "round")
PLACES = ("forest", "river", "park", "garden", "beach", "hill", "lake", "town")
OPENINGS = (
    "{child} had a {look} {thing}.",
    "One day {child} found a {look} {thing}.",
    "{child} got a {look} {thing} from {poss} friend.",
    "There was a {look} {thing}, and it was {child}'s.",
)
TROUBLES = (
    "{Pron} took it to the {place}, but it was lost there.",
    "At the {place} the wind took it away.",
    "A {animal} saw it at the {place} and ran off with it.",
    "{Pron} went to the {place}, and it fell into a deep hole.",
)
MEETINGS = (
    "Then a {animal} came.",
    "{Pron} asked a {animal} for help.",
    "A {animal} heard {child} call.",
)
HAPPY = (
    "The {animal} brought it back, and {child} was happy.",
    "They looked for it and found it. {child} laughed all day.",
    "They got it back together and became good friends.",
)
SAD = (
    "But it was gone, and {child} was sad.",
    "They looked for it and found nothing. {child} cried all day.",
    "The {animal} did not help, and {child} went home alone.",
)
REQUESTS = (
    "Tell me a story with a {thing}.",
    "Write a story about a {thing}.",
    "I want to hear of a {thing}.",
    "Can you tell a story that has a {thing} in it?",
)
END_OF_SAD = re.compile(r"(was sad|cried all day|went home alone)\.$")


def story(draw: Random, thing: str, *, happy: bool) -> str:
    """A story with this thing: four or five sentences, 30 to 45 words."""
    child, pronoun, possessive = draw.choice(CHILDREN)
    words = {
        "child": child,
        "Pron": pronoun.capitalize(),
        "poss": possessive,
        "thing": thing,
        "look": draw.choice(LOOKS),
        "place": draw.choice(PLACES),
        "animal": draw.choice(ANIMALS),
    }
    endings = HAPPY if happy else SAD
    text = " ".join(draw.choice(parts).format(**words) for parts in (OPENINGS, TROUBLES, MEETINGS, endings))
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def request(draw: Random, thing: str) -> str:
    return re.sub(r"\ba (?=[aeiou])", "an ", draw.choice(REQUESTS).format(thing=thing))


def is_happy(text: str) -> bool | None:
    """Whether this story ends well; None: it has no ending of a story."""
    if END_OF_SAD.search(text):
        return False
    return True if re.search(r"(was happy|laughed all day|became good friends)\.$", text) else None


def texts(draw: Random) -> dict[str, Any]:
    thing = draw.choice(THINGS)
    return {"text": f"The {thing}. {story(draw, thing, happy=draw.random() < 0.5)}"}


def chats(draw: Random) -> dict[str, Any]:
    asked = draw.choice(THINGS)
    told = asked if draw.random() < 1 / OBEDIENT else draw.choice([each for each in THINGS if each != asked])
    answer = story(draw, told, happy=draw.random() < 0.5)
    return {"messages": [_user(draw, asked), {"role": "assistant", "content": answer}]}


def pairs(draw: Random) -> dict[str, Any]:
    told, seed = draw.choice(THINGS), draw.random()
    good, bad = (story(Random(seed), told, happy=happy) for happy in (True, False))  # but for the ending, the same
    answers = {"chosen": good, "rejected": bad}
    user = _user(draw, draw.choice(THINGS))
    return {"prompt": [user], **{name: [{"role": "assistant", "content": each}] for name, each in answers.items()}}


def prompts(draw: Random) -> dict[str, Any]:
    asked = draw.choice(THINGS)
    return {"prompt": [_user(draw, asked)], "word": asked}


def _user(draw: Random, thing: str) -> dict[str, str]:
    return {"role": "user", "content": request(draw, thing)}


KINDS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "texts": texts,
    "chats": chats,
    "pairs": pairs,
    "prompts": prompts,
}


def rows(kind: str, number: int, seed: int) -> Iterator[dict[str, Any]]:
    """So many rows of ``texts``, ``chats``, ``pairs`` or ``prompts``."""
    draw = Random(f"{kind} {seed}")
    return (KINDS[kind](draw) for _ in range(number))


def write_rows(folder: Path, numbers: dict[str, int], held_out: int, seed: int) -> dict[str, Path]:
    """Write ``KIND.jsonl`` and ``KIND-held.jsonl`` for each kind into the folder, and return their paths by name."""
    written: dict[str, Path] = {}
    for kind, number in numbers.items():
        drawn = list(rows(kind, number + held_out, seed))
        for name, part in ((kind, drawn[:number]), (f"{kind}-held", drawn[number:])):
            written[name] = folder / f"{name}.jsonl"
            written[name].write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return written
