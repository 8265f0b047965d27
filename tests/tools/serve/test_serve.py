"""The server answers as the model does alone, in OpenAI's form, and refuses by name what it does not do."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import copytree, which
from subprocess import PIPE
from typing import Any
from urllib.parse import urlsplit

import pytest

from shardfold.errors import ConfigError
from tests.tools.serve.support import (
    CHAT,
    COMPLETION,
    NAME,
    Served,
    alone,
    answered,
    asked,
    chunks,
    paced,
    request,
    served,
    spoken,
)
from tests.tools.tune.support import model_folder, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tiny"), scale=4.0)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as made:
        yield made


def test_a_token_that_the_model_has_no_row_for_is_refused(folder: Path, tmp_path: Path) -> None:
    """Written in a text, in a conversation, or as a number: the server answers the next one."""
    from transformers import AutoTokenizer

    larger = tmp_path / "larger"
    copytree(folder, larger)
    tokenizer = AutoTokenizer.from_pretrained(larger)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<beyond>"])
    tokenizer.save_pretrained(larger)
    with served(larger) as server:
        for said in (server.complete("a <beyond>"), server.complete([0, rows]), server.chat("<beyond>")):
            status, told = said
            assert status == 400 and f"the model has {rows} tokens" in told["error"]["message"]
        assert server.complete("a", max_tokens=2)[0] == 200


def test_a_cache_that_has_no_room_for_a_page_is_refused(folder: Path) -> None:
    said = r"cache: 1,000 bytes are less than a page of 16 tokens takes, [\d,]+ bytes"
    with pytest.raises(ConfigError, match=said), served(folder, cache=1000):
        pass


@cache
def _reference(folder: Path, text: str, most: int) -> str:
    return alone(folder, f"<user>{text}<assistant>", most)


def reference(server: Served, text: str, most: int) -> str:
    """What the model says greedily to a conversation of one turn."""
    return _reference(server.folder, text, most)


GET = "GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
TEXTS = ("one cat", "two dogs run", "x", "red and blue " * 3)


def test_who_does_not_stream_is_told_at_the_end(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sockets' thread has nothing to do for an answer that nobody reads before it is whole."""
    told: list[int] = []
    tell = server.app.tell

    def heard(pieces: Any) -> None:
        told.append(len(pieces))
        tell(pieces)

    monkeypatch.setattr(server.answers, "_tell", heard)
    status, said = server.complete("a cat", max_tokens=9, temperature=0)
    assert status == 200 and said["usage"]["completion_tokens"] == sum(told) > 1 and len(told) == 1


def test_answers_are_those_of_the_model_alone(server: Served) -> None:
    """Eight clients at once, chat and completions, whole and as a stream: each gets its own text."""

    for text in TEXTS:
        reference(server, text, 24)

    def ask(number: int) -> tuple[str, str]:
        text = TEXTS[number % 4]
        expected = reference(server, text, 24)
        if number % 2:
            found = chunks(
                server.url, CHAT, model=NAME, max_tokens=24, temperature=0, messages=[{"role": "user", "content": text}]
            )
            assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            return "".join(each["choices"][0]["delta"].get("content", "") for each in found), expected
        status, said = server.complete(f"<user>{text}<assistant>", max_tokens=24, temperature=0)
        assert status == 200, said
        return said["choices"][0]["text"], expected

    with ThreadPoolExecutor(8) as pool:
        for found, expected in pool.map(ask, range(16)):
            assert found == expected
    assert server.ranks.used_pages == 0


def test_n_seed_and_usage(server: Served) -> None:
    """Answers to one prompt differ, the same seed gives them again, and all tokens are counted."""
    fields: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 9}
    first, again = server.chat("one", **fields)[1], server.chat("one", **fields)[1]
    texts = [each["message"]["content"] for each in first["choices"]]
    assert texts == [each["message"]["content"] for each in again["choices"]]
    assert len(set(texts)) == 3
    assert [each["index"] for each in first["choices"]] == [0, 1, 2]
    usage = first["usage"]
    assert usage["prompt_tokens"] == 5 and usage["total_tokens"] == 5 + usage["completion_tokens"]
    assert usage["completion_tokens"] <= 27
    found = chunks(server.url, CHAT, model=NAME, messages=[{"role": "user", "content": "one"}], **fields,
                   stream_options={"include_usage": True})  # fmt: skip
    assert found[-1]["choices"] == [] and found[-1]["usage"] == usage
    for number, text in enumerate(texts):
        pieces = [each["choices"][0] for each in found[:-1] if each["choices"][0]["index"] == number]
        assert "".join(each["delta"].get("content", "") for each in pieces) == text
        assert pieces[-1]["finish_reason"] == first["choices"][number]["finish_reason"]


