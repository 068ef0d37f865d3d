"""The page in a real browser: Debian's chromium, driven by playwright."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from pages import PNG, make_audit, make_run

from sfumato.commands import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("playwright", reason="pip install playwright")
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A report on three runs, with all that there can be on it."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        make_run(folder / "dp"),
        make_run(folder / "plain", private=False),
        make_audit(folder / "audit"),
    ]
    (runs[0] / "pictures.png").write_bytes(PNG)
    return Path(report.write_report(runs, folder / "out", include_private=True)["report"])


def watched(browser, **options):
    """A page that tells of errors and lets nothing out."""
    page = browser.new_page(**options)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))

    def judge(route):
        url = route.request.url
        if url.startswith(("file:", "data:")):
            return route.continue_()
        troubles.append(f"asked for {url}")
        return route.abort()

    page.route("**/*", judge)
    return page, troubles


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_renders_alone_and_without_errors(browser, written, tmp_path, scheme, width):
    page, troubles = watched(browser, color_scheme=scheme, viewport={"width": width, "height": 800})
    page.goto(written.as_uri())
    assert page.evaluate("document.images.length") == 2
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits the screen"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background)[:3])) < 80) == (scheme == "dark")
    shot = page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert len(shot) > 20_000
    assert troubles == []
    page.close()


def test_who_cannot_see_is_told_the_same(browser, written):
    page, troubles = watched(browser)
    page.goto(written.as_uri())
    assert page.get_attribute("html", "lang") == "en"
    assert "PRIVATE" in page.title()
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    nameless = "[...document.querySelectorAll('img')].filter(i => !i.alt).length"
    assert page.evaluate(nameless) == 0
    assert page.evaluate("[...document.querySelectorAll('th')].filter(t => !t.scope).length") == 0
    assert page.locator("main").count() == 1
    charts = page.get_by_role("img", name="Epsilon")
    assert charts.count() >= 2
    assert page.get_by_role("note").inner_text().startswith("Private. Do not share")
    names = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(names) == len(set(names))
    assert troubles == []
    page.close()


CONTRAST = """() => {
  const linear = x => (x /= 255) <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e);
    const ink = e.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(parse(ink)), light(ground(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) bad.push(e.textContent.trim().slice(0, 40));
  }
  return bad;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(browser, written, scheme):
    page, _ = watched(browser, color_scheme=scheme)
    page.goto(written.as_uri())
    assert page.evaluate(CONTRAST) == []
    page.close()


def test_the_keyboard_reaches_everything_and_shows_where_it_is(browser, written):
    page, _ = watched(browser)
    page.goto(written.as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    wanted = page.locator("summary").count()
    reached = 0
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            reached += 1
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid"
    assert reached >= wanted == 3
    page.close()


def test_it_prints(browser, written, tmp_path):
    page, _ = watched(browser, color_scheme="dark")
    page.goto(written.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf(path=tmp_path / "page.pdf", format="A4").startswith(b"%PDF")
    page.close()


def test_the_card_of_the_page_is_json_that_programs_can_read(written):
    card = json.loads((written.parent / "card.json").read_text())
    assert set(card) == {"made_by", "includes_private", "warning", "runs"}
    assert {"name", "verb", "guarantee", "events", "curve", "private", "command"} <= set(
        card["runs"][0]
    )
