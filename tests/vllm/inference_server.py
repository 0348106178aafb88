"""A server that answers as vLLM and SGLang do, at a realistic speed. python inference_server.py PORT_FILE"""

import asyncio
import gzip
import json
import sys
from pathlib import Path

from aiohttp import web

PROMPT, TOKENS = [5, 6, 7], 24


def ids(seed: int, count: int = TOKENS) -> list[int]:
    return [(7 * seed + 3 * i) % 50 for i in range(count)]


def logprobs(seed: int, count: int = TOKENS) -> list[float]:
    return [-((seed + i) % 13) / 7 for i in range(count)]


async def complete(request: web.Request) -> web.StreamResponse:
    """vLLM, chat and completions; `n` choices. A request may say `tokens`, and `wait_s`, the time of one."""
    body = await request.read()
    if "X-Unread" in request.headers:
        body = b"{}"
    elif "Content-Encoding" in request.headers:
        body = gzip.decompress(body)
    asked = json.loads(body)
    chat, wait_s = "chat" in request.path, asked.get("wait_s", 0.0)
    if asked.get("fail"):
        return web.json_response({"error": {"message": "no such model"}}, status=404)
    given = bool(asked.get("return_token_ids"))
    count = asked.get("tokens", TOKENS)
    choices = [_choice(chat, i, ids(i, count), logprobs(i, count), given) for i in range(asked.get("n", 1))]
    whole = {"id": "cmpl-1", "choices": choices, "usage": {"completion_tokens": count}}
    if given and chat:
        whole["prompt_token_ids"] = PROMPT
    if not asked.get("stream"):
        await asyncio.sleep(wait_s * count)
        if asked.get("compressed"):
            body = gzip.compress(json.dumps(whole).encode())
            return web.Response(
                body=body, headers={"Content-Encoding": "gzip"}, content_type="application/json"
            )
        return web.json_response(whole)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for t in range(count):
        await asyncio.sleep(wait_s)
        if asked.get("dies") and t == 3:
            request.transport.abort()
            return response
        for i in range(asked.get("n", 1)):
            part = _choice(chat, i, ids(i, count)[t : t + 1], logprobs(i, count)[t : t + 1], given)
            if t and not chat:
                part.pop("prompt_token_ids", None)
            event = {"id": "cmpl-1", "choices": [part]}
            if chat and given and t == 0:
                event["prompt_token_ids"] = PROMPT
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await asyncio.sleep(asked.get("end_s", 0))
    await response.write_eof()
    return response


def _choice(chat: bool, index: int, tokens: list[int], column: list[float], given: bool) -> dict:
    choice = {"index": index, "finish_reason": None}
    if given:
        choice["token_ids"] = tokens
    if chat:
        content = [{"token": str(t), "logprob": x} for t, x in zip(tokens, column, strict=True)]
        return choice | {"delta": {"content": "x"}, "logprobs": {"content": content}}
    choice |= {"text": "x", "logprobs": {"token_logprobs": column, "tokens": list(map(str, tokens))}}
    return choice | ({"prompt_token_ids": PROMPT} if given else {})


async def generate(request: web.Request) -> web.StreamResponse:
    """SGLang; a stream holds all tokens so far, or (`new_only`) the new ones."""
    asked = json.loads(await request.read())
    pairs = [[x, t, None] for x, t in zip(logprobs(4), ids(4), strict=True)]

    def event(upto: int, since: int = 0) -> dict:
        meta = {"id": "g", "completion_tokens": upto, "weight_version": "3"}
        meta["output_token_logprobs"] = pairs[since:upto]
        return {"text": "x", "meta_info": meta, "index": 0}

    if not asked.get("stream"):
        return web.json_response(event(TOKENS))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for t in range(1, TOKENS + 1):
        since = t - 1 if asked.get("new_only") else 0
        await response.write(f"data: {json.dumps(event(t, since))}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def hang(request: web.Request) -> web.Response:
    """Answers after a minute; counts the clients that did not wait for it."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        request.app["left"].append(1)
        raise
    return web.Response()


async def left(request: web.Request) -> web.Response:
    return web.Response(text=str(len(request.app["left"])))


async def echo(request: web.Request) -> web.Response:
    """All that arrived, so that a test sees what a proxy changed."""
    body = await request.read()
    seen = {"method": request.method, "path": request.raw_path, "body": body.hex()}
    seen["headers"] = sorted((k.lower(), v) for k, v in request.headers.items() if k.lower() != "host")
    return web.json_response(seen, status=207, headers={"X-Mine": "a", "Server": "s"})


async def named(request: web.Request) -> web.Response:
    """An answer with a header of the connection, by the name that Connection gives it."""
    return web.Response(headers={"Connection": "X-Hop", "X-Hop": "1", "X-Mine": "a"})


def app() -> web.Application:
    server = web.Application(client_max_size=1 << 30)
    server.router.add_post("/v1/completions", complete)
    server.router.add_post("/v1/chat/completions", complete)
    server.router.add_post("/generate", generate)
    server["left"] = []
    server.router.add_post("/hang", hang)
    server.router.add_get("/left", left)
    server.router.add_get("/named", named)
    server.router.add_route("*", "/{path:.*}", echo)
    return server


async def main(port_file: Path) -> None:
    runner = web.AppRunner(app(), access_log=None, auto_decompress=False, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port_file.write_text(str(site._server.sockets[0].getsockname()[1]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
