"""The server of `zerokl watch`, without a browser."""

import contextlib
import gzip
import http.client
import json
import re
import socket
import threading
import time

import pytest
from zerokl.engine.runs.report import watch
from zerokl.engine.runs.report.page import open_sources, write_report
from zerokl.engine.runs.report.watch import LiveRuns, Server
from zerokl.engine.runs.run import train

from tests.made_run import made_run, metrics_line, write_lines


@pytest.fixture
def server(tmp_path):
    server = Server(LiveRuns([made_run(tmp_path / "run", planned=9)]), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.close()
    thread.join()


def answer(server, path, host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    return response.status, response.read()


def test_watch_listens_on_this_machine_only_and_asks_for_the_token(server):
    assert server._server.socket.getsockname()[0] == "127.0.0.1"
    assert server.address.startswith(f"http://127.0.0.1:{server.server_port}/?token=")
    token = {"X_Zerokl_Token": server.token}
    for path in ("/", "/data/payload", "/data/index-0-0", "/other"):
        assert answer(server, path)[0] == 403
        assert answer(server, path, X_Zerokl_Token="wrong")[0] == 403
        assert answer(server, path, host="evil.example", **token)[0] == 403
    assert answer(server, f"/?token={server.token}")[0] == 200
    assert json.loads(gzip.decompress(answer(server, "/data/payload", **token)[1]))["title"] == "run"
    for name in ("index-0-1", "index-1-0", "texts-0--1", "../config.toml", ""):
        assert answer(server, f"/data/{name}", **token)[0] == 404


def test_watch_changes_no_file(server, tmp_path):
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}
    for name in ("payload", "index-0-0", "texts-0-0"):
        assert answer(server, f"/data/{name}", X_Zerokl_Token=server.token)[0] == 200
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()} == before


def test_watch_sees_new_steps_and_survives_a_file_that_is_being_cut(tmp_path):
    run = made_run(tmp_path / "run", planned=9)
    live = LiveRuns([run])

    def steps():
        live._next_s = 0.0  # as if the rest were over
        return json.loads(gzip.decompress(live.get("payload")))["runs"][0]["steps"]

    assert steps() == 4
    write_lines(run / "metrics.jsonl", [metrics_line(4, 9, 8)])
    assert steps() == 5
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b'{"step": 0\n')
    assert steps() == 5
    (run / "metrics.jsonl").write_bytes(content)
    assert steps() == 5


DAMAGED = ["{}", "[]", "{", '{"cells": 3}', '{"cells": [{}]}', '{"cells": ["x"]}']
DAMAGED += ['{"cells": [{"folder": "../../other", "settings": {}}]}']


def _planned(folder, *cells: str) -> None:
    listed = [{"folder": cell, "settings": {"lr": cell.split("/")[0]}} for cell in cells]
    (folder / "cells.json").write_text(json.dumps({"cells": listed}))


def test_watch_takes_up_each_cell_of_an_ablation_as_it_begins(tmp_path):
    _planned(tmp_path, "1/seed-0", "2/seed-0", "2/seed-1")
    assert open_sources([tmp_path]) == []
    with pytest.raises(ValueError, match="has begun"):
        write_report([tmp_path])
    made_run(tmp_path / "cells" / "2" / "seed-0")
    live = LiveRuns([tmp_path])

    def shown() -> dict:
        live._next_s = 0.0
        return json.loads(gzip.decompress(live.get("payload")))

    assert (len(shown()["runs"]), shown()["planned"]) == (1, 3)
    made_run(tmp_path / "cells" / "1" / "seed-0")
    # What was there keeps its number: the page asks for rollouts by it.
    assert [run["factors"]["lr"] for run in shown()["runs"]] == ["2", "1"]
    assert [run["name"] for run in shown()["runs"]] == ["2/seed-0", "1/seed-0"]
    assert live.get("index-1-0") is not None


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_list_of_cells_is_named(tmp_path, text):
    (tmp_path / "cells.json").write_text(text)
    with pytest.raises(ValueError, match=r"cells\.json"):
        write_report([tmp_path])


