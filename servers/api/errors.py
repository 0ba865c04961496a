"""Errors as OpenAI's API words them."""

from __future__ import annotations

import json

_KINDS = {404: "not_found_error", 503: "overloaded_error"}


class ApiError(Exception):
    """A refusal: HTTP status, a sentence for the user, and the parameter at fault if it is one."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def encoded(self) -> str:
        """The ``error`` object as JSON."""
        kind = _KINDS.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error})


def bad(message: str, param: str | None = None) -> ApiError:
    """A mistake in the request (400)."""
    return ApiError(400, message, param)
