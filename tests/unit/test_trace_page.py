"""The page of a run in a real browser, on a desktop and on a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from lookahead_agent.trace import timeline, write_page
from tests.unit.test_trace import REPLY, run

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    assert program is not None, "no Chromium: `make test` installs it where it may (apt-get), elsewhere do it by hand"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, 800), (390, 844)], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    write_page(timeline(run().rows), tmp_path / "run.html")
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"a text was run: {dialog.message}"))
    page.goto((tmp_path / "run.html").as_uri())
    yield page
    page.close()
    assert problems == []


def test_it_says_what_happened(page: Page) -> None:
    expect(page.locator("#totals")).to_contain_text("2 replies in")
    expect(page.locator("#totals")).to_contain_text("4 of 6 steps from the draft (67 %)")
    assert page.locator("section h2").all_inner_texts() == ["planner", "writer"]
    assert page.locator(".bar.accepted").count() == 4
    assert page.locator(".bar.rejected").count() >= 2
    # Nothing is wider than the screen, but for the table, which scrolls by itself.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_step_shows_its_text_and_verdict(page: Page) -> None:
    tip = page.locator("#tip")
    expect(tip).to_be_hidden()
    bar = page.locator(".bar.committed").first
    bar.hover()
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("target's step")
    box = tip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]  # type: ignore[index]
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()
    page.locator(".bar.judged").first.focus()
    expect(tip).to_contain_text("judged")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_markup_in_a_models_text_is_text(page: Page) -> None:
    page.locator("summary").first.click()
    expect(page.locator(".reply").first).to_have_text(REPLY)
    assert page.locator("main script").count() == 0
