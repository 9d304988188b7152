"""The routes under `/v1` and those around them: functions of the request, so FastAPI has nothing to solve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from hookline.plugins import engine_version
from hookline.serving import token_routes
from hookline.serving.accounting import json_response
from hookline.serving.deep_probe import DeepProbe
from hookline.serving.front import Front, ServedModel
from hookline.serving.metrics import CONTENT_TYPE
from hookline.serving.openapi import gives, takes
from hookline.serving.replies.call_response import CallResponse
from hookline.serving.requests.bodies import Body
from hookline.serving.requests.schema import ChatBody, CompletionsBody, DetokenizeBody, TokenizeBody
from hookline.serving.requests.validate import Validator
from hookline.serving.requests.validated import ValidatedCall

BODIES: list[type[Body]] = [ChatBody, CompletionsBody, TokenizeBody, DetokenizeBody]
_BODY_ERRORS = (408, 413, 415)


def make_router(front: Front) -> APIRouter:
    """All routes of `front` but the probes and the page."""
    router = APIRouter(default_response_class=Response)
    _add_calls(router, front)
    _add_models(router, front)
    _add_tokens(router, front)

    @router.get("/version", responses=gives("Version"))
    async def version(request: Request) -> Response:
        """The engine's version."""
        return json_response({"version": engine_version() or "unknown"})

    @router.get("/plugins", responses=gives("Plugins"))
    async def plugins(request: Request) -> Response:
        """The installed plugins and the state of each."""
        rows = [plugin.to_dict() for plugin in front.plugins]
        for row in rows:
            del row["reason"]  # which may name places of the machine
        return json_response({"plugins": rows})

    deep_probe = DeepProbe(front.engine)

    @router.get("/health/deep", responses=gives("DeepHealth"))
    async def deep_health(request: Request) -> Response:
        """Whether the engine gives a token, and how long that took."""
        front.open_model()
        return json_response(await deep_probe.ask(), headers={"cache-control": "no-store"})

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus."""
        return Response(front.metrics.render(), media_type=CONTENT_TYPE)

    return router


def _add_calls(router: APIRouter, front: Front) -> None:
    def chat_call(served: ServedModel, data: Mapping[str, Any], salt: str) -> ValidatedCall:
        return served.validator.chat(ChatBody.parse(data), salt)

    def completions_call(served: ServedModel, data: Mapping[str, Any], salt: str) -> ValidatedCall:
        return served.validator.completions(CompletionsBody.parse(data), salt)

    @router.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatBody),
        responses=gives("ChatCompletion", *_BODY_ERRORS, 429, streams=True),
    )
    async def chat_completions(request: Request) -> Response:
        """The model's answer to a conversation."""
        return CallResponse(front, chat_call, request)

    @router.post(
        "/v1/completions",
        openapi_extra=takes(CompletionsBody),
        responses=gives("Completion", *_BODY_ERRORS, 429, streams=True),
    )
    async def completions(request: Request) -> Response:
        """The model's continuation of texts or token ids."""
        return CallResponse(front, completions_call, request)


def _add_models(router: APIRouter, front: Front) -> None:
    @router.get("/v1/models", responses=gives("ModelList"))
    async def list_models(request: Request) -> Response:
        """The served model, once for each of its names."""
        served = front.known_model()
        return json_response(
            {"object": "list", "data": [_model_row(served, name) for name in served.validator.model_names]}
        )

    named = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}

    @router.get("/v1/models/{model_id:path}", openapi_extra={"parameters": [named]}, responses=gives("Model"))
    async def show_model(request: Request) -> Response:
        """The served model by one of its names."""
        served = front.known_model()
        return json_response(_model_row(served, served.validator.check_model(request.path_params["model_id"])))


def _add_tokens(router: APIRouter, front: Front) -> None:
    def add(path: str, body: type[Body], answer: str, work: Callable[[Any, Validator], object]) -> None:
        async def route(request: Request) -> Response:
            served = front.known_model()
            return await front.intake.read(
                request, lambda data: json_response(work(body.parse(data), served.validator))
            )

        router.add_api_route(
            path, route, methods=["POST"], name=path[1:], openapi_extra=takes(body),
            responses=gives(answer, *_BODY_ERRORS), response_class=Response,
        )  # fmt: skip

    add("/tokenize", TokenizeBody, "TokenizeAnswer", token_routes.tokenize)
    add("/detokenize", DetokenizeBody, "DetokenizeAnswer", token_routes.detokenize)

    @router.get("/tokenizer_info", responses=gives("TokenizerInfo"))
    async def tokenizer_info(request: Request) -> Response:
        """What a client needs to render and tokenise as the server does."""
        return json_response(token_routes.tokenizer_info(front.known_model().validator))


def _model_row(served: ServedModel, name: str) -> dict[str, object]:
    facts = served.facts
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "hookline",
        "root": facts.name,
        "parent": None,
        "max_model_len": facts.max_model_len,
        "context_length": facts.max_model_len,
        "architecture": facts.architecture,
        "plugin": facts.plugin,
    }