def test_log_probs_are_of_the_tokens_that_are_shown(server: Served) -> None:
    """Of each token its own and the likeliest, greedily the same one; those of a stop string are not there."""
    said = server.chat("one", temperature=0, max_tokens=12, logprobs=True, top_logprobs=3)[1]["choices"][0]
    content = said["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode("utf-8", "replace") == said["message"]["content"]
    for each in content:
        tops = each["top_logprobs"]
        assert tops[0]["token"] == each["token"] and tops[0]["logprob"] == pytest.approx(each["logprob"], abs=1e-5)
        assert [top["logprob"] for top in tops] == sorted((top["logprob"] for top in tops), reverse=True)
    text = said["message"]["content"]
    plain = [number for number, letter in enumerate(text) if letter.isascii() and number > 2]
    stop = text[plain[0]]
    stopped = server.chat("one", temperature=0, max_tokens=12, logprobs=True, stop=[stop])[1]["choices"][0]
    before = text[: text.find(stop)]
    assert stopped["message"]["content"] == before and stopped["finish_reason"] == "stop"
    raw = b"".join(bytes(each["bytes"]) for each in stopped["logprobs"]["content"])
    assert raw.decode("utf-8", "replace") == before


def test_completions_have_their_own_form(server: Served) -> None:
    """Several prompts, tokens as prompts, log-probabilities as lists."""
    tokens = server.model.tokenizer("cat")["input_ids"]
    status, said = server.complete([tokens, tokens], max_tokens=5, temperature=0, logprobs=2, n=2)
    assert status == 200 and said["object"] == "text_completion"
    assert len({each["text"] for each in said["choices"]}) == 1 and len(said["choices"]) == 4
    told = said["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == 5
    assert all(len(each) <= 2 for each in told["top_logprobs"])
    assert said["usage"]["prompt_tokens"] == 2 * len(tokens)


def test_a_text_begins_as_the_tokenizer_begins_it(tmp_path: Path) -> None:
    """With the token that the tokenizer puts in front of a text; a conversation with what the template has."""
    from tokenizers import processors

    folder, tokenizer = model_folder(tmp_path / "tiny", scale=4.0), tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<system> $A", special_tokens=[("<system>", 4)]
    )
    tokenizer.save_pretrained(folder)
    with served(folder) as server:
        text = server.complete("one", max_tokens=12, temperature=0)[1]
        chat = server.chat("one", max_tokens=12, temperature=0)[1]
    assert text["usage"]["prompt_tokens"] == len(tokenizer("one")["input_ids"]) == 4
    assert text["choices"][0]["text"] == alone(folder, "<system>one", 12)
    turns = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one"}], add_generation_prompt=True, return_dict=True
    )
    assert chat["usage"]["prompt_tokens"] == len(turns["input_ids"]) == 5
    assert chat["choices"][0]["message"]["content"] == alone(folder, "<user>one<assistant>", 12)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    (CHAT, {"logit_bias": {"5": 10}}, "logit_bias", "unsupported_parameter"),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
    (COMPLETION, {"echo": True}, "echo", "unsupported_parameter"),
    (COMPLETION, {"best_of": 2}, "best_of", "unsupported_parameter"),
    (CHAT, {"temprature": 1}, "temprature", "unknown_parameter"),
    (CHAT, {"temperature": "hot"}, "temperature", "invalid_value"),
    (CHAT, {"temperature": True}, "temperature", "invalid_value"),
    (CHAT, {"top_p": 0}, "top_p", "invalid_value"),
    (CHAT, {"n": 10**9}, "n", "invalid_value"),
    (CHAT, {"n": 100}, "n", "invalid_value"),
    (CHAT, {"max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
    (CHAT, {"stop": ["a", ""]}, "stop", "invalid_value"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]",
     "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, None, "invalid_value"),  # type: ignore[list-item]
    (CHAT, {"messages": [{"role": "user", "content": "a " * 200}]}, "messages", "context_length_exceeded"),
    (COMPLETION, {"prompt": [1, 10**6]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": [1, -1]}, "prompt", "invalid_value"),
    (COMPLETION, {"prompt": None}, "prompt", "missing_required_parameter"),
    (CHAT, {"model": "../../etc/passwd"}, "model", "model_not_found"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "code"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_done_is_refused_by_name(
    server: Served, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    usual: dict[str, Any] = {"messages": [{"role": "user", "content": "one"}]} if path == CHAT else {"prompt": "one"}
    status, said = asked(server.url, path, {"model": NAME, **usual, **fields})
    assert status == (404 if code == "model_not_found" else 400)
    assert said["error"]["param"] == param and said["error"]["code"] == code, said
    if code != "context_length_exceeded":
        assert (param or "half of a character").split(".")[-1].split("[")[0] in said["error"]["message"]


def test_what_changes_nothing_is_taken(server: Served) -> None:
    fields: dict[str, Any] = {
        "tools": None, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me",
        "response_format": {"type": "text"}, "metadata": {"a": "b"}, "stop": None, "seed": -3, "n": None,
    }  # fmt: skip
    assert server.chat("one", max_tokens=2, **fields)[0] == 200


def test_the_openai_package(server: Served) -> None:
    """Its clients: whole, streamed, asynchronous, errors of its classes."""
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "one cat"}]
    expected = reference(server, "one cat", 20)
    assert [each.id for each in client.models.list()] == [NAME]
    said = client.chat.completions.create(model=NAME, messages=messages, max_tokens=20, temperature=0)
    assert said.choices[0].message.content == expected
    stream = client.chat.completions.create(model=NAME, messages=messages, max_tokens=20, temperature=0, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in stream) == expected
    told = client.completions.create(model=NAME, prompt="<user>one cat<assistant>", max_tokens=20, temperature=0)
    assert told.choices[0].text == expected
    with pytest.raises(openai.BadRequestError, match="'tools' is not supported"):
        client.chat.completions.create(model=NAME, messages=messages, tools=[{"type": "function"}])  # type: ignore
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.chat.completions.create(model="gpt-4", messages=messages)

    async def many() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other:
            made = [
                other.chat.completions.create(model=NAME, messages=messages, max_tokens=20, temperature=0)
                for _ in range(4)
            ]
            whole = [each.choices[0].message.content for each in await asyncio.gather(*made)]
            stream = await other.chat.completions.create(
                model=NAME, messages=messages, max_tokens=20, temperature=0, stream=True
            )
            return [*whole, "".join([each.choices[0].delta.content or "" async for each in stream])]

    assert asyncio.run(many()) == [expected] * 5


def test_a_stream_of_the_openai_package_that_is_closed_is_cancelled(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    cancelled = server.app.counts["cancelled"]
    with paced(server, monkeypatch) as pace:
        pace.allow(2)
        messages: Any = [{"role": "user", "content": "one"}]
        with client.chat.completions.create(model=NAME, messages=messages, max_tokens=110, seed=1, stream=True) as said:
            next(said)
            until(lambda: pace.begun == 3)
        until(lambda: server.answers.waiting > 0, 20)
        pace.allow(1)
        until(lambda: server.app.load == 0 and server.ranks.used_pages == 0, 20)
    assert server.app.counts["cancelled"] == cancelled + 1


@pytest.mark.skipif(which("curl") is None, reason="there is no curl")
def test_curl_shows_a_stream_as_it_comes(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """``curl -N``: words are read while the answer is made, and the text is the right one."""
    expected = reference(server, "one", 12)
    command = ["curl", "-sN", f"{server.url}{CHAT}", "-H", "Content-Type: application/json", "-d", "@-"]
    text = ""
    with paced(server, monkeypatch) as pace, subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as curl:
        assert curl.stdin is not None and curl.stdout is not None
        curl.stdin.write(body_of(max_tokens=12, temperature=0, stream=True))
        curl.stdin.close()
        pace.allow(6)
        for line in curl.stdout:
            if line.startswith(b"data: {"):
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"].get("content", "")
            if text and pace.begun < 8:
                pace.allow(20)
        assert curl.wait(20) == 0
    assert text == expected and line == b"\n"


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_has_no_text_under_way_a_step_later(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Six long answers of one client, of which four are generated and two wait: after the second token it leaves."""
    steps, cancelled = server.answers.steps, server.app.counts["cancelled"]
    with paced(server, monkeypatch) as pace:
        place = urlsplit(server.url)
        with socket.create_connection((place.hostname, place.port), 60) as client:
            client.sendall(request(server.url, CHAT, body_of(n=6, max_tokens=110, seed=1, stream=stream)))
            pace.allow(2)
            until(lambda: pace.begun == 3)
            if stream:
                assert client.recv(16)
            assert server.ranks.used_pages >= 4
        until(lambda: server.answers.waiting > 0, 20)  # where it is said that the client has left
        pace.allow(1)
        until(lambda: server.ranks.used_pages == 0, 20)
        assert server.answers.steps == steps + 3
        values = metrics(server)
        assert values["shardfold_texts"] == values["shardfold_pages_used"] == "0"
        assert values["shardfold_cancelled_total"] == str(cancelled + 1)
    assert server.chat("one", max_tokens=2)[0] == 200


def until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": NAME, "messages": [{"role": "user", "content": "one"}], **fields}).encode()


def hostile(server: Served) -> dict[str, tuple[bytes, ...]]:
    """Requests that are none, by name, as the pieces in which they are sent."""
    head = request(server.url, CHAT, b"").removesuffix(b"Content-Length: 0\r\n\r\n")
    return {
        "giant body": (head + b"Content-Length: 99999999999\r\n\r\n", b"x" * 65536),
        "giant body, length unsaid": (
            head + b"Transfer-Encoding: chunked\r\n\r\n", *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 80
        ),
        "broken JSON": (request(server.url, CHAT, b'{"model": '),),
        "deep JSON": (request(server.url, CHAT, b"[" * 100_000),),
        "no object": (request(server.url, CHAT, b"[1]"),),
        "no number": (request(server.url, CHAT, body_of().replace(b"}]", b'}], "top_p": NaN')),),
        "number without end": (request(server.url, CHAT, body_of().replace(b"}]", b'}], "seed": ' + b"9" * 10_000)),),
        "header bomb": (head + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in range(100)) + b"\r\n",),
        "garbage behind a request": (
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"\x00\xff garbage\r\n\r\n" * 100,
        ),
        "other type": (request(server.url, CHAT, body_of(), kind="text/plain"),),
        "other host": (
            b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        ),
        "other site": (request(server.url, CHAT, body_of(), "Origin: https://evil.example"),),
        "path out": (b"GET /v1/models/..%2f..%2fetc HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",),
        "no path": (b"GET /admin HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",),
        "other method": (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",),
    }  # fmt: skip


STATUSES = {
    "giant body": 413, "giant body, length unsaid": 413, "other type": 415, "other host": 403, "other site": 403,
    "path out": 404, "no path": 404, "other method": 405, "garbage behind a request": 200,
}  # fmt: skip


def test_hostile_requests_get_an_error_each_and_others_their_answers(server: Served) -> None:
    """Whatever is sent: a status and a sentence; meanwhile a stream goes on, and its text is the right one."""
    expected = reference(server, "two dogs run", 100)
    found: list[str] = []

    def stream() -> None:
        messages = [{"role": "user", "content": "two dogs run"}]
        pieces = chunks(server.url, CHAT, model=NAME, messages=messages, max_tokens=100, temperature=0)
        found.append("".join(each["choices"][0]["delta"].get("content", "") for each in pieces))

    other = threading.Thread(target=stream)
    other.start()
    for name, sent in hostile(server).items():
        said = spoken(server.url, *sent, shut=False)
        if name == "giant body, length unsaid" and not said:
            continue  # reset while it was still being sent
        status, told = answered(said)
        assert status == STATUSES.get(name, 400), (name, said[:300])
        assert told.get("error", {}).get("message") or told, name
    other.join()
    assert found == [expected]


def test_slow_clients_hold_nobody(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that never ends, a head that never ends, a reader that never reads: others are answered meanwhile, and
    these are let go."""
    monkeypatch.setattr("shardfold.tools.serve._web_app.BODY_SECONDS", 0.5)
    monkeypatch.setattr("shardfold.tools.serve.web_side.HEAD_SECONDS", 0.5)
    place = urlsplit(server.url)
    whole = request(server.url, CHAT, body_of(max_tokens=100, stream=True))
    with (
        socket.create_connection((place.hostname, place.port), 60) as body,
        socket.create_connection((place.hostname, place.port), 60) as head,
        socket.create_connection((place.hostname, place.port), 60) as reader,
    ):
        body.sendall(whole[:-5])
        head.sendall(whole[:30])
        reader.sendall(whole)
        assert server.chat("one", max_tokens=5)[0] == 200
        assert b" 408 " in body.recv(65536)
        with pytest.raises(ConnectionResetError):
            assert head.recv(1) == b""
            raise ConnectionResetError
    until(lambda: server.app.load == 0 and server.ranks.used_pages == 0)


def test_who_reads_nothing_is_given_up(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer larger than what the sockets hold (220 tokens with 20 others each): the connection ends, although it
    is never read; others are answered meanwhile. Whether its last tokens were made before that is a matter of pace."""
    monkeypatch.setattr("shardfold.tools.serve.web_side.STALL_SECONDS", 0.5)
    server.web._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections that are made from now on
    place = urlsplit(server.url)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((place.hostname, place.port))
        fields = {"n": 2, "max_tokens": 110, "logprobs": True, "top_logprobs": 20, "stream": True}
        reader.sendall(request(server.url, CHAT, body_of(**fields)))
        assert server.chat("one", max_tokens=5)[0] == 200
        until(lambda: server.app.load == 0 and server.ranks.used_pages == 0)
        said = b""
        with suppress(ConnectionResetError):
            while part := reader.recv(65536):
                said += part
        assert b"data: " in said and b"[DONE]" not in said


def test_a_queue_that_is_full_says_when_to_come_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder, rows=1, queue=1) as small:
        place = urlsplit(small.url)
        with (
            paced(small, monkeypatch) as pace,
            socket.create_connection((place.hostname, place.port), 60) as first,
        ):
            first.sendall(request(small.url, CHAT, body_of(n=2, max_tokens=100, stream=True)))
            pace.allow(1)
            assert first.recv(100)
            said = spoken(small.url, request(small.url, CHAT, body_of(max_tokens=1)), timeout=20)
            assert b" 429 " in said and b"retry-after" in said.lower()
        until(lambda: small.app.load == 0)
        assert small.chat("one", max_tokens=1)[0] == 200
        small.app.drains = True
        assert small.chat("one")[0] == 503
        assert (
            answered(spoken(small.url, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))[0]
            == 503
        )


def test_keys(folder: Path) -> None:
    with served(folder, keys=[b"first-key", b"second-key"]) as closed:
        fields = {"model": NAME, "prompt": "one", "max_tokens": 1}
        for header in (
            (),
            ("Authorization: Bearer wrong-key",),
            ("Authorization: first-key",),
            ("Authorization: Bearer ",),
        ):
            status, said = asked(closed.url, COMPLETION, fields, *header)
            assert status == 401 and said["error"]["code"] == "invalid_api_key"
        assert asked(closed.url, COMPLETION, fields, "Authorization: Bearer second-key")[0] == 200
        assert answered(spoken(closed.url, GET.format("/metrics").encode()))[0] == 401
        assert answered(spoken(closed.url, GET.format("/health").encode()))[0] == 200


def metrics(server: Served) -> dict[str, str]:
    """What a scraper reads."""
    said = spoken(server.url, GET.format("/metrics").encode()).decode()
    lines = [line for line in said.partition("\r\n\r\n")[2].splitlines() if not line.startswith("#")]
    return dict(line.rsplit(" ", 1) for line in lines)


def test_metrics_and_page(server: Served) -> None:
    """Figures that a scraper reads; a page whose policy lets nothing in that is not in it."""
    values = metrics(server)
    assert int(values["shardfold_steps_total"]) > 0 and values["shardfold_pages_used"] == "0"
    page = spoken(server.url, GET.format("/").encode()).decode()
    head, _, body = page.partition("\r\n\r\n")
    assert "default-src 'none'" in head and "unsafe" not in head
    assert "http://" not in body and "https://" not in body and "innerHTML" not in body
