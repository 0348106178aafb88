"""The completions in what went over the wire: a request to an inference server, and its answer.

| server | the request asks for | the answer has |
| --- | --- | --- |
| vLLM, /v1/completions | return_token_ids, logprobs | prompt_token_ids, token_ids, logprobs |
| vLLM, /v1/chat/completions | the same | the same |
| SGLang, /generate | return_logprob | meta_info.output_token_logprobs |

Streams are server-sent events. Those of vLLM hold what is new; those of SGLang hold all so far, or what is
new.
"""

import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..files.inputs import LINE_BYTES
from ..files.reading import parse_json
from .recorder import sampling_fields

# Bytes of a request that are read, and of an answer, packed and unpacked. JSON takes up to 30 times as much
# memory as its text; a prompt of a million ids has 7 MB. The streams of SGLang repeat all tokens so far.
REQUEST_BYTES, ANSWER_BYTES = 1 << 24, LINE_BYTES
# Paths whose answers hold completions, without the prefix that a server may stand under.
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")


class NotRecordedError(ValueError):
    """Why an answer leaves no line."""


@dataclass
class Completion:
    """One completion of an answer, as fields of a log."""

    prompt_ids: list[int] | None = None
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exchange:
    """A request and its answer, with their headers. answer: the pieces of its body."""

    path: str
    request_headers: Mapping[str, str]
    request: bytes
    answer_headers: Mapping[str, str]
    answer: list[bytes]


def is_recorded(path: str) -> bool:
    """Whether the answers of a path hold completions."""
    return path.endswith(PATHS)


def has_last_event(pieces: list[bytes]) -> bool:
    """Whether the last event of a stream has come. A client may hang up then, before the answer's end."""
    return b"".join(pieces[-16:]).rstrip().endswith(b"[DONE]")


def completions(exchange: Exchange) -> Iterator[Completion]:
    """The completions of an answer.

    Raises NotRecordedError for an answer without ids or logprobs, and for what cannot be read.
    """
    request = _decoded(exchange.request, exchange.request_headers, REQUEST_BYTES, "request")
    asked = _json(request, "the request")
    if not isinstance(asked, dict):
        raise NotRecordedError("the request is no JSON object")
    body = _decoded(b"".join(exchange.answer), exchange.answer_headers, ANSWER_BYTES, "answer")
    events = _objects(body, "event-stream" in exchange.answer_headers.get("Content-Type", ""))
    if exchange.path.endswith("/generate"):
        yield from _sglang(asked, events)
    else:
        yield from _openai(asked, events)


def _json(content: bytes, what: str) -> Any:
    try:
        return parse_json(content, non_finite=True)
    except ValueError:
        raise NotRecordedError(f"{what} is no JSON") from None


def _decoded(body: bytes, headers: Mapping[str, str], most_bytes: int, what: str) -> bytes:
    """A body without its compression. A small one may unpack to a very large one."""
    encoding = headers.get("Content-Encoding", "").lower()
    try:
        if encoding == "gzip":
            body = gzip.GzipFile(fileobj=io.BytesIO(body)).read(most_bytes + 1)
        elif encoding == "deflate":
            body = zlib.decompressobj().decompress(body, most_bytes + 1)
        elif encoding not in ("", "identity"):
            raise NotRecordedError(f"the {what} is compressed, and not by gzip or deflate")
    except (OSError, EOFError, zlib.error):
        raise NotRecordedError(f"the {what} is no {encoding}") from None
    if len(body) > most_bytes:
        raise NotRecordedError(f"the {what} unpacks to more than {most_bytes >> 20} MiB")
    return body


def _objects(body: bytes, stream: bool) -> Iterator[dict[str, Any]]:
    """The JSON objects of an answer, one at a time."""
    whole = None if stream else _json(body, "the answer")
    for event in _events(body) if stream else whole if isinstance(whole, list) else [whole]:
        if not isinstance(event, dict):
            raise NotRecordedError("the answer is no JSON object")
        yield event


