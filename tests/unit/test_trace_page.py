"""The trace page in a real browser, with the viewports of a desktop and of a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from lookahead_agent.trace.timeline import Bar, Call, timeline, write_page
from tests.unit.test_trace import REPLY, record_run

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
    assert executable is not None, "no Chromium: `make test` installs it with apt-get, elsewhere install it by hand"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, 800), (390, 844)], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    write_page(timeline(record_run().rows), tmp_path / "run.html")
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"a text was run: {dialog.message}"))
    page.goto((tmp_path / "run.html").as_uri())
    yield page
    page.close()
    assert problems == []


def test_page_summarizes_the_run(page: Page) -> None:
    expect(page.locator("#totals")).to_contain_text("2 replies in")
    expect(page.locator("#totals")).to_contain_text("4 of 6 steps from the draft (67 %)")
    assert page.locator("section h2").all_inner_texts() == ["planner", "writer"]
    assert page.locator(".bar.accepted").count() == 4
    assert page.locator(".bar.rejected").count() >= 2
    # Only the table may be wider than the screen, because it scrolls separately.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_hover_and_focus_show_the_tooltip_of_a_step(page: Page) -> None:
    tooltip = page.locator("#tip")
    expect(tooltip).to_be_hidden()
    bar = page.locator(".bar.committed").first
    bar.hover()
    expect(tooltip).to_be_visible()
    expect(tooltip).to_contain_text("target's step")
    box = tooltip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]  # type: ignore[index]
    page.mouse.move(1, 1)
    expect(tooltip).to_be_hidden()
    page.locator(".bar.judged").first.focus()
    expect(tooltip).to_contain_text("judged")
    page.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()


def test_overview_marks_the_critical_path_and_links_to_replies(page: Page) -> None:
    expect(page.locator("#path")).to_contain_text("(dark): ")
    assert page.locator("#overview .bar").all_inner_texts() == ["planner", "writer"]
    assert "writer" in page.locator("#overview .critical").all_inner_texts()
    page.locator("#overview .bar").nth(1).click()
    assert page.url.endswith("#reply-1")
    assert page.locator("section:target h2").inner_text() == "writer"
    page.locator("section:target a").first.click()
    assert page.locator("section:target h2").inner_text() == "planner"
    expect(page.locator("#nodes th").nth(6)).to_have_text("first word, s")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_search_filters_replies_and_highlights_steps(page: Page) -> None:
    search = page.locator("#search")
    search.fill("WRITER")
    expect(page.locator("#hits")).to_contain_text("1 of 2 replies")
    assert page.locator("section:visible h2").all_inner_texts() == ["writer"]
    search.fill("no such words anywhere")
    expect(page.locator("#hits")).to_have_text("0 of 2 replies, 0 steps")
    step = page.evaluate("calls[0].bars[0].text.trim().split('\\n')[0]")
    search.fill(step)
    assert page.locator(".bar.found").count() >= 1
    search.fill("")
    assert page.locator("section:visible").count() == 2
    assert page.locator(".bar.found").count() == 0


def test_bars_of_a_thousand_steps_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    bars = [Bar("target", number, number + 0.9, "committed", number, f"step {number}") for number in range(1000)]
    calls = [Call("planner", "off", 0, 1000, bars), Call("writer", "off", 1000, 1001, bars[:3])]
    write_page(calls, tmp_path / "long.html")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "long.html").as_uri())
    assert page.locator("section").first.locator(".bar").count() == 1000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "only the lanes scroll"
    first, second = (page.locator(".bar.committed").nth(number).bounding_box() for number in (0, 1))
    assert first is not None
    assert second is not None
    assert second["x"] >= first["x"] + first["width"] > first["x"]
    page.close()


def test_markup_in_model_text_is_shown_as_text(page: Page) -> None:
    page.locator("summary").first.click()
    expect(page.locator(".reply").first).to_have_text(REPLY)
    assert page.locator("main script").count() == 0
