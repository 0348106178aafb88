"""A proxy before an inference server that logs completions as they pass (`zerokl record`).

A request goes to the server as it came, and each piece of the answer goes to the client as it arrives, byte
for byte. The log is written from a copy, by a thread, after the answer has ended. What the server refuses or
breaks off reaches the client as the server did it. Keys and texts of a request are not written.

What is too large to be read passes in pieces, and leaves no line. While the log cannot be written, requests
whose answers it should hold are answered 503, and the lines that wait are tried again.
"""

import asyncio
import errno
import logging
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ..audit.frameworks.zerokl import parse
from ..files.reading import one_line, shown
from ..files.writing import os_error_line
from .proxy_answers import ANSWER_BYTES, REQUEST_BYTES, Exchange, completions, has_last_event, is_recorded
from .recorder import Recorder

# Of one connection, not of a message (RFC 9110, section 7.6.1), and the host that the client called.
_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# Seconds between two times that lines are put on the disk, and between two tries of a line that it refused.
_FLUSH_S, _RETRY_S = 1.0, 1.0
# Seconds that an open request has at the end. aiohttp waits for them twice.
_GRACE_S = 0.4
# Reasons that are counted by themselves: some hold words of a request.
_REASONS = 100
# The whole address that a client of a forward proxy writes where others write a path.
_ABSOLUTE = re.compile(r"https?://[^/?#]*(.*)", re.IGNORECASE | re.DOTALL)
_CUT_BY_CLIENT, _CUT_AT_END = "the client ended early", "the end of zerokl record cut it"


@dataclass
class Counts:
    """What passed. refused: why a completion left no line -> how often. lost: lines that the disk refused."""

    requests: int = 0
    completions: int = 0
    lost: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def lines(self, log: Path) -> list[str]:
        """The counts in words."""
        words = [f"{log}: {self.completions} completions of {self.requests} requests"]
        if self.lost:
            words.append(f"LOST, {self.lost} completions: {log} could not be written")
        return words + [f"not recorded, {count} times: {why}" for why, count in self.refused.most_common()]


class _Log:
    """Writes completions in a thread of its own. Nobody waits for it but the end.

    failure: why the log cannot be written just now, empty where it can.
    """

    def __init__(self, recorder: Recorder, say: Callable[[str], None]):
        self.recorder, self.counts, self.failure = recorder, Counts(), ""
        self._say, self._lock, self._ended = say, threading.Lock(), threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._flushed_s = time.monotonic()

    def take(self, exchange: Exchange) -> None:
        self.counts.requests += 1
        self._thread.submit(self._write, exchange)

    def refuse(self, why: str) -> None:
        self.counts.requests += 1
        self._count(why)

    def _count(self, why: str) -> None:
        with self._lock:  # the thread counts too
            why = one_line(why)
            refused = self.counts.refused
            refused[why if why in refused or len(refused) < _REASONS else "another reason"] += 1

    def _write(self, exchange: Exchange) -> None:
        try:
            for c in completions(exchange):
                row = self.recorder.row(c.prompt_ids, c.completion_ids, c.logprobs, **c.fields)
                list(parse(row, self.recorder.path))  # one line that no reader takes would spoil the log
                if self._insist(lambda row=row: self.recorder.write(row)):
                    self.counts.completions += 1
                else:
                    self.counts.lost += 1
        except ValueError as error:  # also of the recorder: a penalty, which no score has
            self._count(str(error))
        except Exception as error:  # both are a stranger's, and their members may be anything
            self._count(f"the request or the answer has another form ({type(error).__name__})")
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self._insist(self.recorder.flush)
            self._flushed_s = time.monotonic()

    def _insist(self, act: Callable[[], None]) -> bool:
        """Do what the disk may refuse, again and again. False where the end came before it took it."""
        while True:
            try:
                act()
            except OSError as error:
                failed_before, self.failure = self.failure, os_error_line(error)
                if not failed_before:
                    self._say(f"record: {self.failure}; until it is written, requests are answered 503")
                if self._ended.wait(_RETRY_S):
                    return False
            else:
                if self.failure:
                    self._say(f"record: {self.recorder.path} is written again")
                self.failure = ""
                return True

    def close(self) -> None:
        self._ended.set()
        self._thread.shutdown()
        self._insist(self.recorder.close)