@pytest.mark.full
def test_watch_does_not_disturb_a_run(config, tmp_path):
    """The same fingerprint with a reader that asks without rest as without one."""
    settings = config(steps=3)
    alone = train(settings, tmp_path / "alone")
    ended, readings = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            if not (tmp_path / "watched" / "ledger.jsonl").exists():
                continue
            live = LiveRuns([tmp_path / "watched"])
            readings.append(json.loads(gzip.decompress(live.get("payload")))["runs"][0]["steps"])

    reader = threading.Thread(target=read)
    reader.start()
    watched = train(settings, tmp_path / "watched")
    ended.set()
    reader.join()
    assert watched.fingerprint == alone.fingerprint
    assert readings, "the run was read while it went on"
    for name in ("config.toml", "ledger.jsonl", "rollouts.jsonl"):
        assert (tmp_path / "watched" / name).exists()


def _open(server, request: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    connection.sendall(request)
    return connection


@pytest.mark.parametrize("begun", [b"", b"G", b"GET / HTTP/1.1\r\nHost: "], ids=["silent", "torn", "header"])
def test_more_connections_than_it_takes_keep_nobody_waiting(server, begun):
    half_open = [_open(server, begun) for _ in range(watch._CONNECTIONS + 40)]
    began = time.monotonic()
    for _ in range(3):
        assert answer(server, f"/?token={server.token}")[0] == 200
    assert time.monotonic() - began < watch._IDLE_S / 2
    for connection in half_open:
        connection.close()


def test_slow_connections_cost_no_threads(server):
    before = threading.active_count()
    slow = [_open(server, b"GET / HTTP/1.1\r\nHost: ") for _ in range(60)]
    assert answer(server, f"/?token={server.token}")[0] == 200
    assert threading.active_count() <= before
    for connection in slow:
        connection.close()


def test_a_silent_connection_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_IDLE_S", 0.2)
    server = Server(LiveRuns([made_run(tmp_path / "run")]), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with _open(server, b"GET / HTTP/1.1\r\n") as connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    server.shutdown()
    server.close()
    thread.join()


@pytest.mark.parametrize(
    "path",
    ["/data/index-0-" + "9" * 5000, "http://[::1", "/data/index-0-99", "//", "/%ff", "*", "/?token=%ff"],
    ids=lambda path: path[:20],
)
def test_a_strange_request_is_answered_and_prints_nothing(server, capfd, path):
    with _open(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n".encode()) as sent:
        sent.sendall(f"X-Zerokl-Token: {server.token}\r\nConnection: close\r\n\r\n".encode())
        # An address that cannot be parsed closes the connection.
        assert re.match(rb"$|HTTP/1\.[01] (200|400|403|404) ", sent.recv(100))
    assert answer(server, f"/?token={server.token}")[0] == 200
    assert "".join(capfd.readouterr()) == ""


def test_an_endless_request_is_refused(server, capfd):
    with _open(server, b"GET / HTTP/1.1\r\nA: " + b"x" * (1 << 15)) as sent:
        assert re.match(rb"HTTP/1\.[01] 431 ", sent.recv(100))
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    "change",
    [
        *({"reward": "x"}, {"reward": 10**400}, {"logprobs": [0.0]}, {"trainer_logprobs": [-1.0]}),
        *({"completion_ids": 3}, {"completion_ids": ["x"]}, {"step": None}, {"text": None}),
    ],
    ids=str,
)
def test_a_line_that_is_no_rollout_ends_neither_page_nor_server(tmp_path, change):
    run = made_run(tmp_path / "run", planned=9)
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    (run / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    live = LiveRuns([run])
    shown = json.loads(gzip.decompress(live.get("payload")))["runs"][0]
    assert "has a line that is no rollout" in shown["rollouts"]["damage"]
    assert live.get("index-0-0") is not None


def test_what_nobody_foresaw_is_one_line_on_the_terminal(server, capsys, monkeypatch):
    def fails(name: str) -> bytes:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(server.runs, "get", fails)
    assert answer(server, "/data/payload", X_Zerokl_Token=server.token)[0] == 500
    out, err = capsys.readouterr()
    assert (out, err) == ("watch: /data/payload: ZeroDivisionError: two lines\n", "")
