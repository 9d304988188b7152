"""Errors as OpenAI's clients read them: a status, and a nested object with message, type, param and code."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hookline.errors import InvalidRequestError, ModelConfigError, NotEnoughMemoryError

_TYPES: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}
    | {503: "service_unavailable_error"}
)
_log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what was found, what was expected, what to do; fixed text and the client's own values alone.
        param: the field at fault.
        code: a word for programs, such as `context_length_exceeded`.
        retry_after: seconds after which it may go better.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """That go with the answer."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def body(self) -> dict[str, Any]:
        """The answer's JSON, also of an error event within a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """What a client is told of `error`: of a fault of ours only an id, under which the log has the rest."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.field or None, code="invalid_value")
    if isinstance(error, NotEnoughMemoryError):
        return ApiError(503, "The device has no room for what this request's options need.", retry_after=10)
    if isinstance(error, ModelConfigError):  # a template that was stopped
        return ApiError(400, "The model's chat template does not take these messages.", param="messages")
    error_id = secrets.token_hex(6)
    _log.error("error %s", error_id, exc_info=error)
    return ApiError(500, f"The server failed at this request. The log has it under the id {error_id}.", code=error_id)
