"""Paths, the token, and what each answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from shardfold.errors import did_you_mean
from shardfold.tools.board._asked_worker import AskedWorker
from shardfold.tools.board._run_control import RunControl, acts_of, chat_of
from shardfold.tools.board._run_details import RunDetails
from shardfold.tools.board._step_curves import AXES, StepCurves
from shardfold.tools.board.board_config import BoardConfig
from shardfold.tools.board.known_runs import KnownRuns
from shardfold.tools.board.recipe_forms import OWN, RecipeForm
from shardfold.tools.serve.api_refusal import ApiRefusal
from shardfold.tools.serve.web_guard import page_reply, read_json, stranger

__all__ = ["BoardApp"]

MOST_BODY = 2**20
BODY_SECONDS = 30.0
MOST_RUNS = 1000
"""Of one request."""
MOST_KEYS = 32
MOST_PIXELS = 4000
MOST_NUMBERS = 12_000_000
"""Numbers of curves in memory; beyond, those that were not looked at for the longest time go."""
PATIENCE = 0.5  # seconds for which one request reads files
LOOK = 0.5  # seconds from one look at whether who asked is there still to the next
PAGE = Path(__file__).with_name("page")
HEADER = "x-shardfold-board"
ACTS = ("stop", "stop-now", "resume", "chat")


class BoardApp:
    """Of ASGI.

    Args:
        config: which runs, and under which address.
        token: without which nobody is told anything.
    """

    def __init__(self, config: BoardConfig, token: str) -> None:
        self.token = token
        self._config = config
        self._cookie = "board-" + hashlib.blake2s(token.encode(), digest_size=6).hexdigest()
        self._files = _files_of_page()
        self._runs = KnownRuns(config.folders)
        self._curves: dict[str, StepCurves] = {}
        self._control = RunControl(self._runs.roots[0])
        self._checks, self._plans = AskedWorker(), AskedWorker()
        get = {
            "/api/runs": self._list,
            "/api/runs/{run}": self._run,
            "/api/runs/{run}/log": self._log,
            "/api/runs/{run}/samples": self._samples,
            "/api/curves": self._points,
            "/api/differences": self._differences,
            "/api/csv": self._csv,
            "/api/forms": self._forms,
        }
        post = {
            "/api/check": self._check,
            "/api/plan": self._plan,
            "/api/start": self._start,
            "/api/runs/{run}/{act}": self._act,
        }
        routes = [Route("/", self._page), Route("/page/{name}", self._file)]
        routes += [Route("/api/session", self._session, methods=["POST"])]
        routes += [Route(path, self._known(endpoint)) for path, endpoint in get.items()]
        routes += [Route(path, self._known(self._said(endpoint)), methods=["POST"]) for path, endpoint in post.items()]
        self._paths = ["/", *get, *post]
        handlers: Any = {ApiRefusal: _refused, HTTPException: self._not_found, ClientDisconnect: _left}
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The event loop that it runs in."""

    def close(self) -> None:
        """What was started for this board only ends; runs and servers of theirs go on."""
        self._checks.close()
        self._plans.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def closed(message: Any) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in CLOSED if name not in names),
                ]
            await send(message)

        root = self._config.root_path
        if root and scope["path"].startswith(root + "/"):  # a proxy that leaves it in
            scope = {**scope, "path": scope["path"][len(root) :]}
        refusal = stranger(scope, self._config.host, None)
        if refusal is not None:
            await _reply(refusal)(scope, receive, closed)
            return
        await self._app(scope, receive, closed)

    # -- who may ask

    def _is_known(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        tokens = [request.cookies.get(self._cookie, ""), given.strip() if kind.lower() == "bearer" else ""]
        return any([self._is_token(each) for each in tokens])

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def _known(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def known(request: Request) -> Response:
            if not self._is_known(request):
                raise ApiRefusal(
                    "the token is missing or wrong: open the address that the board printed when it began.",
                    code="no_token",
                    status=401,
                )
            return await endpoint(request)

        return known

    def _said(
        self, endpoint: Callable[[Request, dict[str, Any]], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def said(request: Request) -> Response:
            return await endpoint(request, await self._body(request))

        return said

    @staticmethod
    async def _body(request: Request) -> dict[str, Any]:
        """
        Raises:
            ApiRefusal: it is none, or a form of another page may have sent it.
        """
        if request.headers.get(HEADER) != "1":
            raise ApiRefusal("the header X-Shardfold-Board: 1 is missing.", code="no_header", status=403)
        return await read_json(request, MOST_BODY, BODY_SECONDS)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:100]
        said = f"there is nothing at {path!r}.{did_you_mean(path, self._paths)}"
        if error.status_code == 405:
            said = f"{path!r} is not asked by {request.method}."
        return _reply(ApiRefusal(said, code="not_found", status=error.status_code))

    async def _page(self, request: Request) -> Response:
        given = request.query_params.get("token")
        if given is not None:
            reply = RedirectResponse((self._config.root_path or "") + "/", status_code=303)
            if self._is_token(given):
                self._set_cookie(reply)
            return reply
        return Response(*page_reply(self._files["board.html"][0]), media_type="text/html")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            raise ApiRefusal("the page has no such file.", code="not_found", status=404)
        body, kind = self._files[name]
        return Response(body, 200, {"Cache-Control": "no-cache"}, kind)

    async def _session(self, request: Request) -> Response:
        given = (await self._body(request)).get("token")
        if not isinstance(given, str) or not self._is_token(given):
            raise ApiRefusal("that is not the token of this board.", "token", "no_token", status=401)
        reply = Response(status_code=204)
        self._set_cookie(reply)
        return reply

    def _set_cookie(self, reply: Response) -> None:
        path = self._config.root_path or "/"
        reply.set_cookie(self._cookie, self.token, path=path, httponly=True, samesite="strict", max_age=400 * 86400)

    # -- runs

    async def _list(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._runs.changes, request.query_params.get("after", ""))
        rows = [self._acting(row) for row in found["runs"]]
        return _json({**found, "runs": rows, "read_only": self._config.read_only})

    async def _run(self, request: Request) -> Response:
        run = request.path_params["run"]
        return _json(await asyncio.to_thread(self._told, run))

    def _told(self, run: str) -> dict[str, Any]:
        folder = self._folder(run)
        row, details = self._acting(self._runs.row(run)), RunDetails(folder)
        return {**row, **details.told(), "keys": self._of(run, folder).keys(), "chat": chat_of(folder)}

    def _acting(self, row: dict[str, Any]) -> dict[str, Any]:
        """With what can be done with it."""
        found: list[str] = []
        if not self._config.read_only:
            with suppress(ApiRefusal):  # it is gone by now
                found = acts_of(row, self._runs.folder(row["id"]))
        return {**row, "can": found}

    def _folder(self, run: str) -> Path:
        """
        Raises:
            ApiRefusal: there is no such run; of one that was refused behind its start, why.
        """
        if (why := self._control.refusal(run)) is not None:
            raise ApiRefusal(why, code="refused", status=410)
        return self._runs.folder(run)

    async def _log(self, request: Request) -> Response:
        folder = await asyncio.to_thread(self._folder, request.path_params["run"])
        after = _number(request, "after", None)
        return _json(await asyncio.to_thread(RunDetails(folder).log, _number(request, "rank", 0) or 0, after))

    async def _samples(self, request: Request) -> Response:
        folder = await asyncio.to_thread(self._folder, request.path_params["run"])
        return _json(await asyncio.to_thread(RunDetails(folder).samples, _number(request, "after", 0) or 0))

    async def _differences(self, request: Request) -> Response:
        folders = [self._runs.folder(run) for run in _several(request, "id", MOST_RUNS)]
        return _json({"rows": await asyncio.to_thread(_differences, folders)})

    # -- curves

    async def _points(self, request: Request) -> Response:
        runs, keys = _several(request, "id", MOST_RUNS), _several(request, "key", MOST_KEYS)
        by = request.query_params.get("by", "step")
        if by not in AXES:
            raise ApiRefusal(f"points are told by {', '.join(AXES)}, not by {by[:50]!r}.", "by", "invalid_value")
        pixels = min(MOST_PIXELS, max(1, _number(request, "pixels", 600) or 600))
        part = None
        if "from" in request.query_params or "to" in request.query_params:
            part = _float(request, "from", -1e300), _float(request, "to", 1e300)
        after = request.query_params.get("after", "")
        text = await asyncio.to_thread(self._curves_of, runs, keys, by, pixels, part, after)
        return Response(text, media_type="application/json")

    def _curves_of(
        self,
        runs: Sequence[str],
        keys: Sequence[str],
        by: str,
        pixels: int,
        part: tuple[float, float] | None,
        after: str,
    ) -> str:
        until = time.monotonic() + PATIENCE
        before = after.split("_") if after else []
        if len(before) != len(runs):
            before = []
        names = {key: json.dumps(key) for key in keys}
        series: list[str] = []
        cursors: list[str] = []
        read = 0.0
        for number, run in enumerate(runs):
            curves = self._curves.get(run) or self._of(run, self._runs.folder(run))
            curves.read_on(keys, by, until)
            if not curves.is_there:
                self._runs.folder(run)  # or is it gone with its file
            read += curves.share_read
            for key in keys:
                if before and part is None:
                    points = curves.since(before[number], key, by, pixels)
                else:
                    points = curves.whole(key, by, pixels, part)
                if points is not None:
                    head = f'"id":"{run}","key":{names[key]},"level":{points.level}'
                    whole = "true" if points.is_whole else "false"
                    series.append(f'{{{head},"whole":{whole},"points":{points.points}}}')
            cursors.append(curves.cursor)
        self._forget()
        share = read / len(runs) if runs else 1.0
        return f'{{"cursor":{json.dumps("_".join(cursors))},"read":{share:.4g},"series":[{",".join(series)}]}}'

    def _of(self, run: str, folder: Path) -> StepCurves:
        return self._curves.setdefault(run, StepCurves(folder))

    def _forget(self) -> None:
        used = sorted(list(self._curves.items()), key=lambda each: each[1].used)
        size = sum(each.num_numbers for _, each in used)
        for run, each in used:
            if size <= MOST_NUMBERS:
                break
            size -= each.num_numbers
            self._curves.pop(run, None)

    async def _csv(self, request: Request) -> Response:
        (run,), keys = _several(request, "id", 1), _several(request, "key", MOST_KEYS)
        folder = self._runs.folder(run)
        curves, name = self._of(run, folder), re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name)
        headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
        return StreamingResponse(curves.texts(["step", *keys]), 200, headers, "text/csv")

    # -- start and steer

    async def _forms(self, request: Request) -> Response:
        names = [] if self._config.read_only else RecipeForm.names()
        forms = {name: RecipeForm(name) for name in names}
        return _json({"recipes": {name: {"help": form.help, "fields": form.told()} for name, form in forms.items()}})

    async def _check(self, request: Request, given: dict[str, Any]) -> Response:
        recipe, settings = self._recipe_and_settings(given)
        told = await self._checks.ask("check", recipe=recipe, settings=settings)
        return _json({**told, "measures": self._config.measures})

    async def _plan(self, request: Request, given: dict[str, Any]) -> Response:
        recipe, settings = self._recipe_and_settings(given)
        gpus = self._config.gpus
        asked = asyncio.ensure_future(self._plans.ask("plan", recipe=recipe, settings=settings, gpus=gpus))
        while not asked.done():
            await asyncio.wait({asked}, timeout=LOOK)
            if not asked.done() and await request.is_disconnected():  # nobody waits for it any more
                asked.cancel()
                raise ClientDisconnect
        return _json(await asked)

    async def _start(self, request: Request, given: dict[str, Any]) -> Response:
        recipe, settings = self._recipe_and_settings(given)
        name, hostfile = _text(given, "name"), _text(given, "hostfile")
        return await self._begin(recipe, settings, name, hostfile)

    async def _begin(
        self, recipe: str, settings: Mapping[str, Any], name: str | None, hostfile: str | None = None
    ) -> Response:
        """
        Raises:
            ApiRefusal: the command would refuse the settings, or has done so.
        """
        await asyncio.to_thread(self._control.free, name)
        if hostfile is None:  # else what is there or not is so on other machines
            told = await self._checks.ask("check", recipe=recipe, settings=settings)
            if told["errors"]:
                first = told["errors"][0]
                raise ApiRefusal(first["sentence"], first["field"] or "settings", "refused")
        nested = RecipeForm(recipe).nested(settings)
        folder = await asyncio.to_thread(self._control.start, recipe, nested, name, hostfile)
        return _json({"id": self._runs.id_of(folder)})

    async def _act(self, request: Request, given: dict[str, Any]) -> Response:
        self._check_open()
        folder = await asyncio.to_thread(self._folder, request.path_params["run"])
        act = request.path_params["act"]
        if act in ("stop", "stop-now"):
            said = await asyncio.to_thread(partial(self._control.stop, folder, now=act == "stop-now"))
            return _json({"said": said})
        if act == "resume":
            recipe, settings = await asyncio.to_thread(self._control.rest_of, folder, _settings(given))
            name = _text(given, "name") or await asyncio.to_thread(self._control.rest_name, folder)
            return await self._begin(recipe, settings, name)
        if act == "chat":
            return _json(await asyncio.to_thread(self._control.chat, folder))
        raise ApiRefusal(f"runs do not {act[:50]!r}.{did_you_mean(act[:50], ACTS)}", code="not_found", status=404)

    def _check_open(self) -> None:
        if self._config.read_only:
            raise ApiRefusal("this board shows runs only (--read-only).", code="read_only", status=403)

    def _recipe_and_settings(self, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._check_open()
        recipe = _text(given, "recipe") or ""
        if recipe not in (names := RecipeForm.names()):
            near = did_you_mean(recipe[:100], names)
            raise ApiRefusal(f"there is no recipe {recipe[:100]!r}.{near}", "recipe", "invalid_value")
        return recipe, _settings(given)


CLOSED = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of every reply that says nothing else."""


def _files_of_page() -> dict[str, tuple[bytes, str]]:
    """By name what the page is made of, and what it is: no request names a path."""
    kinds = {".css": "text/css", ".js": "text/javascript", ".html": "text/html"}
    return {path.name: (path.read_bytes(), kinds[path.suffix]) for path in PAGE.iterdir() if path.suffix in kinds}


def _differences(folders: Sequence[Path]) -> list[dict[str, Any]]:
    flat = [RunDetails(folder).flat_settings() for folder in folders]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [{"key": key, "values": [each.get(key) for each in flat]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
        raise ApiRefusal(f"{name} is a text.", name, "invalid_value")
    return value


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    found = given.get("settings", {})
    if not isinstance(found, dict):
        raise ApiRefusal("settings are an object: names and values.", "settings", "invalid_value")
    for name in OWN:
        if name in found:
            raise ApiRefusal(f"{name} is given by the board itself: leave it out.", "settings", "invalid_value")
    return found


def _several(request: Request, name: str, most: int) -> list[str]:
    found = list(dict.fromkeys(each[:200] for each in request.query_params.getlist(name)))
    if not 0 < len(found) <= most:
        raise ApiRefusal(f"{name}= is given from once to {most} times.", name, "invalid_value")
    return found


def _number(request: Request, name: str, default: int | None) -> int | None:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 19):
        raise ApiRefusal(f"{name}= is a whole number.", name, "invalid_value")
    return int(given)


def _float(request: Request, name: str, default: float) -> float:
    try:
        found = float(request.query_params.get(name, default))
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise ApiRefusal(f"{name}= is a number.", name, "invalid_value")
    return found


def _json(found: Mapping[str, Any]) -> Response:
    return Response(
        json.dumps(_plain(found), ensure_ascii=False).encode(errors="replace"), media_type="application/json"
    )


def _plain(value: Any) -> Any:
    """JSON has no nan or inf."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not abs(value) <= 1e308 else value


def _reply(refusal: ApiRefusal) -> Response:
    headers = {"Connection": "close"} if refusal.status in (408, 413) else {}
    return Response(refusal.body(), refusal.status, headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiRefusal)
    return _reply(error)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody gets