class Proxy:
    """The handler of every request. upstream: the server's address, without a slash at its end.

    open: the connections that wait for the end of an answer. ending: set at the end.
    """

    def __init__(self, upstream: str, session: ClientSession, log: _Log):
        self.upstream, self.open, self.ending = upstream, set[Any](), False
        self._session, self._log = session, log

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Pass a request on, and its answer back."""
        self.open.add(request.protocol)
        try:
            return await self._pass(request)
        except asyncio.CancelledError:
            self._log.refuse(_CUT_AT_END if self.ending else _CUT_BY_CLIENT)
            raise
        finally:
            self.open.discard(request.protocol)

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        target = _target(request.raw_path)
        if target is None:
            return self._refuse(400, f"the request's target ({shown(request.raw_path)}) is no path")
        recorded = is_recorded(request.path) and request.method == "POST"
        if recorded and self._log.failure:
            return self._refuse(503, f"the log cannot be written: {self._log.failure}")
        try:
            body, whole = await _beginning(request)
        except web.RequestPayloadError:
            return self._refuse(400, "the request's body is malformed")
        headers = _passed_on(request.headers)
        headers.popall(hdrs.HOST, None)
        if whole:
            headers.popall(hdrs.CONTENT_LENGTH, None)  # of the body that is sent, the same
        try:
            answer = await self._session.request(
                request.method,
                URL(self.upstream + target, encoded=True),  # quoting it again could change it
                headers=headers,
                data=(body or None) if whole else _all(body, request),
                allow_redirects=False,
            )
        except (ClientError, OSError, ValueError) as error:  # ValueError: of a host that no name server takes
            if _ran_out(error):
                loop = asyncio.get_running_loop()
                loop.call_exception_handler({"message": "no connection", "exception": error})
            self._log.refuse("the server was not reached")
            return _answer(502, f"{self.upstream} was not reached ({error})")
        async with answer:
            return await self._back(request, body if recorded and whole else None, answer, recorded)

    def _refuse(self, status: int, why: str) -> web.Response:
        self._log.refuse(why)
        return _answer(status, why)

    async def _back(
        self, request: web.BaseRequest, body: bytes | None, answer: ClientResponse, recorded: bool
    ) -> web.StreamResponse:
        """Pass an answer back while it arrives, and log it when it has ended. body: None for no line."""
        response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers)
        )
        copy: list[bytes] | None = [] if body is not None else None
        length = 0
        await response.prepare(request)
        try:
            async for piece in answer.content.iter_any():
                await response.write(piece)
                length += len(piece)
                if length > ANSWER_BYTES:
                    copy = None
                if copy is not None:
                    copy.append(piece)
        except asyncio.CancelledError:
            if copy is None or not has_last_event(copy):
                raise
        except (ClientError, ConnectionError):
            # One of the two ended early. The other one sees that, and not a whole answer.
            self._log.refuse("the answer was cut")
            if request.transport is not None:
                request.transport.abort()
            return response
        with suppress(ConnectionError):  # the client has all of it, and may have gone
            await response.write_eof()
        if not recorded:
            return response
        if answer.status != 200:
            self._log.refuse(f"the server answered {answer.status}")
        elif copy is None:
            what, most = ("answer", ANSWER_BYTES) if body is not None else ("request", REQUEST_BYTES)
            self._log.refuse(f"the {what} has more than {most >> 20} MiB")
        else:
            self._log.take(Exchange(request.path, request.headers, body, answer.headers, copy))
        return response


def _target(raw: str) -> str | None:
    """The path and query of a request's target as they were written; None where it has no path.

    Of a whole address they follow the host (RFC 9112, section 3.2.2).
    """
    if whole := _ABSOLUTE.fullmatch(raw):
        raw = whole[1] if whole[1].startswith("/") else "/" + whole[1]
    return raw if raw.startswith("/") else None


async def _beginning(request: web.BaseRequest) -> tuple[bytes, bool]:
    """What of a request's body is held to be read, and whether that is all of it."""
    pieces, length = [], 0
    async for piece in request.content.iter_any():
        pieces.append(piece)
        length += len(piece)
        if length > REQUEST_BYTES:
            return b"".join(pieces), False
    return b"".join(pieces), True


