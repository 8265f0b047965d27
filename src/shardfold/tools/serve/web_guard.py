"""What pages and other machines may not do to a server: who asks for another site, too long bodies, foreign scripts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request

from shardfold.tools.serve.api_refusal import ApiRefusal, parsed_json
from shardfold.tools.serve.serve_config import is_loopback

__all__ = ["page_reply", "read_json", "stranger"]


def stranger(scope: Any, address: str, cors: Collection[str] | None = ()) -> ApiRefusal | None:
    """Why a request is not one that a browser may send for another site, or for another name of this machine.

    Args:
        scope: of ASGI.
        address: that is listened at; of this machine's own, other names in ``Host`` are refused.
        cors: sites whose pages may ask; None: of a server that has no such option.
    """
    headers = {name: value for name, value in scope["headers"] if name in (b"host", b"origin")}
    host = headers.get(b"host", b"").decode("latin-1")
    if is_loopback(address):
        name = urlsplit(f"//{host}").hostname if re.fullmatch(r"[\w.:\[\]-]+", host) else None
        if name is None or not (is_loopback(name) or name == address):
            return ApiRefusal(
                "this server listens on its own machine only and is asked under another name: ask localhost.",
                code="wrong_host",
                status=403,
            )
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and origin not in (cors or ()) and origin.partition("://")[2] != host:
        how = "." if cors is None else ": start it with --cors and the site's address."
        return ApiRefusal(f"pages of other sites may not ask this server{how}", code="wrong_origin", status=403)
    return None


async def read_json(request: Request, most: int, seconds: float) -> dict[str, Any]:
    """The object that is the body of a request, of ``most`` bytes, that comes within so many seconds.

    Raises:
        ApiRefusal: it is longer, does not come, or is none.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiRefusal(
            "the body is JSON: send 'Content-Type: application/json'.", code="unsupported_media_type", status=415
        )
    too_long = ApiRefusal(f"the body is longer than {most // 2**20} MiB.", code="request_too_large", status=413)
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise too_long
    found = bytearray()

    async def read() -> None:
        async for part in request.stream():
            found.extend(part)
            if len(found) > most:
                raise too_long

    try:
        await asyncio.wait_for(read(), seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise ApiRefusal(f"the body did not come within {seconds:g} s.", code="request_timeout", status=408) from None
    return parsed_json(bytes(found))


def page_reply(body: bytes) -> tuple[bytes, int, dict[str, str]]:
    """A page with a policy that lets run what is in it, or where that is none what the server has, and nothing else:
    body, status and headers."""

    def hashed(tag: bytes) -> str:
        inside = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
        return (
            " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in inside)
            or "'self'"
        )

    policy = (
        f"default-src 'none'; script-src {hashed(b'script')}; style-src {hashed(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return body, 200, headers
