"""A folder of runs in the browser, newest first, live while they train.

It listens on 127.0.0.1 and answers two kinds of address: `/`, the list, and `/run/NAME`, the page
of a run that is in the list. No address is ever turned into a path, so there is none that leads
elsewhere; and cards are read without `private/`, so it is never served. A request by any other
host name than this machine's own is refused: a page from the net could otherwise ask through the
reader's browser.
"""

import math
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sfumato.errors import ConfigError, SfumatoError
from sfumato.report import words
from sfumato.report.card import Card, read_card
from sfumato.report.page import render_list, render_page
from sfumato.report.subject import lies_in_private

REFRESH = 4
"""Seconds after which a page looks again."""


def serve(folder: Path, say: Callable[[str], None], port: int) -> None:
    """Answer until Ctrl-C."""
    try:
        server = make_server(folder, port)
    except (OSError, OverflowError) as problem:
        raise ConfigError(
            f"--port {port} cannot be had ({problem}). Give another one, or 0 for any that is free."
        ) from problem
    with server:
        say(f"http://127.0.0.1:{server.server_port}/ shows the runs in {folder}. Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")


def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of this folder on 127.0.0.1; port 0 takes any that is free."""
    shelf = _Shelf(folder)
    # Ledgers take seconds to price the first time: the reader need not wait for all of it.
    threading.Thread(target=shelf.rows, daemon=True).start()

    class Handler(_Handler):
        """Answers for this folder."""

    Handler.shelf = shelf
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


class _Shelf:
    """The runs of a folder; a card is read again when a file that it is made from has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[Path, bool], tuple[Any, Card | str]] = {}
        self._reading = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Runs by name, newest first."""
        found = [record.parent for record in self.folder.glob("*/config.json")]
        found = [path for path in found if not lies_in_private(path) and path.name != "private"]
        found.sort(key=lambda path: (path / "config.json").stat().st_mtime, reverse=True)
        return {path.name: path for path in found}

    def card(self, path: Path, *, curve: bool = True) -> Card | str:
        """The card of a run, or what is wrong with it; a list needs no curve."""
        mark = tuple(
            (file.name, file.stat().st_mtime_ns, file.stat().st_size)
            for pattern in ("*.json*", "*.png", "stages/*/*.json*")
            for file in sorted(path.glob(pattern))
        )
        key = (path, curve)
        with self._reading:  # who asks twice does not have it read twice
            if self._known.get(key, (None,))[0] != mark:
                try:
                    self._known[key] = (mark, read_card(path, curve=curve))
                except (SfumatoError, OSError) as problem:
                    self._known[key] = (mark, str(problem))
            return self._known[key][1]

    def rows(self) -> list[dict[str, Any]]:
        """What the list says of each run."""
        return [_row(name, self.card(path, curve=False)) for name, path in self.runs().items()]


def _row(name: str, card: Card | str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "href": f"/run/{quote(name, safe='')}", "progress": None}
    if isinstance(card, str):
        return {**row, "about": "", "state": card, "epsilon": ""}
    if card.steps is not None and not card.finished:
        row["progress"] = card.steps[0] / card.steps[1]
    about = f"{card.verb}: {words.title([card])}"
    return {**row, "about": about, "state": words.state(card), "epsilon": _epsilon(card)}


def _epsilon(card: Card) -> str:
    promise = card.promise
    if card.damage:
        return "DAMAGED ledger"
    if promise is None:
        return "-"
    if math.isinf(promise.epsilon):
        return words.up(promise.epsilon)
    more = "" if promise.planned == promise.epsilon else f" of {words.up(promise.planned)}"
    return f"{words.up(promise.epsilon)}{more} {words.terms(promise)}"


class _Handler(BaseHTTPRequestHandler):
    shelf: _Shelf
    server_version = "sfumato"
    sys_version = ""

    def do_GET(self) -> None:
        """The list, a run's page, or nothing."""
        if not self._is_ours():
            return self._answer(HTTPStatus.FORBIDDEN, "This address is for this machine alone.")
        if self.path == "/":
            rows, folder = self.shelf.rows(), self.shelf.folder
            return self._answer(HTTPStatus.OK, render_list(rows, folder, refresh=REFRESH))
        path = self.shelf.runs().get(unquote(self.path.removeprefix("/run/")))
        if path is None or not self.path.startswith("/run/"):
            return self._answer(HTTPStatus.NOT_FOUND, "There is no such run.")
        card = self.shelf.card(path)
        if isinstance(card, str):
            return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, card, plain=True)
        refresh = 0 if card.finished else REFRESH
        return self._answer(HTTPStatus.OK, render_page([card], [path], refresh=refresh, back="/"))

    def _is_ours(self) -> bool:
        host = self.headers.get("Host", "").rpartition(":")[0]
        return host in ("127.0.0.1", "localhost")

    def _answer(self, status: HTTPStatus, text: str, *, plain: bool = False) -> None:
        raw = text.encode()
        html = status is HTTPStatus.OK and not plain
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if html else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is for the address."""


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing from outside, and no script, even if a name in a run were to smuggle one in."""
