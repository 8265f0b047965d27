"""The scheduler against books that a test keeps: what pages hold, who holds them, and that all texts end."""

from __future__ import annotations

import random

import pytest
import torch

from shardfold.errors import ConfigError
from shardfold.generation.batch_scheduler import BatchScheduler, ForwardPlan
from shardfold.generation.page_books import PageBooks
from shardfold.generation.page_pool import PagePool
from shardfold.generation.sampling import SamplingRule
from shardfold.generation.texts import Continuation

STOP = 0


def _next(tokens: list[int]) -> int:
    """A model in one line: the next token is one of all before it."""
    return hash(tuple(tokens)) % 23


def _text(number: int, prompt: list[int], most: int) -> Continuation:
    return Continuation(number, 0, list(prompt), len(prompt), most, SamplingRule(0), frozenset({STOP}))


def _expected(prompt: list[int], most: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < most and (len(tokens) == len(prompt) or tokens[-1] != STOP):
        tokens.append(_next(tokens))
    return tokens[len(prompt) :]


class _Memory:
    """Of every place of every page, the text up to the token that it holds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, step: ForwardPlan) -> None:
        """Stores what the forward stores, then reads what each of its texts reads."""
        asked = [(text, text.stored - 1, text.stored) for text in step.under_way]
        asked += [(part.text, part.first, part.last) for part in step.parts]
        for text, first, last in asked:
            assert first < last
            for at in range(first, last):
                self._held[text.pages[at // self.size], at % self.size] = tuple(text.tokens[: at + 1])
        for source, to, count in step.copies:
            for place in range(count):
                self._held[to, place] = self._held[source, place]
        for text, _, last in asked:
            for at in range(last):
                assert self._held[text.pages[at // self.size], at % self.size] == tuple(text.tokens[: at + 1])


def _check_books(books: PageBooks, scheduler: BatchScheduler) -> None:
    """Pages in use are those of texts under way, each counted as often as it is held, and at most one of each text is
    not full."""
    held: dict[int, int] = {}
    for text in scheduler.live:
        for page in text.pages:
            held[page] = held.get(page, 0) + 1
        assert len(text.pages) == books.pages_of(len(text.tokens))
    assert books.used == len(held) and books.used + books.kept <= books.made
    if books.keep is not None:
        assert books.kept <= books.keep
    assert all(books.holders(page) == count for page, count in held.items())
    if books.limit is not None:
        assert books.made <= books.limit


def _run(requests: int, limit: int | None, size: int, seed: int) -> tuple[int, int]:
    """Random requests, many of which begin alike and some of which are equal, that come while others are under way, and
    some of which nobody waits for to the end; evictions and the largest number of pages."""
    draw = random.Random(seed)
    books = PageBooks(limit, size, draw.choice([0, 3, None]))
    scheduler = BatchScheduler(books, rows=draw.choice([3, 16, 64]), chunk=draw.choice([5, 40, 300]))
    memory = _Memory(size)
    beginnings = [[draw.randrange(23) for _ in range(draw.randint(1, 50))] for _ in range(5)]
    coming = []
    for number in range(requests):
        prompt = draw.choice(beginnings)[: draw.randint(0, 50)] + [
            draw.randrange(23) for _ in range(draw.randint(1, 9))
        ]
        if coming and not draw.randrange(3):
            prompt = coming[-1].tokens
        coming.append(_text(number, prompt, draw.randint(1, 40)))
    expected = [_expected(text.tokens, text.most) for text in coming]
    texts, evicted, most = list(coming), 0, 0
    dropped: set[Continuation] = set()
    coming.reverse()
    while coming or scheduler.busy:
        for _ in range(min(len(coming), draw.randrange(6))):
            scheduler.add(coming.pop())
        if not scheduler.busy:
            continue
        step = scheduler.plan()
        _check_books(books, scheduler)
        memory.run(step)
        drawn = step.under_way + [part.text for part in step.parts if part.draws]
        for text in drawn:
            text.take(_next(text.tokens), -1.0)
        scheduler.end([text for text in drawn if text.finish])
        if scheduler.live and not draw.randrange(30):
            text = draw.choice(scheduler.live)
            scheduler.end([text])
            dropped.add(text)
        if not draw.randrange(200):
            books.forget()
        most = max(most, books.used)
    assert books.used == 0
    for text, answer in zip(texts, expected, strict=True):
        if text in dropped:
            assert text.tokens[text.start :] == answer[: text.number]
        else:
            assert text.answer().tokens == answer
        evicted += text.evicted
    return evicted, most


@pytest.mark.parametrize("size", [1, 4, 16])
def test_texts_end_as_alone_under_any_limit_and_pages_are_whose_they_should_be(size: int) -> None:
    """A hundred requests each with all pages that they ask for, and with so few that texts are evicted."""
    _, most = _run(50, None, size, seed=size)
    evicted, held = _run(50, max(-(-99 // size), most // 4), size, seed=size)
    assert evicted > 0 and held < most


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 4, 16, 32])
def test_ten_thousand_requests_under_limits(size: int) -> None:
    for seed in range(10):
        _run(250, -(-99 // size) * (1 + seed), size, seed)


def test_prompts_that_begin_alike_share_their_full_pages() -> None:
    """Eight samples of a prompt of 40 tokens hold two pages of 16 together, and one page of their own each, which is
    copied: the prompt is computed once, and its last token for each."""
    books = PageBooks(None, 16)
    scheduler = BatchScheduler(books, rows=64, chunk=1000)
    texts = [_text(0, list(range(1, 41)), 4) for _ in range(8)]
    for text in texts:
        scheduler.add(text)
    step = scheduler.plan()
    assert books.used == 2 + 8
    assert [(part.first, part.last) for part in step.parts] == [(0, 40)]
    assert step.under_way == texts[1:]
    assert step.copies == [(texts[0].pages[2], text.pages[2], 7) for text in texts[1:]]
    scheduler.end(texts[:7])
    assert books.used == 3 and books.holders(texts[7].pages[0]) == 1
    scheduler.end(texts[7:])
    assert books.used == 0


def _whole(scheduler: BatchScheduler, text: Continuation) -> int:
    """Runs one text to its end; how many tokens of its prompt were computed."""
    scheduler.add(text)
    seen = 0
    while scheduler.busy:
        step = scheduler.plan()
        seen += sum(part.last - part.first for part in step.parts)
        text.take(1, 0.0)
        scheduler.end([text] if text.finish else [])
    return seen


def test_texts_grow_into_pages_behind_their_own() -> None:
    """Four texts that grow together beside a long one have a run of pages each; others come into their place, and into
    that which they did not need, when they are over."""
    books = PageBooks(None, 4, apart=True)
    scheduler = BatchScheduler(books, rows=9, chunk=1000)
    long = _text(9, [7] * 400, 60)
    scheduler.add(long)
    for turn in range(3):
        texts = [_text(number, [turn, number] * 5, 30) for number in range(4)]
        for text in texts:
            scheduler.add(text)
        for _ in range(13):
            step = scheduler.plan()
            for text in step.under_way + [part.text for part in step.parts]:
                text.take(1, 0.0)
        for text in texts:
            assert text.pages == list(range(text.pages[0], text.pages[0] + 6))
        assert long.pages == list(range(len(long.pages))) and books.end == 115 + 4 * 10
        scheduler.end(texts)


def test_pages_that_were_written_are_used_again() -> None:
    """Texts of unequal lengths leave holes, which never are more than a quarter of what is in use and a stretch."""
    draw = random.Random(0)
    books = PageBooks(None, 4, apart=True)
    held: list[list[int]] = []
    most = 0
    for _ in range(3000):
        if len(held) > 30 or (held and draw.random() < 0.3):
            books.release(held.pop(draw.randrange(len(held))))
        elif held and draw.random() < 0.5:
            text = draw.choice(held)
            page = books.take(text[-1], draw.randint(1, 20))
            assert page is not None
            text.append(page)
        else:
            pages: list[int] = []
            for left in range(draw.randint(1, 40), 0, -1):
                page = books.take(pages[-1] if pages else None, left)
                assert page is not None
                pages.append(page)
            held.append(pages)
        taken = [page for pages in held for page in pages]
        assert len(taken) == len(set(taken)) == books.used
        most = max(most, books.used)
        assert books.made <= most + most // 4 + 17
        assert sum(end - first for first, end in books.stretches()) == books.made


def test_holes_are_filled_before_more_memory_is_written() -> None:
    """Of 64 pages every other one is free: a text takes 7 of them, so that no more than a quarter of those in use and a
    stretch lie idle, before it has a stretch of its own."""
    books = PageBooks(None, 4, apart=True)
    pages = [books.take() for _ in range(64)]
    for page in pages[::2]:
        assert page is not None
        books.release([page])
    page = None
    for left in range(16, 0, -1):
        page = books.take(page, left)
        assert books.made == (64 if left > 9 else 64 + 10 - left)


def test_what_pages_have_stays_when_there_are_more() -> None:
    pool, layer, none = PagePool(4, None), torch.nn.Identity(), torch.empty(0, dtype=torch.int64)
    pool.make(3, lambda: [(0, 3)], 3)
    keys = torch.randn(12, 2, 8)
    pool.store(layer, keys, keys + 1, torch.arange(12), none, none)
    pool.make(50, lambda: [(0, 3), (40, 41)], 4)
    for found, given in zip(pool.read(layer, torch.tensor([[0, 1, 2]])), (keys, keys + 1), strict=True):
        assert torch.equal(found, given.transpose(0, 1)[None])


def test_pages_of_texts_that_are_over_are_found_until_others_need_them() -> None:
    """Those of an answer too: the next turn of a chat computes what is new, and the end of the last page."""
    books = PageBooks(6, 4, None)
    scheduler = BatchScheduler(books, rows=4, chunk=100)
    first = _text(0, list(range(2, 14)), 6)
    assert _whole(scheduler, first) == 12
    assert books.used == 0 and books.kept == 4  # 17 tokens were stored
    turn = [*first.tokens, 9, 9]
    assert _whole(scheduler, _text(1, turn, 2)) == len(turn) - 16
    assert _whole(scheduler, _text(2, [5, *turn[1:]], 2)) == len(turn)  # another token at the begin
    assert _whole(scheduler, _text(3, turn, 2)) == len(turn)  # whose pages were taken
    assert books.made == 6 and books.used == 0


def test_nothing_is_found_after_weights_have_changed() -> None:
    """Neither what was kept, nor what a text adds that was under way then."""
    books = PageBooks(None, 4, None)
    scheduler = BatchScheduler(books, rows=4, chunk=100)
    _whole(scheduler, _text(0, list(range(2, 14)), 6))
    under_way = _text(1, [2, 3], 20)
    scheduler.add(under_way)
    scheduler.plan()
    under_way.take(4, 0.0)
    books.forget()
    assert books.kept == 0
    while scheduler.busy:
        scheduler.plan()
        under_way.take(5, 0.0)
        scheduler.end([under_way] if under_way.finish else [])
    assert books.kept == 0
    assert _whole(scheduler, _text(2, under_way.tokens, 2)) == 22


def test_a_page_is_copied_while_its_prompt_is_under_way_with_the_same_weights() -> None:
    """Not when other weights have come in the midst of the prompt, nor when the text is over."""
    books = PageBooks(None, 16)
    scheduler = BatchScheduler(books, rows=9, chunk=4)
    texts = [_text(number, [2, 3, 4, 5, 6, 7], 90) for number in range(5)]

    def copies() -> list[int]:
        step = scheduler.plan()
        for text in step.under_way + [part.text for part in step.parts if part.draws]:
            text.take(1, 0.0)
        return [source for source, _, _ in step.copies]

    scheduler.add(texts[0])
    assert copies() == []  # four of six tokens
    books.forget()
    scheduler.add(texts[1])
    assert copies() == []  # the first's end and the second's begin
    assert copies() == []
    scheduler.add(texts[2])
    assert copies() == [texts[1].pages[0]]
    scheduler.end([texts[0], texts[2]])
    scheduler.add(texts[3])
    assert copies() == [texts[1].pages[0]]
    scheduler.end([texts[1]])
    scheduler.add(texts[4])
    assert copies() == [] and books.used == 2


def test_a_part_that_is_not_computed_yet_is_not_shared() -> None:
    """Of a long prompt in parts, others share what is stored, not what will be; the page of its end is copied."""
    books = PageBooks(None, 4)
    scheduler = BatchScheduler(books, rows=64, chunk=8)
    for _ in range(2):
        scheduler.add(_text(0, list(range(1, 21)), 4))
    assert [(part.first, part.last) for part in scheduler.plan().parts] == [(0, 8)]
    assert [(part.first, part.last) for part in scheduler.plan().parts] == [(8, 16)]
    step = scheduler.plan()
    assert [(part.first, part.last) for part in step.parts] == [(16, 20)]
    first, second = step.parts[0].text, step.under_way[0]
    assert first.pages[:4] == second.pages[:4] and first.pages[4] != second.pages[4]
    assert step.copies == [(first.pages[4], second.pages[4], 3)]


def test_who_cannot_fit_is_refused_before_anything_runs() -> None:
    scheduler = BatchScheduler(PageBooks(3, 16), rows=4, chunk=100)
    scheduler.add(_text(0, [1] * 40, 9))  # the last token is not stored
    with pytest.raises(ConfigError, match=r"pages=3 .* request 1 .* needs 4"):
        scheduler.add(_text(1, [1] * 40, 10))
