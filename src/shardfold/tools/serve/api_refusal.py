"""Why a request is not answered, in OpenAI's form, and bodies that are no JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

__all__ = ["ApiRefusal", "parsed_json"]


class ApiRefusal(Exception):
    """A request that is not answered, in OpenAI's form.

    Args:
        message: for people.
        param: which parameter it is about.
        code: for programs.
        status: of HTTP.
        retry: seconds after which it is worth to ask again; 0: it is not.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, *, status: int = 400, retry: int = 0
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.retry = param, code, status, retry

    def body(self) -> bytes:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": said}).encode()


def parsed_json(body: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
        ApiRefusal: it is none.
    """

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    try:
        found = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiRefusal(f"the body is no JSON: {why[:200]}.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiRefusal("the body is JSON, but no object: give {...} with the parameters.", code="invalid_json")
    return found
