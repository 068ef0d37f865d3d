"""The page in a real browser: Debian's chromium, driven by playwright."""

import http.client
import json
import re
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from pages import MARKER, PNG, make_audit, make_run, plant

from sfumato.errors import ConfigError
from sfumato.recipes import report
from sfumato.report.serve import make_server

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    plant(make_run(folder / "old & <done>"))
    make_run(folder / "training", taken=10, finished=False)
    (make_run(folder / "damaged") / "ledger.jsonl").write_text("no ledger\n")
    return folder


@pytest.fixture(scope="module")
def served(folder):
    server = make_server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def watched(browser, **options):
    """A page that tells of errors and lets nothing out."""
    page = browser.new_page(**options)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))

    def judge(route):
        url = route.request.url
        if url.startswith(("file:", "data:", "http://127.0.0.1:")):
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


def test_runs_are_read_before_anybody_asks_and_once(folder, monkeypatch):
    read, known = [], threading.Event()

    def slowly(path, *, curve):
        read.append(path)
        known.set()
        raise ConfigError("damaged")

    monkeypatch.setattr("sfumato.report.serve.read_card", slowly)
    with make_server(folder) as server:
        assert known.wait(10), "nobody has asked yet"
        shelf = server.RequestHandlerClass.shelf
        assert len(shelf.rows()) == len(shelf.rows()) == len(read) == 3


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


def test_the_keyboard_reaches_everything_and_shows_where_it_is(browser, written, served):
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
    page.goto(served)
    links = page.locator("main a").count()
    found = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        found.add(page.evaluate("document.activeElement.getAttribute('href')"))
    assert links == 3
    assert len([href for href in found if href and href.startswith("/run/")]) == 3
    page.close()


def test_it_prints(browser, written, tmp_path):
    page, _ = watched(browser, color_scheme="dark")
    page.goto(written.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf(path=tmp_path / "page.pdf", format="A4").startswith(b"%PDF")
    page.close()


def test_a_folder_is_shown_newest_first_and_live(browser, folder, served):
    page, troubles = watched(browser)
    page.goto(served)
    assert page.locator("tbody th").all_inner_texts() == ["damaged", "training", "old & <done>"]
    assert "step 10 of 30" in page.inner_text("main")
    assert page.locator("progress").get_attribute("value") == "0.3333"
    page.click("text=training")
    before = page.inner_text(".big >> nth=0")
    assert page.locator("meta[http-equiv=refresh]").count() == 1
    more = make_run(folder.parent / "more", taken=20, finished=False)
    shutil.copyfile(more / "ledger.jsonl", folder / "training" / "ledger.jsonl")
    shutil.rmtree(more)
    page.reload()
    after = page.inner_text(".big >> nth=0")
    assert "step 20 of 30" in page.inner_text("header")
    assert float(after.removeprefix("ε ≤ ")) > float(before.removeprefix("ε ≤ "))
    page.click("text=all runs")
    page.click("text=old & <done>")
    assert "old & <done>" in page.inner_text("header")
    assert page.locator("meta[http-equiv=refresh]").count() == 0
    assert troubles == []
    page.close()


def ask(address: str, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    "path",
    [
        "/private", "/run/private", "/run/..", "/run/../private/scores.json",
        "/run/training/private", "/run/training/private/scores.json",
        "/run/training%2Fprivate%2Fscores.json", "/run/%2e%2e", "/run/%2e%2e%2fserved",
        "//etc/passwd", "/etc/passwd", "/run//etc/passwd", "/run/", "/run",
        "/run/training/config.json", "/training/ledger.jsonl", "/run/training\0", "/run/.", "/?x",
        "training", "/run/TRAINING", "/run/old & <done>/private",
    ],
)  # fmt: skip
def test_no_address_leads_anywhere_but_to_a_run(served, path):
    path = path.replace(" ", "%20").replace("\0", "%00").replace("<", "%3C").replace(">", "%3E")
    status, text = ask(served, path)
    assert status == 404
    assert text == "There is no such run."


def test_private_is_never_served(served, folder):
    for path in ("/", "/run/old%20%26%20%3Cdone%3E", "/run/training", "/run/damaged"):
        status, text = ask(served, path)
        assert status == (500 if "damaged" in path else 200)
        assert MARKER not in text
    assert "cannot be trusted" in text or "damaged" in text


def test_only_this_machine_is_answered(served, folder):
    assert ask(served, "/", host="evil.example")[0] == 403
    assert ask(served, "/", host="evil.example:8008")[0] == 403
    port = served.rpartition(":")[2]
    assert ask(served, "/", host=f"localhost:{port}")[0] == 200
    with make_server(folder) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_serving_ends_with_control_c_and_tells_the_address(folder, monkeypatch):
    from sfumato.report import serve

    def interrupted(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve.ThreadingHTTPServer, "serve_forever", interrupted)
    heard: list[str] = []
    config = report.Config(runs=(folder,), serve=True, port=0)
    found = report.write_file(config, None, heard.append)
    assert heard[0].startswith("http://127.0.0.1:")
    assert "no longer served" in report.show(found)


def test_a_port_that_cannot_be_had_is_named(folder, served):
    for port in (int(served.rpartition(":")[2]), 99999):
        config = report.Config(runs=(folder,), serve=True, port=port)
        with pytest.raises(ConfigError, match=f"--port {port} cannot be had"):
            report.write_file(config, None, lambda _: None)


def test_the_card_of_the_page_is_json_that_programs_can_read(written):
    card = json.loads((written.parent / "card.json").read_text())
    assert set(card) == {"made_by", "includes_private", "warning", "runs"}
    assert {"name", "verb", "promise", "events", "curve", "private", "command"} <= set(
        card["runs"][0]
    )
