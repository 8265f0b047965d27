"""Paths, keys and limits: from a request to a job, and from its pieces to what the client gets."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shardfold.errors import did_you_mean
from shardfold.tools.serve._api_replies import ApiReply
from shardfold.tools.serve.answer_loop import AnswerJob, AnswerLoop, AnswerPiece
from shardfold.tools.serve.api_refusal import ApiRefusal
from shardfold.tools.serve.api_requests import AskedAnswer, read_chat, read_completion
from shardfold.tools.serve.text_ranks import TextRanks
from shardfold.tools.serve.web_guard import page_reply, read_json, stranger

__all__ = ["ServedModel", "WebApp"]

MOST_BODY = 4 * 2**20
BODY_SECONDS = 30.0
"""That a client has to send a body."""
LONG_PROMPT = 20_000
"""Characters from which on a prompt becomes tokens on another thread."""
RETRY = 2
"""Seconds that clients are told to wait when all places are taken."""

PAGE = Path(__file__).with_name("chat.html")
PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class ServedModel:
    """What clients may ask.

    Attributes:
        names: of the model, and of its adapters.
        tokenizer: a fast one of transformers.
        template: of conversations; None: there is none, so there are no conversations.
        first: token of a prompt that would have none; None: there is none.
        vocabulary: token numbers are less.
        capacity: tokens of a text, at most.
    """

    names: tuple[str, ...]
    tokenizer: Any
    template: str | None
    first: int | None
    vocabulary: int
    capacity: int


class WebApp:
    """Of ASGI.

    Args:
        model: what is served.
        ranks: asked for their figures only.
        most: texts that are under way or wait, at most; who asks for more is told to come again.
        host: address that is listened at; of this machine's own, other names in ``Host`` are refused.
        keys: that clients have to have one of; none: all may ask.
        cors: sites whose pages may ask.
    """

    def __init__(
        self,
        model: ServedModel,
        ranks: TextRanks,
        *,
        most: int,
        host: str,
        keys: Sequence[bytes] = (),
        cors: Sequence[str] = (),
    ) -> None:
        self._model, self._ranks, self._most = model, ranks, most
        self._host, self._keys, self._cors = host, tuple(keys), tuple(cors)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: AnswerLoop | None = None
        self._began = int(time.time())
        self.load = 0
        self.drains, self.failed = False, ""
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._guarded(self._metrics)),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._one_model)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completion), methods=["POST"]),
        ]
        middleware = [
            Middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["GET", "POST"], allow_headers=["*"])
        ]
        handlers: Any = {ApiRefusal: self._refused, HTTPException: self._not_found, ClientDisconnect: self._left}
        self._app = Starlette(routes=routes, middleware=middleware if cors else [], exception_handlers=handlers)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The event loop that it runs in."""
        self._loop = loop

    def connect(self, answers: AnswerLoop) -> None:
        """Who answers the jobs."""
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
            await send(message)

        refusal = stranger(scope, self._host, self._cors)
        if refusal is not None:
            await self._refusal(refusal)(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    # -- from the thread that has the model

    def tell(self, told: list[tuple[AnswerJob, AnswerPiece | None]]) -> None:
        """What came of jobs."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the sockets are closed
            self._loop.call_soon_threadsafe(self._hear, told)

    def _hear(self, told: list[tuple[AnswerJob, AnswerPiece | None]]) -> None:
        for job, piece in told:
            if piece is not None:
                job.pieces.append(piece)
            job.wake()

    # -- who may ask

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            if self._keys:
                kind, _, key = request.headers.get("authorization", "").partition(" ")
                given = key.strip().encode()
                known = [hmac.compare_digest(given, each) for each in self._keys]
                if kind.lower() != "bearer" or not any(known):
                    raise ApiRefusal(
                        "the key is missing or wrong: send 'Authorization: Bearer KEY', as api_key of clients does.",
                        code="invalid_api_key",
                        status=401,
                    )
            return await endpoint(request)

        return guarded

    # -- refusals

    @staticmethod
    def _refusal(refusal: ApiRefusal) -> Response:
        headers = {"Retry-After": str(refusal.retry)} if refusal.retry else {}
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (408, 413):
            headers["Connection"] = "close"  # there may be more of the body, which nobody reads
        return Response(refusal.body(), refusal.status, headers, "application/json")

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiRefusal)
        return self._refusal(error)

    async def _left(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # which nobody gets

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:100]
        said = f"there is nothing at {path!r}.{did_you_mean(path, PATHS)}"
        if error.status_code == 405:
            said = f"{path!r} is not asked by {request.method}."
        return self._refusal(ApiRefusal(said, code="not_found", status=error.status_code))

    # -- what is told without the model

    async def _page(self, request: Request) -> Response:
        return Response(*PAGE_REPLY, media_type="text/html")

    async def _health(self, request: Request) -> Response:
        said = self.failed or ("ends" if self.drains else "ok")
        return Response(json.dumps({"status": said}), 200 if said == "ok" else 503, media_type="application/json")

    async def _models(self, request: Request) -> Response:
        listed = {"object": "list", "data": [self._told(name) for name in self._model.names]}
        return Response(json.dumps(listed), media_type="application/json")

    async def _one_model(self, request: Request) -> Response:
        told = self._told(self._known(request.path_params["name"]))
        return Response(json.dumps(told), media_type="application/json")

    def _told(self, name: str) -> Mapping[str, Any]:
        return {"id": name, "object": "model", "created": self._began, "owned_by": "shardfold"}

    def _known(self, name: str) -> str:
        if name not in self._model.names:
            near = did_you_mean(name[:100], self._model.names)
            raise ApiRefusal(f"there is no model {name[:100]!r}.{near}", "model", "model_not_found", status=404)
        return name

    async def _metrics(self, request: Request) -> Response:
        steps = self._answers.steps if self._answers is not None else 0
        gauges = {
            "texts": ("texts under way or waiting", self.load),
            "texts_most": ("texts that there may be", self._most),
            "pages_used": ("pages of keys and values in use on the first rank", self._ranks.used_pages),
            "pages": ("pages of keys and values on each rank", self._ranks.pages),
            "page_bytes": ("bytes of a page", self._ranks.page_bytes),
        }
        counters = {
            "steps": ("forwards of the model", steps),
            "weights": ("changes of weights", self._ranks.weights),
            "prompt_tokens": ("tokens of prompts that were accepted", self.counts["prompt_tokens"]),
            "generated_tokens": ("tokens that were generated", self.counts["generated_tokens"]),
            "answers": ("answers that are whole", self.counts["answers"]),
            "cancelled": ("jobs whose clients left", self.counts["cancelled"]),
        }
        lines = []
        for kind, values, end in (("gauge", gauges, ""), ("counter", counters, "_total")):
            for name, (words, value) in values.items():
                full = f"shardfold_{name}{end}"
                lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}", f"{full} {value}"]
        lines += ["# HELP shardfold_responses_total responses by status", "# TYPE shardfold_responses_total counter"]
        lines += [
            f'shardfold_responses_total{{status="{status}"}} {count}' for status, count in sorted(self.statuses.items())
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # -- answers

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, read_completion)

    async def _answer(self, request: Request, read: Callable[[Mapping[str, Any]], AskedAnswer]) -> Response:
        self._check_open()
        asked = read(await read_json(request, MOST_BODY, BODY_SECONDS))
        model = self._known(asked.model)
        size = sum(len(each) for each in asked.prompts) + sum(len(each["content"]) for each in asked.messages)
        prompts = await asyncio.to_thread(self._tokens, asked) if size > LONG_PROMPT else self._tokens(asked)
        for number, prompt in enumerate(prompts):
            if max(prompt) >= self._model.vocabulary:
                raise ApiRefusal(
                    f"prompt {number} has the token {max(prompt)}, but the model has {self._model.vocabulary} tokens.",
                    "messages" if asked.is_chat else "prompt",
                    "invalid_value",
                )
        most = [self._most_of(asked, len(prompt)) for prompt in prompts]
        job = AnswerJob(asked, prompts, most, None if model == self._model.names[0] else model)
        self._check_open()
        if job.texts > self._most:
            raise ApiRefusal(
                f"{job.texts} answers are asked for at once, but this server has places for {self._most}: ask for "
                "fewer.",
                "n",
                "invalid_value",
            )
        if self.load + job.texts > self._most:
            raise ApiRefusal("all places are taken: ask again soon.", code="queue_full", status=429, retry=RETRY)
        return _AnswerResponse(self, job, model)

    def _check_open(self) -> None:
        if self.failed or self.drains:
            raise ApiRefusal("this server ends: ask another.", code="unavailable", status=503, retry=RETRY)

    def _tokens(self, asked: AskedAnswer) -> list[list[int]]:
        """Of each prompt.

        Raises:
            ApiRefusal: the template refuses the conversation, or a prompt is none.
        """
        from jinja2 import TemplateError

        model = self._model
        try:
            if not asked.is_chat:
                return [self._prompt(number, each) for number, each in enumerate(asked.prompts)]
            if model.template is None:
                raise ApiRefusal(
                    "the model has no chat template, so it knows no conversations: ask /v1/completions, or start the "
                    "server with --template.",
                    "messages",
                    "no_chat_template",
                )
            text = model.tokenizer.apply_chat_template(
                [dict(each) for each in asked.messages],
                chat_template=model.template,
                add_generation_prompt=True,
                tokenize=False,
            )
            text.encode()  # which raises where it is no text
            found = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        except TemplateError as error:
            raise ApiRefusal(f"the chat template says: {str(error)[:300]}", "messages", "invalid_value") from None
        except UnicodeEncodeError:
            raise ApiRefusal("a text has half of a character (a lone surrogate).", code="invalid_value") from None
        if not found:
            raise ApiRefusal("the conversation has no tokens.", "messages", "invalid_value")
        return [found]

    def _prompt(self, number: int, given: str | tuple[int, ...]) -> list[int]:
        model = self._model
        if isinstance(given, str):
            given.encode()  # which raises where it is no text
            found = model.tokenizer(given)["input_ids"] or ([model.first] if model.first is not None else [])
            if not found:
                raise ApiRefusal(f"prompt {number} has no tokens.", "prompt", "invalid_value")
            return found
        return list(given)

    def _most_of(self, asked: AskedAnswer, prompt: int) -> int:
        room = self._model.capacity - prompt
        most = asked.most if asked.most is not None else max(1, room)
        if most > room:
            param = "messages" if asked.is_chat else "prompt"
            raise ApiRefusal(
                f"a text has {self._model.capacity} tokens here at most, but the prompt has {prompt} and up to {most} "
                "more are asked for: give a shorter prompt, or a smaller max_tokens.",
                param if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        return most

    # -- of one answer

    def begin(self, job: AnswerJob) -> None:
        assert self._answers is not None
        self.load += job.texts
        self.counts["prompt_tokens"] += sum(len(prompt) for prompt in job.prompts)
        self._answers.put("answer", job)

    def end(self, job: AnswerJob, reply: ApiReply) -> None:
        assert self._answers is not None
        self.load -= job.texts
        self.counts["generated_tokens"] += reply.tokens
        self.counts["answers"] += reply.whole
        if not reply.is_whole and job.failure is None:
            self.counts["cancelled"] += 1
            self._answers.put("forget", job)


class _AnswerResponse(Response):
    """An answer, whole or as it comes; who does not wait for it any more has no text under way."""

    def __init__(self, app: WebApp, job: AnswerJob, model: str) -> None:
        self.status_code, self.background = 200, None
        self._web, self._job, self._reply = app, job, ApiReply(job, model)
        self._more = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._job.wake = self._more.set
        self._web.begin(self._job)
        gone = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(
            self._stream(send) if self._job.asked.stream else self._whole(scope, receive, send)
        )
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            self._web.end(self._job, self._reply)
        if work.done() and not work.cancelled():
            work.result()

    async def _pieces(self) -> list[AnswerPiece]:
        """Those that came since; none: there will be none."""
        job = self._job
        while not job.pieces and job.failure is None:
            self._more.clear()
            await self._more.wait()
        found = [*job.pieces]
        job.pieces.clear()
        for piece in found:
            self._reply.take(piece, keep=not job.asked.stream)
        return found

    async def _whole(self, scope: Any, receive: Any, send: Any) -> None:
        while not self._reply.is_whole:
            if not await self._pieces():
                refusal = ApiRefusal(str(self._job.failure), code="server_error", status=500)
                await Response(refusal.body(), 500, media_type="application/json")(scope, receive, send)
                return
        await Response(self._reply.body(), 200, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not self._reply.is_whole:
            pieces = await self._pieces()
            if not pieces:
                refusal = ApiRefusal(str(self._job.failure), code="server_error", status=500)
                await _sent(send, b"data: " + refusal.body() + b"\n\n", more=False)
                return
            said = b"".join(self._reply.events(piece) for piece in pieces)
            if said:
                await _sent(send, said, more=True)
        await _sent(send, self._reply.last_events(), more=False)


async def _sent(send: Any, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


PAGE_REPLY = page_reply(PAGE.read_bytes())
