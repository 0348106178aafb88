"""`zerokl watch`: the page of the report, served on 127.0.0.1 while runs go on.

The server reads the files of the runs and changes nothing. It reads at the lowest priority, and rests ten
times as long as a reading took, so it takes a tenth of one core at most.
"""

import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from waitress import create_server

from ....files.reading import one_line
from ...display.terminal import console
from .page import live_page, open_sources, planned_cells
from .payload import Source, page_title, payload
from .rollouts import pack

HOST = "127.0.0.1"
_BLOCK = re.compile(r"(index|texts)-([0-9]{1,9})-([0-9]{1,9})")
# Seconds between two readings at least, and how many times as long as the last reading took.
_REST_S, _REST_SHARE = 1.0, 10.0
# Threads that answer, connections at most, and the bytes of a request, which has no body.
_THREADS, _CONNECTIONS, _REQUEST_BYTES = 4, 200, 1 << 14
# Seconds after which a silent connection is closed, and between two looks at whether to stop.
_IDLE_S, _LOOK_S = 20, 0.5
_TEXT = "text/plain; charset=utf-8"


class LiveRuns:
    """The packed data of runs that go on. Several threads may ask for it."""

    def __init__(self, folders: Sequence[Path]):
        """Raises ValueError for a folder without a run."""
        self.title, self.folders = page_title(folders), folders
        self.sources: list[Source] = open_sources(folders)
        self._lock, self._next_s = threading.Lock(), 0.0
        self._packed = b""

    def get(self, name: str) -> bytes | None:
        """The data called `payload`, `index-RUN-BLOCK` or `texts-RUN-BLOCK`, packed; None for others."""
        with self._lock:
            if name == "payload":
                return self._payload()
            named = _BLOCK.fullmatch(name)
            if not named or int(named[2]) >= len(self.sources):
                return None
            blocks = self.sources[int(named[2])].log.all_blocks()
            if int(named[3]) >= len(blocks):
                return None
            block = blocks[int(named[3])]
            return block.index if named[1] == "index" else block.texts

    def _planned(self) -> int:
        """How many runs there will be: each cell of an ablation counts."""
        return sum(max(1, len(planned_cells(folder))) for folder in self.folders)

    def _payload(self) -> bytes:
        began_s = time.monotonic()
        if began_s < self._next_s:
            return self._packed
        # A cell of an ablation may have begun.
        with contextlib.suppress(ValueError, OSError):
            self.sources = open_sources(self.folders, self.sources)
        for source in self.sources:
            # A file that a resumed run is just cutting back may be unreadable for a moment: what was read
            # before stays on the page, and the next reading tries again.
            with contextlib.suppress(ValueError, OSError):
                source.refresh()
        self._packed = pack(payload(self.sources, self.title) | {"planned": self._planned()})
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(_REST_S, _REST_SHARE * took_s)
        return self._packed


class Server:
    """Serves the page and its data to those who know the token.

    waitress answers: one thread reads all connections, so that a slow one costs a socket and no thread.
    """

    def __init__(self, runs: LiveRuns, port: int):
        """port: 0 takes a free one. Raises OSError or OverflowError for one that cannot be had."""
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        self._sockets: dict[int, Any] = {}
        listener = socket.create_server((HOST, port))  # waitress would take port 70000 for 4464
        self._server = create_server(
            self._respond,
            map=self._sockets,
            sockets=[listener],
            threads=_THREADS,
            connection_limit=_CONNECTIONS,
            channel_timeout=_IDLE_S,
            cleanup_interval=_IDLE_S,
            max_request_header_size=_REQUEST_BYTES,
            max_request_body_size=_REQUEST_BYTES,
            log_socket_errors=False,
            ident=None,
        )
        # It would log that it is busy, and each request that it closes because its address is none.
        logging.getLogger("waitress").setLevel(logging.CRITICAL)
        self.server_port = self._server.effective_port
        self._stop, self._stopped = threading.Event(), threading.Event()

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def serve_forever(self) -> None:
        """Answer until `shutdown` is called, or until Ctrl-C."""
        try:
            while not self._stop.is_set():
                self._server.asyncore.loop(timeout=_LOOK_S, use_poll=True, map=self._sockets, count=1)
                self._make_room()
        finally:
            self._stopped.set()

    def _make_room(self) -> None:
        """Close half of the connections where no other would be taken: those that are silent for longest."""
        if len(self._sockets) >= _CONNECTIONS:
            channels = self._server.active_channels.values()
            silent = sorted((c for c in channels if not c.requests), key=lambda c: c.last_activity)
            for channel in silent[: _CONNECTIONS // 2]:
                channel.will_close = True

    def shutdown(self) -> None:
        """End serve_forever, which runs in another thread."""
        self._stop.set()
        self._stopped.wait()

    def close(self) -> None:
        """Close every socket, and end the threads that answer."""
        self._server.task_dispatcher.shutdown(timeout=1)
        self._server.asyncore.close_all(self._sockets, ignore_all=True)

    def _respond(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        """Answer a request (PEP 3333). What goes wrong is one line on the terminal."""
        try:
            status, kind, content = self._answer(environ)
        except Exception as error:  # a file of a run may hold anything
            console.say(one_line(f"watch: {environ.get('PATH_INFO')}: {type(error).__name__}: {error}"))
            status, kind, content = "500 Internal Server Error", _TEXT, b"This cannot be shown.\n"
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        start_response(status, list(headers.items()))
        return [content]

    def _answer(self, environ: dict[str, Any]) -> tuple[str, str, bytes]:
        """Status, type and content of the answer to a request."""
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "GET":
            return "405 Method Not Allowed", _TEXT, b"It only answers GET.\n"
        if not self._allowed(environ):
            return "403 Forbidden", _TEXT, b"The token is missing or wrong.\n"
        if path == "/":
            return "200 OK", "text/html; charset=utf-8", live_page(self.runs.title).encode()
        if path.startswith("/data/") and (content := self.runs.get(path.removeprefix("/data/"))) is not None:
            return "200 OK", "application/octet-stream", content
        return "404 Not Found", _TEXT, b"There is nothing here.\n"

    def _allowed(self, environ: dict[str, Any]) -> bool:
        """Whether the token is right, and the address is ours.

        Another address that leads here is a web site's that wants to read the page in a person's browser.
        """
        if environ.get("HTTP_HOST") not in (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"):
            return False
        query = parse_qs(environ.get("QUERY_STRING", ""))
        given = environ.get("HTTP_X_ZEROKL_TOKEN") or query.get("token", [""])[0]
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def watch(runs: Sequence[str], port: int) -> int:
    """Serve the page of the runs until Ctrl-C. Returns 0.

    Raises ValueError for a folder without a run, and for a port that cannot be had.
    """
    if not runs:
        raise ValueError("watch: no run was given; name the folder of a run, or several")
    folders = [Path(run) for run in runs]
    if not open_sources(folders):
        console.print(f"waiting for the first run of {', '.join(runs)}; Ctrl-C ends it")
    try:
        while not open_sources(folders):
            time.sleep(_REST_S)
    except KeyboardInterrupt:
        return 0
    live = LiveRuns(folders)
    try:
        server = Server(live, port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"watch: port {port} cannot be had ({error}); choose another --port") from None
    os.nice(19)  # the run needs the processor more
    console.print(f"watching {', '.join(runs)}; Ctrl-C ends it\n{server.address}")
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(server):
        server.serve_forever()
    return 0
