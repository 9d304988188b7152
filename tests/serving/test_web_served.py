"""The page at `/` of a real `engine serve`, which drafts and wants a key, in headless Chromium."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright", reason="the page is tried in a browser: pip install hookline[clients]")
from playwright.async_api import async_playwright, expect

from tests.glm5_2.models import GOLDEN_MODEL
from tests.serving.test_web import LAUNCH, listen, needs_browser, strangers
from tests.suites.raw_client import ask
from tests.suites.served import metric, serving, until_true

if TYPE_CHECKING:
    from playwright.async_api import Page

KEY = "the-key-of-the-page"
OPTIONS = (
    *("--num-speculative-tokens", "2", "--kv-cache-memory", "16MiB", "--max-model-len", "2048"),
    *("--api-key", KEY),
)
# The model thinks about sums, and goes on with the poem for more than a thousand tokens.
SUM, OTHER_SUM, POEM = "What is 47 + 38?", "What is 21 + 34?", "Write a poem about the sea."
MS = 30_000
# All texts of the last answer, as the page goes through them.
NOTE_STATES = """() => {
    window.states = [];
    const note = () => {
        const text = Array.from(document.querySelectorAll("article.assistant > .text")).at(-1)?.textContent;
        if (text && text !== window.states.at(-1)) window.states.push(text);
    };
    new MutationObserver(note).observe(document.getElementById("log"), { childList: true, subtree: true });
}"""
LONGER = """(than) => {
    const answer = Array.from(document.querySelectorAll("article.assistant")).at(-1);
    return answer.hasAttribute("aria-busy") && answer.querySelector(":scope > .text").textContent.length > than;
}"""


class Visitor:
    """Of the page; and a client of the API beside it.

    Attributes:
        requests, faults: all that the page has asked for, and done wrong.
    """

    def __init__(self, page: Page, port: int) -> None:
        self.page = page
        self.port = port
        self.answers = page.locator("article.assistant")
        self.requests, self.faults = listen(page)

    @property
    def sent(self) -> list[dict[str, Any]]:
        """The bodies of its questions."""
        return [body for request in self.requests if (body := request.post_data_json)]

    async def put(self, question: str) -> None:
        """Sends a question."""
        await self.page.get_by_label("Message").fill(question)
        await self.page.keyboard.press("Enter")

    async def answer(self) -> tuple[str, str]:
        """What the page shows of the last answer once it is whole: reasoning and text."""
        await expect(self.page.locator("article[aria-busy]")).to_have_count(0, timeout=MS)
        await expect(self.page.get_by_role("status")).to_have_text(re.compile(r"^\d+ tokens in "), timeout=MS)
        last = self.answers.last
        return (
            await last.locator(".reasoning .text").text_content() or "",
            await last.locator(":scope > .text").text_content() or "",
        )

    async def told(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """What the API gives for the same request, not streamed: reasoning and text."""
        same = {name: body[name] for name in ("model", "messages", "temperature")}
        reply = await ask(self.port, "/v1/chat/completions", same, KEY)
        message = reply.json["choices"][0]["message"]
        return message["reasoning_content"], message["content"]

    async def counted(self, name: str, **labels: str) -> float:
        """The sum of one of the server's metrics."""
        return metric((await ask(self.port, "/metrics", key=KEY)).body.decode(), name, **labels)

    async def rests(self) -> bool:
        """Whether the engine has nothing to do."""
        return not any((await ask(self.port, "/load", key=KEY)).json.values())


@asynccontextmanager
async def visit() -> AsyncIterator[Visitor]:
    """The page of a server of its own, opened; it asks nobody else and breaks no rule of its policy."""
    async with serving(GOLDEN_MODEL, *OPTIONS) as served, async_playwright() as playwright:
        browser = await playwright.chromium.launch(**LAUNCH)
        visitor = Visitor(await browser.new_page(), served.port)
        address = f"http://127.0.0.1:{served.port}/"
        await visitor.page.goto(address)
        yield visitor
        await browser.close()
        assert "Traceback" not in served.said
    assert strangers(visitor.requests, address) == []
    assert visitor.faults == []


