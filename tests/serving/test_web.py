"""The page at `/` in headless Chromium: it streams, stops, shows load, and can be talked into nothing."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="the page is tried in a browser: pip install hookline[clients]")
import uvicorn
from fastapi import APIRouter, FastAPI
from playwright.sync_api import expect, sync_playwright
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from hookline.scheduling.output import Load, OutputDelta
from hookline.serving.metrics import CONTENT_TYPE, Metrics
from hookline.serving.process.messages import Report
from hookline.serving.web import DOCUMENT, document_headers, make_web_router
from tests.serving.test_metrics import make_facts

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
LAUNCH: dict[str, Any] = {"executable_path": CHROMIUM, "args": ["--no-sandbox", "--disable-gpu"]}
SECONDS = 15
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script> & "é😀"'


class FakeServer:
    """Answers as the real one does, in pieces that the test lets through."""

    def __init__(self) -> None:
        self.metrics = Metrics("vllm")
        self.metrics.set_facts(make_facts())
        self.bodies: list[dict[str, Any]] = []
        self.key = ""
        self.chunks: list[dict[str, Any] | None] = []  # None waits for `go`
        self.refusal: JSONResponse | None = None
        self.go = threading.Event()
        self.gone = threading.Event()

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.get("/v1/models")
        async def models(request: Request) -> Response:
            return self.locked(request) or JSONResponse({"data": [{"id": "tiny"}, {"id": "other"}]})

        @router.get("/metrics")
        async def metrics(request: Request) -> Response:
            return self.locked(request) or Response(self.metrics.render(), media_type=CONTENT_TYPE)

        @router.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            refusal = self.locked(request) or self.refusal
            self.bodies.append(await request.json())
            return refusal or StreamingResponse(self.stream(), media_type="text/event-stream")

        return router

    def locked(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "No."}}, 401)

    async def stream(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self.chunks:
                if chunk is not None:
                    for byte in f": comment\n\ndata: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode():
                        yield bytes([byte])  # a character of several bytes comes in pieces
                while chunk is None and not self.go.is_set():
                    await asyncio.sleep(0.01)
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone.set()
            raise


def piece(reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": None}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def address(fake: FakeServer) -> Iterator[str]:
    app = FastAPI()
    app.include_router(make_web_router())
    app.include_router(fake.router())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(SECONDS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(**LAUNCH)
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The page, opened; whatever it does, it asks nobody else and breaks no rule of its policy."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    requests, faults = listen(page)
    page.goto(address)
    yield page
    context.close()
    assert strangers(requests, address) == []
    assert faults == []


def listen(page: Any) -> tuple[list[Any], list[str]]:
    """All requests of a page of either API of Playwright, and its errors and breaches of its policy, as they come."""
    requests, faults = list[Any](), list[str]()
    page.on("request", lambda request: requests.append(request))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
    return requests, faults


def strangers(requests: list[Any], address: str) -> list[str]:
    """What was asked of anyone but the server at `address`."""
    return [request.url for request in requests if not request.url.startswith((address, "data:"))]


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


@needs_browser
def test_an_answer_streams_in_as_text(fake: FakeServer, page: Page) -> None:
    fake.chunks = [
        piece(role="assistant", content=""),
        piece(reasoning="Let me", reasoning_content="Let me"),
        piece(reasoning_content=" think"),
        piece(content="So: "),
        None,
        piece(content=MARKUP),
        piece("stop"),
        usage(7),
    ]
    ask(page, f"<b>Hi</b> {MARKUP}")
    answer = page.locator("article.assistant")
    expect(answer.locator(":scope > .text")).to_have_text("So: ")
    expect(answer).to_have_attribute("aria-busy", "true")
    assert page.get_by_role("button", name="Send").is_disabled()
    fake.go.set()
    expect(page.get_by_role("status")).to_contain_text("7 tokens in")
    expect(answer.locator(":scope > .text")).to_have_text(f"So: {MARKUP}")
    # What it thought is there, folded.
    thought = answer.locator(".reasoning .text")
    assert not thought.is_visible()
    answer.get_by_text("Reasoning").click()
    expect(thought).to_have_text("Let me think")
    # Nothing of it became markup.
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() == "tiny – Hookline"
    expect(page.locator("article.user .text")).to_have_text(f"<b>Hi</b> {MARKUP}")


@needs_browser
def test_options_and_the_conversation_are_sent(fake: FakeServer, page: Page) -> None:
    fake.chunks = [piece(content="One."), piece("stop")]
    page.get_by_text("Options").click()
    page.get_by_label("System text").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Model").select_option("other")
    for number in (1, 2):
        page.get_by_label("Message").fill("a")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("b")
        page.keyboard.press("Enter")
        expect(page.locator("article.assistant[aria-busy]")).to_have_count(0)
        expect(page.locator("article.assistant")).to_have_count(number)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("article")).to_have_count(0)
    page.get_by_label("Temperature").fill("")
    ask(page, "c")
    expect(page.locator("article.assistant:not([aria-busy])")).to_have_count(1)
    first, second, third = fake.bodies
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}
    assert first["messages"] == [system, question]
    assert second["messages"] == [system, question, {"role": "assistant", "content": "One."}, question]
    assert third["messages"] == [system, {"role": "user", "content": "c"}]
    assert (first["model"], first["temperature"], first["stream"]) == ("other", 0.5, True)
    assert "temperature" not in third


@needs_browser
@pytest.mark.parametrize("way", ["button", "key"])
def test_a_stopped_answer_is_aborted_and_kept(fake: FakeServer, page: Page, way: str) -> None:
    fake.chunks = [piece(content="Half"), None]
    ask(page, "a")
    expect(page.locator("article.assistant > .text")).to_have_text("Half")
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    assert fake.gone.wait(SECONDS), "the server was not told"
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    assert page.get_by_role("alert").count() == 0
    fake.chunks = [piece(content="Whole"), piece("stop")]
    ask(page, "b")
    expect(page.locator("article.assistant > .text").last).to_have_text("Whole")
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["a", "Half", "b"]


@needs_browser
def test_errors_are_shown_and_change_nothing(fake: FakeServer, page: Page) -> None:
    fake.refusal = JSONResponse({"error": {"message": "temperature is <i>9</i>"}}, 400)
    ask(page, "a")
    expect(page.get_by_role("alert")).to_have_text("temperature is <i>9</i>")
    fake.refusal = None
    fake.chunks = [piece(content="Some"), {"error": {"message": "the engine has died"}}]
    ask(page, "b")
    expect(page.get_by_role("alert").last).to_have_text("the engine has died")
    fake.chunks = [piece(content="Cut")]
    ask(page, "c")
    expect(page.get_by_role("alert").last).to_have_text("The answer broke off.")
    fake.refusal = JSONResponse(["no error object"], 500)
    ask(page, "d")
    expect(page.get_by_role("alert").last).to_have_text("The server answered with status 500.")
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == ["b", "Some", "c", "Cut", "d"]


@needs_browser
def test_a_key_is_asked_for_and_kept_in_the_tab(fake: FakeServer, browser: Browser, address: str) -> None:
    fake.key = "secret-key"
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    expect(page.get_by_role("status")).to_contain_text("wants an API key")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("secret-key")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Model")).to_have_value("tiny")
    expect(page.locator("#running")).to_have_text("0")  # the metrics want the key too
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("tiny")
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
    context.close()


@needs_browser
def test_load_is_live(fake: FakeServer, page: Page) -> None:
    report = Report(Load(running=3, waiting=12, used_blocks=90), deltas=[OutputDelta("a", 0, "", [1] * 500)])
    fake.metrics.take_report(report)
    expect(page.locator("#running")).to_have_text("3")
    expect(page.locator("#waiting")).to_have_text("12")
    expect(page.locator("#cache")).to_have_text("45 %")
    assert page.locator("#meter").evaluate("meter => meter.value") == 0.45
    fake.metrics.take_report(report)
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9]\d*\.\d$"))  # 500 tokens, about a second apart
    assert 100 < float(page.locator("#rate").inner_text()) < 1500


@needs_browser
def test_only_the_pages_own_script_runs(browser: Browser, address: str) -> None:
    """The policy holds even for markup that got into the page."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.injected = true";
            document.addEventListener("securitypolicyviolation", (event) => { window.refused = event.blockedURI; });
            document.body.append(script);
        }"""
    )
    page.wait_for_function("window.refused === 'inline'")
    assert page.evaluate("window.injected") is None
    context.close()


@needs_browser
def test_dark_and_light(page: Page) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(back)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(back) != light


def test_headers() -> None:
    headers = document_headers(DOCUMENT.read_bytes())
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    other = document_headers(b"<style></style><script>alert(1)</script>")
    assert other["content-security-policy"] != policy