def _events(body: bytes) -> Iterator[Any]:
    """The objects of a stream of server-sent events. Its last event is [DONE], or the stream was cut."""
    ended = False
    for block in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if data == b"[DONE]":
            ended = True
        elif data:
            yield _json(data, "an event of the answer")
    if not ended:
        raise NotRecordedError("the answer was cut")


def _openai(asked: dict[str, Any], events: Iterator[dict[str, Any]]) -> Iterator[Completion]:
    """An answer of vLLM, whole or as events: each adds to the completions of its choices."""
    by_index: dict[int, Completion] = {}
    shared: list[int] | None = None  # a chat has one prompt, which stands beside the choices
    request_id = None
    for event in events:
        if "error" in event:
            raise NotRecordedError("the answer is an error")
        request_id = request_id or event.get("id")
        shared = shared or event.get("prompt_token_ids")
        for choice in event.get("choices") or ():
            completion = by_index.setdefault(choice.get("index", 0), Completion())
            completion.prompt_ids = completion.prompt_ids or choice.get("prompt_token_ids")
            ids = choice.get("token_ids") or []
            completion.completion_ids += ids
            completion.logprobs += _openai_logprobs(choice.get("logprobs"), len(ids))
    if asked.get("echo"):
        raise NotRecordedError("the request echoes the prompt")
    for index, completion in sorted(by_index.items()):
        completion.prompt_ids = completion.prompt_ids or shared
        # The server chooses what a request does not say of its distribution; no line has that.
        completion.fields = sampling_fields(asked.get) | {"sample": index, "prompt": request_id}
        yield _checked(completion, "return_token_ids and logprobs")


def _openai_logprobs(logprobs: Any, count: int) -> list[float | None]:
    """The logprobs of a choice's tokens. A chat has a list of objects, a completion lists side by side."""
    if not isinstance(logprobs, dict):
        return [None] * count
    if logprobs.get("content") is not None:
        return [token.get("logprob") for token in logprobs["content"]]
    return list(logprobs.get("token_logprobs") or [None] * count)


def _sglang(asked: dict[str, Any], events: Iterator[dict[str, Any]]) -> Iterator[Completion]:
    """An answer of SGLang: one object or event for each prompt, by index, with all tokens or the new ones."""
    by_index: dict[int, Completion] = {}
    streamed = bool(asked.get("stream"))
    for position, event in enumerate(events):
        if "error" in event:
            raise NotRecordedError("the answer is an error")
        meta = event.get("meta_info") or {}
        index = event.get("index", 0 if streamed else position)
        completion = by_index.setdefault(index, Completion())
        pairs = meta.get("output_token_logprobs") or []
        if len(pairs) == meta.get("completion_tokens"):
            completion.completion_ids, completion.logprobs = [], []
        completion.completion_ids += [pair[1] for pair in pairs]
        completion.logprobs += [pair[0] for pair in pairs]
        if inputs := meta.get("input_token_logprobs"):
            completion.prompt_ids = [pair[1] for pair in inputs]
        completion.fields = {"prompt": meta.get("id"), "sample": index}
        if reason := meta.get("finish_reason"):
            completion.fields["finish_reason"] = reason
        if str(version := meta.get("weight_version", "")).isdecimal():
            completion.fields["weight_version"] = int(version)
    params = asked.get("sampling_params") or {}
    for index, completion in sorted(by_index.items()):
        fields = params[index] if isinstance(params, list) else params
        given = asked.get("input_ids")
        if given:
            completion.prompt_ids = given[index] if isinstance(given[0], list) else given
        completion.fields |= sampling_fields(fields.get)
        yield _checked(completion, "return_logprob, and input_ids in place of text")


def _checked(completion: Completion, remedy: str) -> Completion:
    """A completion with all that a line needs. Raises NotRecordedError."""
    ids, logprobs = completion.completion_ids, completion.logprobs
    if not ids or not completion.prompt_ids:
        raise NotRecordedError(f"no token ids in the answer; ask for {remedy}")
    if len(logprobs) != len(ids) or all(x is None for x in logprobs):
        raise NotRecordedError(f"no logprobs in the answer; ask for {remedy}")
    return completion