async def give_key(visitor: Visitor) -> None:
    """The page asks for it, and has models and load from then on."""
    page = visitor.page
    await expect(page.get_by_role("status")).to_contain_text("wants an API key", timeout=MS)
    await expect(page.get_by_label("API key")).to_be_focused()
    await expect(page.locator("#running")).to_have_text("–")
    await page.keyboard.type(KEY)
    await page.keyboard.press("Tab")
    await expect(page.get_by_label("Model")).to_have_value("tiny", timeout=MS)
    await expect(page.locator("#running")).to_have_text("0", timeout=MS)
    await page.get_by_label("Temperature").fill("0")


async def converse(visitor: Visitor) -> tuple[str, str]:
    """Two questions, the second with all that was said; thoughts are folded, and answers are those of the API.

    Returns:
        Reasoning and text of the first answer.
    """
    page = visitor.page
    await page.evaluate(NOTE_STATES)
    await visitor.put(SUM)
    reasoning, text = await visitor.answer()
    assert "47 + 38" in reasoning and text.endswith("85.")
    thought = visitor.answers.locator(".reasoning .text")
    assert not await thought.is_visible()
    await visitor.answers.get_by_text("Reasoning").click()
    assert await thought.is_visible()
    states = await page.evaluate("window.states")
    assert len(states) > 2 and states[-1] == text
    assert all(later.startswith(state) for state, later in pairwise(states))
    await visitor.put(OTHER_SUM)
    other = await visitor.answer()
    first, second = visitor.sent
    asked = {"role": "user", "content": SUM}
    said = {"role": "assistant", "content": text}
    assert first["messages"] == [asked]
    assert second["messages"] == [asked, said, {"role": "user", "content": OTHER_SUM}]
    assert await visitor.told(first) == (reasoning, text)
    assert await visitor.told(second) == other
    assert await visitor.counted("spec_decode_num_accepted_tokens_total") > 0
    return reasoning, text


async def stop(visitor: Visitor) -> None:
    """A long answer shows while it grows, and counts as running, until it is stopped; then the engine rests."""
    page = visitor.page
    gone = await visitor.counted("request_success_total", finished_reason="client_gone")
    await expect(page.locator("#running")).to_have_text("0", timeout=MS)
    await visitor.put(POEM)
    for length in (0, 50, 100):
        await page.wait_for_function(LONGER, arg=length, timeout=MS)
    await expect(page.locator("#running")).to_have_text("1", timeout=MS)
    await expect(page.locator("#rate")).to_have_text(re.compile(r"^([1-9]\d*\.\d|0\.[1-9])$"), timeout=MS)
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_role("status")).to_have_text("Stopped.", timeout=MS)
    assert await until_true(visitor.rests, 10.0)
    assert await visitor.counted("request_success_total", finished_reason="client_gone") == gone + 1
    await expect(page.locator("#running")).to_have_text("0", timeout=MS)
    assert await page.get_by_role("alert").count() == 0


async def begin_anew(visitor: Visitor, before: tuple[str, str]) -> None:
    """Nothing of what was said, or stopped, has an effect: the first question gets its answer again."""
    await visitor.page.get_by_role("button", name="New conversation").click()
    await visitor.put(SUM)
    assert await visitor.answer() == before
    assert visitor.sent[-1] == visitor.sent[0]


@needs_browser
def test_the_page_of_a_real_server() -> None:
    """One test for all, so that one server is started, however tests are spread."""

    async def main() -> None:
        async with visit() as visitor:
            await give_key(visitor)
            first = await converse(visitor)
            await stop(visitor)
            await begin_anew(visitor, first)

    asyncio.run(main())
