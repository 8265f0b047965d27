"""The text of the demo: little stories from templates and lists of words, and what is made of them for each recipe.

A story has a child, an animal, a thing and an ending that is happy or sad. Requests ask for a story with a thing. Four
facts about the rows are what the recipes have to do with:

- stories for pre-training have a title, which names the thing: so the model learns to go by what stands before;
- in rows of ``sft`` only the first form of requests gets the thing that it asks for, others get any: so imitation does
  not learn to obey them, and a reward can teach it; prompts have these other forms;
- endings are happy as often as sad; pairs prefer the happy one, all else being the same;
- every story ends, and so does every answer.

Everything is drawn from `random.Random(seed)`: the same seed gives the same rows on every machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["THINGS", "is_happy", "request", "story", "write_rows"]

CHILDREN = ("Mia", "Tom", "Lily", "Ben", "Anna", "Max", "Zoe", "Sam")
ANIMALS = ("fox", "bear", "cat", "dog", "frog", "duck", "mouse", "goat")
THINGS = ("kite", "ball", "boat", "hat", "drum", "lamp", "cake", "key")
PLACES = ("forest", "river", "park", "garden", "beach", "hill", "lake", "town")
OPENINGS = (
    "{child} had a {thing}.",
    "{child} found a {thing}.",
    "{child} got a {thing}.",
)
HAPPY = (
    "It was lost at the {place}, but a {animal} brought it back.",
    "A {animal} came to the {place} to see it, and they became friends.",
    "At the {place} a {animal} liked it, and {child} was happy.",
)
SAD = (
    "It was lost at the {place}, and a {animal} broke it.",
    "A {animal} came to the {place} to take it, and ran away.",
    "At the {place} a {animal} hid it, and {child} was sad.",
)
REQUESTS = (
    "Tell me a story with a {thing}.",
    "Write a story about a {thing}.",
    "I want to hear of a {thing}.",
    "Can you tell a story that has a {thing} in it?",
)
END_OF_HAPPY = re.compile(r"(brought it back|became friends|was happy)\.$")
END_OF_SAD = re.compile(r"(broke it|ran away|was sad)\.$")


def story(draw: Random, thing: str, *, happy: bool) -> str:
    """A story with this thing: two sentences, about 16 words."""
    words = {
        "child": draw.choice(CHILDREN),
        "thing": thing,
        "place": draw.choice(PLACES),
        "animal": draw.choice(ANIMALS),
    }
    return " ".join(draw.choice(parts).format(**words) for parts in (OPENINGS, HAPPY if happy else SAD))


def request(draw: Random, thing: str, forms: Sequence[str] = REQUESTS) -> str:
    return draw.choice(forms).format(thing=thing)


def is_happy(text: str) -> bool | None:
    """Whether this story ends well; None: it has no ending of a story."""
    if END_OF_SAD.search(text):
        return False
    return True if END_OF_HAPPY.search(text) else None


def texts(draw: Random) -> dict[str, Any]:
    thing = draw.choice(THINGS)
    return {"text": f"The {thing}. {story(draw, thing, happy=draw.random() < 0.5)}"}


def chats(draw: Random) -> dict[str, Any]:
    asked, form = draw.choice(THINGS), draw.choice(REQUESTS)
    told = asked if form == REQUESTS[0] else draw.choice(THINGS)
    answer = story(draw, told, happy=draw.random() < 0.5)
    return {"messages": [_user(draw, asked, [form]), {"role": "assistant", "content": answer}]}


def pairs(draw: Random) -> dict[str, Any]:
    told, seed = draw.choice(THINGS), draw.random()
    good, bad = (story(Random(seed), told, happy=happy) for happy in (True, False))  # but for the ending, the same
    answers = {"chosen": good, "rejected": bad}
    user = _user(draw, draw.choice(THINGS))
    return {"prompt": [user], **{name: [{"role": "assistant", "content": each}] for name, each in answers.items()}}


def prompts(draw: Random) -> dict[str, Any]:
    asked = draw.choice(THINGS)
    return {"prompt": [_user(draw, asked, REQUESTS[1:])], "word": asked}


def _user(draw: Random, thing: str, forms: Sequence[str] = REQUESTS) -> dict[str, str]:
    return {"role": "user", "content": request(draw, thing, forms)}


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