async def _all(beginning: bytes, request: web.BaseRequest) -> AsyncIterator[bytes]:
    """The pieces of a body whose beginning was read."""
    yield beginning
    async for piece in request.content.iter_any():
        yield piece


def _answer(status: int, why: str) -> web.Response:
    """An answer of the proxy's own. The connection ends with it: it may be the one too many."""
    response = web.Response(status=status, text=f"zerokl record: {one_line(why)}\n")
    response.force_close()
    return response


def _passed_on(headers: CIMultiDictProxy) -> CIMultiDict:
    """Headers without those of one connection, of which Connection names more."""
    named = ",".join(headers.getall(hdrs.CONNECTION, ())).split(",")
    dropped = _HOP_BY_HOP | {name.strip().lower() for name in named}
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in dropped)


def record(
    upstream: str, path: Path, host: str, port: int, say: Callable[[str], None], **constant: object
) -> Counts:
    """Serve until Ctrl-C or SIGTERM. say: is given each line that a person reads. Returns what passed.

    constant: fields of every line, such as a temperature that requests do not name. Raises ValueError for an
    address that is none and a file that exists, OSError for a port that is taken.
    """
    _check_upstream(upstream)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"record: --port ({port}) must lie in 0 .. 65535")
    # A request that passes takes two open files.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    log = _Log(Recorder(path, **constant), say)
    try:
        asyncio.run(_serve(upstream.rstrip("/"), log, host, port, say))
    finally:
        log.close()
    return log.counts


def _check_upstream(upstream: str) -> None:
    """Raise ValueError for what is no address of a server."""
    rule = "must be the address of a server, such as http://localhost:8000"
    try:
        url = URL(upstream)
        good = url.scheme in ("http", "https") and url.host and not (url.user or url.password)
    except ValueError as error:
        raise ValueError(f"record: --upstream ({shown(upstream)}) {rule} ({error})") from None
    if not good or url.query_string or url.fragment:
        raise ValueError(f"record: --upstream ({shown(upstream)}) {rule}")


class _OneLine(logging.Handler):
    """Counts what aiohttp would print with a traceback."""

    def __init__(self, log: _Log):
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        kind = type(record.exc_info[1]).__name__ if record.exc_info else record.getMessage()
        self._log.refuse(f"the request was malformed, or could not be answered ({kind})")


def _ran_out(error: BaseException | None) -> bool:
    """Whether an error says that no more files can be opened."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


async def _serve(upstream: str, log: _Log, host: str, port: int, say: Callable[[str], None]) -> None:
    # Connections to the server have no limit of time or number of their own.
    async with ClientSession(
        connector=TCPConnector(limit=0),
        timeout=ClientTimeout(total=None, sock_connect=30),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    ) as session:
        proxy = Proxy(upstream, session, log)
        logger = logging.Logger("zerokl record")
        logger.addHandler(_OneLine(log))
        # A request's body is passed as it came; and where a client hangs up, the server is to know.
        server = web.Server(
            proxy.handle, handler_cancellation=True, auto_decompress=False, access_log=None, logger=logger
        )
        await _until_stopped(proxy, server, host, port, say)


async def _until_stopped(
    proxy: Proxy, server: web.Server, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Answer until Ctrl-C or SIGTERM. What asyncio would print with a traceback is a line, the first time."""
    loop, stopped, troubles = asyncio.get_running_loop(), asyncio.Event(), set[str]()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    def trouble(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        why, error = context["message"], context.get("exception")
        if _ran_out(error):
            why = "open files ran out, so connections without a request are closed; raise ulimit -n"
            for connection in {*server.connections} - proxy.open:
                connection.force_close()
        if why not in troubles:
            troubles.add(why)
            say(one_line(f"record: {why} ({type(error).__name__})"))

    loop.set_exception_handler(trouble)
    runner = web.ServerRunner(server, shutdown_timeout=_GRACE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        taken = site._server.sockets[0].getsockname()[1]
        say(f"recording http://{host}:{taken} -> {proxy.upstream}; Ctrl-C ends it")
        await stopped.wait()
    finally:
        proxy.ending = True
        if proxy.open:
            say(f"{len(proxy.open)} requests are open, and are cut after a second")
        await runner.cleanup()
