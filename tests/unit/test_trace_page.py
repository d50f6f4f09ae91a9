"""The trace page in a real browser, with the viewports of a desktop and of a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from lookahead_agent.trace.timeline import Call, TimelineBar, timeline, write_page
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


@pytest.fixture(params=[(1280, 800), (400, 800)], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    rows = record_run().rows
    write_page(timeline(rows), tmp_path / "run.html", rows)
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"a text was run: {dialog.message}"))
    page.goto((tmp_path / "run.html").as_uri())
    yield page
    page.close()
    assert problems == []


def test_page_begins_with_question_answer_and_what_was_drafted(page: Page) -> None:
    expect(page.locator("#question")).to_have_text("?")
    expect(page.locator("#answer")).to_have_text(REPLY)
    expect(page.locator("#totals")).to_contain_text("2 replies, 0 calls of tools")
    expect(page.locator("#drafts")).to_contain_text("4 of the 6 steps are the draft's (67 %)")
    assert page.locator("section h3").all_inner_texts() == ["planner", "writer"]
    assert page.locator(".bar.accepted").count() == 4
    assert page.locator(".bar.rejected").count() >= 2
    # Only the table and the chart may be wider than the screen, because they scroll separately.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_only_table_divides_the_whole_time(page: Page) -> None:
    assert page.locator("table").count() == 1
    nodes, whole = page.evaluate("[nodes, end - start]")
    assert sum(node["seconds"] for node in nodes) == pytest.approx(whole, abs=1e-6)
    assert page.locator("#nodes tr td:first-child").all_inner_texts()[0] == "planner"
    assert page.locator("#nodes tr td:first-child").all_inner_texts()[-1] == "all"
    expect(page.locator("#causes")).to_contain_text("reading prompts (until the first token)")


def test_hover_and_focus_show_the_tooltip_of_a_step(page: Page) -> None:
    tooltip = page.locator("#tip")
    expect(tooltip).to_be_hidden()
    bar = page.locator(".bar.committed").first
    bar.hover()
    expect(tooltip).to_be_visible()
    expect(tooltip).to_contain_text("the target's own step")
    box = tooltip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]  # type: ignore[index]
    page.mouse.move(1, 1)
    expect(tooltip).to_be_hidden()
    page.locator(".bar.judged").first.focus()
    expect(tooltip).to_contain_text("compared by the verifier")
    page.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()


def test_all_rows_of_the_chart_have_one_axis_and_bars_link_to_replies(page: Page) -> None:
    tracks = page.locator("#chart .track")
    boxes = [tracks.nth(number).bounding_box() for number in range(tracks.count())]
    assert len({(round(box["x"]), round(box["width"])) for box in boxes if box is not None}) == 1
    labels = page.locator("#chart .lane > span:first-child").all_inner_texts()
    # Whether something runs at every moment depends on the machine.
    assert [label for label in labels if label != "nothing ran"] == [
        "planner",
        "writer",
        "draft",
        "target",
        "verifier",
        "",
    ]
    page.locator(".bar.reply-bar").nth(1).click()
    assert page.url.endswith("#reply-1")
    assert page.locator("section:target h3").inner_text() == "writer"
    page.locator("section:target a").first.click()
    assert page.locator("section:target h3").inner_text() == "planner"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_search_filters_replies_and_highlights_steps(page: Page) -> None:
    search = page.locator("#search")
    search.fill("WRITER")
    expect(page.locator("#hits")).to_contain_text("1 of 2 replies")
    assert page.locator("section:visible h3").all_inner_texts() == ["writer"]
    search.fill("no such words anywhere")
    expect(page.locator("#hits")).to_have_text("0 of 2 replies, 0 steps")
    step = page.evaluate("calls[0].bars[0].text.trim().split('\\n')[0]")
    search.fill(step)
    assert page.locator(".bar.found").count() >= 1
    search.fill("")
    assert page.locator("section:visible").count() == 2
    assert page.locator(".bar.found").count() == 0


def test_bars_of_a_thousand_steps_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    bars = [
        TimelineBar("target", number, number + 0.9, "committed", number, f"step {number}") for number in range(1000)
    ]
    calls = [Call("planner", "off", 0, 1000, bars), Call("writer", "off", 1000, 1001)]
    write_page(calls, tmp_path / "long.html")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "long.html").as_uri())
    assert page.locator(".bar.committed").count() == 1000
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "only the chart scrolls"
    first, second = (page.locator(".bar.committed").nth(number).bounding_box() for number in (0, 1))
    assert len({*page.evaluate("[...document.querySelectorAll('.bar.committed')].map(bar => bar.style.top)")}) == 1
    assert first is not None
    assert second is not None
    assert second["x"] >= first["x"] + first["width"] > first["x"]
    page.close()


def test_bars_at_the_same_time_have_rows_of_their_own(browser: Browser, tmp_path: Path) -> None:
    steps = [TimelineBar("draft", start, start + 2, "accepted", start, "a") for start in range(4)]
    calls = [Call("a", "off", 0, 4, steps), Call("b", "off", 1, 3), Call("b", "off", 2.96, 4), Call("b", "off", 2, 4)]
    write_page(calls, tmp_path / "run.html")
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto((tmp_path / "run.html").as_uri())
    tops = page.evaluate("[...document.querySelectorAll('.bar')].map(bar => Math.round(parseFloat(bar.style.top)))")
    assert tops == [0, 0, 1, 0, 0, 1, 0, 1], "of a, of b in the order of their starts, and of the draft"
    page.close()


def test_calls_have_their_results_and_gaps_are_shown(browser: Browser, tmp_path: Path) -> None:
    rows = [
        {"type": "trace", "version": 1, "started": 0},
        tool_row("look", '{"place": "here", "n": 1}', 5.0, "a <b>cat</b>"),
        tool_row("find", "words", 6.0, "", failed=True),
        {"type": "run", "started": 1.0, "seconds": 9.0, "question": "What?", "answer": "A cat.", "failed": False},
    ]
    write_page(timeline(rows), tmp_path / "run.html", rows)
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto((tmp_path / "run.html").as_uri())
    assert page.locator(".call b").all_inner_texts() == ['look(place="here", n=1)', "find(words)"]
    assert page.locator(".call pre").all_inner_texts() == ["a <b>cat</b>", "(nothing)"]
    expect(page.locator("#totals")).to_have_text("9.00 s: 0 replies, 2 calls of tools (1 failed)")
    assert page.locator(".bar.nothing").count() == 2, "before the first call, and after the last one"
    names = page.locator("#nodes tr td:first-child").all_inner_texts()
    seconds = page.locator("#nodes tr td:nth-child(2)").all_inner_texts()
    assert dict(zip(names, seconds, strict=True)) == {
        "tools": "2.0",
        "(before)": "4.0",
        "(between)": "3.0",
        "all": "9.0",
    }
    page.close()


def tool_row(name: str, arguments: str, started: float, result: str, *, failed: bool = False) -> dict[str, Any]:
    known = {"path": "tools", "step": 1, "seconds": 1.0, "failed": failed, "result": result}
    return {"type": "tool", "name": name, "arguments": arguments, "started": started, **known}


def test_markup_in_model_text_is_shown_as_text(page: Page) -> None:
    expect(page.locator(".reply").first).to_have_text(REPLY)
    assert page.locator("main script").count() == 0
