"""The command as a process: signals end it in good order, a trained model's published text comes over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.tools.serve.support import CHAT, COMPLETION, asked, process, request
from tests.tools.tune.support import model_folder

pytestmark = pytest.mark.soak

DATA = Path(os.environ.get("SHARDFOLD_TEST_DATA", "")) / "stories260K"
PUBLISHED = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. "
    "She wanted to play with it, but it was too high."
)
"""How llama2.c's doc/stories260K.md goes on behind "Once upon a time"."""


@pytest.mark.parametrize("more", [(), ("--procs", "2", "--layout", "zero3")], ids=["one", "ranks"])
def test_what_is_under_way_ends_and_nothing_new_begins(tmp_path: Path, more: tuple[str, ...]) -> None:
    """SIGTERM in the midst of a stream: it comes whole, who asks then is told 503, and the status is 0."""
    folder = model_folder(tmp_path / "tiny", scale=4.0, max_position_embeddings=256)
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "one"}]}
    with process(str(folder), *more) as (made, url):
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port), 200) as stream:
            body = json.dumps({**fields, "stream": True, "max_tokens": 100, "seed": 1, "n": 8}).encode()
            stream.sendall(request(url, CHAT, body))
            said = stream.recv(100)
            made.send_signal(signal.SIGTERM)
            status, refused = 200, {}
            while status == 200:  # until the signal has come
                status, refused = asked(url, CHAT, {**fields, "max_tokens": 1})
            assert status == 503 and refused["error"]["code"] == "unavailable"
            while more_said := stream.recv(65536):
                said += more_said
        assert b"[DONE]" in said
        assert made.stdout is not None
        said_last = made.stdout.read()
        assert made.wait(60) == 0, said_last


@pytest.mark.skipif("SHARDFOLD_TEST_DATA" not in os.environ, reason="SHARDFOLD_TEST_DATA names no folder of models")
def test_a_trained_models_published_text() -> None:
    with process(str(DATA)) as (_, url):
        fields = {"model": "stories260K", "prompt": "<s>Once upon a time", "max_tokens": 200, "temperature": 0}
        status, said = asked(url, COMPLETION, fields)
    assert status == 200
    assert said["choices"][0]["text"].startswith(PUBLISHED)
