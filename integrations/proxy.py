"""A proxy before an inference server that logs completions as they pass (`zerokl record`).

A request goes to the server as it came, and each piece of the answer goes to the client as it arrives, byte
for byte. The log is written from a copy, by a thread, after the answer has ended. What the server refuses or
breaks off reaches the client as the server did it. Keys and texts of a request are not written.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from .proxy_answers import Exchange, completions, is_recorded
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
# Seconds between two times that lines are put on the disk.
_FLUSH_S = 1.0


@dataclass
class Counts:
    """What passed. refused: why a completion left no line -> how often."""

    requests: int = 0
    completions: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def lines(self, log: Path) -> list[str]:
        """The counts in words."""
        words = [f"{log}: {self.completions} completions of {self.requests} requests"]
        return words + [f"not recorded, {count} times: {why}" for why, count in self.refused.most_common()]


class _Log:
    """Writes completions in a thread of its own. Nobody waits for it but the end."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.counts = recorder, Counts()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._flushed_s = time.monotonic()

    def take(self, exchange: Exchange) -> None:
        self.counts.requests += 1
        self._thread.submit(self._write, exchange)

    def refuse(self, why: str) -> None:
        self.counts.requests += 1
        self.counts.refused[why] += 1

    def _write(self, exchange: Exchange) -> None:
        try:
            for c in completions(exchange):
                self.recorder.record(c.prompt_ids, c.completion_ids, c.logprobs, **c.fields)
                self.counts.completions += 1
        except ValueError as error:  # also of the recorder: a penalty, which no score has
            self.counts.refused[str(error)] += 1
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            self.counts.refused[f"the answer has another form ({type(error).__name__})"] += 1
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self.recorder.flush()
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        self._thread.shutdown()
        self.recorder.close()


class Proxy:
    """The handler of every request. upstream: the server's address, without a slash at its end."""

    def __init__(self, upstream: str, log: _Log):
        self.upstream, self._log = upstream, log
        self._session: ClientSession | None = None

    async def start(self, app: web.Application) -> None:
        """Open the connections to the server; none has a limit of time or number of its own."""
        self._session = ClientSession(
            connector=TCPConnector(limit=0),
            timeout=ClientTimeout(total=None, sock_connect=30),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def stop(self, app: web.Application) -> None:
        """Close the connections."""
        await self._session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, and its answer back."""
        body = await request.read()
        headers = _passed_on(request.headers)
        headers.popall(hdrs.HOST, None)
        headers.popall(hdrs.CONTENT_LENGTH, None)  # of the body that is sent, the same
        try:
            answer = await self._session.request(
                request.method,
                URL(self.upstream + request.raw_path, encoded=True),  # quoting it again could change it
                headers=headers,
                data=body or None,
                allow_redirects=False,
            )
        except asyncio.CancelledError:
            self._log.refuse("the client ended early")
            raise
        except (ClientError, OSError) as error:
            self._log.refuse("the server was not reached")
            return web.Response(
                status=502, text=f"zerokl record: {self.upstream} was not reached ({error})\n"
            )
        async with answer:
            return await self._back(request, body, answer)

    async def _back(self, request: web.Request, body: bytes, answer: ClientResponse) -> web.StreamResponse:
        """Pass an answer back while it arrives, and log it when it has ended."""
        response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers)
        )
        recorded = is_recorded(request.path) and request.method == "POST"
        copy: list[bytes] = []
        await response.prepare(request)
        try:
            async for piece in answer.content.iter_any():
                await response.write(piece)
                if recorded:
                    copy.append(piece)
        except asyncio.CancelledError:
            self._log.refuse("the client ended early")
            raise
        except (ClientError, ConnectionError):
            # One of the two ended early. The other one sees that, and not a whole answer.
            self._log.refuse("the answer was cut")
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        if recorded and answer.status == 200:
            self._log.take(Exchange(request.path, request.headers, body, answer.headers, copy))
        elif recorded:
            self._log.refuse(f"the server answered {answer.status}")
        return response


def _passed_on(headers: CIMultiDictProxy) -> CIMultiDict:
    """Headers without those of one connection."""
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in _HOP_BY_HOP)


def make_app(upstream: str, log: _Log) -> web.Application:
    """The proxy as an application of aiohttp. Requests of any size pass."""
    proxy = Proxy(upstream.rstrip("/"), log)
    app = web.Application(client_max_size=1 << 40)
    app.on_startup.append(proxy.start)
    app.on_cleanup.append(proxy.stop)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    return app


def record(
    upstream: str, path: Path, host: str, port: int, say: Callable[[str], None], **constant: object
) -> Counts:
    """Serve until Ctrl-C or SIGTERM. say: is given each line that a person reads. Returns what passed.

    constant: fields of every line, such as a temperature that requests do not name. Raises ValueError for an
    address that is none and a file that exists, OSError for a port that is taken.
    """
    if not upstream.startswith(("http://", "https://")):
        raise ValueError(f"record: --upstream ({upstream}) must begin with http:// or https://")
    log = _Log(Recorder(path, **constant))
    try:
        asyncio.run(_serve(make_app(upstream, log), host, port, upstream, say))
    finally:
        log.close()
    return log.counts


async def _serve(
    app: web.Application, host: str, port: int, upstream: str, say: Callable[[str], None]
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    # A request's body is passed as it came; and where a client hangs up, the server is to know.
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=5.0, auto_decompress=False, handler_cancellation=True
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        taken = site._server.sockets[0].getsockname()[1]
        say(f"recording http://{host}:{taken} -> {upstream}; Ctrl-C ends it")
        await stopped.wait()
    finally:
        await runner.cleanup()
