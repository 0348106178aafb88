"""`zerokl watch`: the page of the report, served on 127.0.0.1 while runs go on.

The server reads the files of the runs and changes nothing. It reads at the lowest priority, and rests ten
times as long as a reading took, so it takes a tenth of one core at most.
"""

import contextlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ...runs.terminal import console
from .page import live_page, open_sources, planned_cells
from .payload import Source, page_title, payload
from .rollouts import pack

HOST = "127.0.0.1"
_BLOCK = re.compile(r"(index|texts)-(\d+)-(\d+)")
# Seconds between two readings at least, and how many times as long as the last reading took.
_REST_S, _REST_SHARE = 1.0, 10.0


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
            found = _BLOCK.fullmatch(name)
            if not found or int(found[2]) >= len(self.sources):
                return None
            blocks = self.sources[int(found[2])].log.all_blocks()
            if int(found[3]) >= len(blocks):
                return None
            block = blocks[int(found[3])]
            return block.index if found[1] == "index" else block.texts

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


class Server(ThreadingHTTPServer):
    """Serves the page and its data to those who know the token."""

    daemon_threads = True

    def __init__(self, runs: LiveRuns, port: int):
        """port: 0 takes a free one. Raises OSError for a port that is taken."""
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and nothing else."""

    server: Server
    server_version, sys_version = "zerokl", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._allowed(url.query):
            self._answer(403, "text/plain; charset=utf-8", b"The token is missing or wrong.\n")
        elif url.path == "/":
            self._answer(200, "text/html; charset=utf-8", live_page(self.server.runs.title).encode())
        elif url.path.startswith("/data/") and (content := self.server.runs.get(url.path[6:])) is not None:
            self._answer(200, "application/octet-stream", content)
        else:
            self._answer(404, "text/plain; charset=utf-8", b"There is nothing here.\n")

    def _allowed(self, query: str) -> bool:
        """Whether the token is right, and the address is ours.

        Another address that leads here is a web site's that wants to read the page in a person's browser.
        """
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return False
        given = self.headers.get("X-Zerokl-Token") or parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        # The browser may have gone away.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a line would show the token."""


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
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()
    return 0
