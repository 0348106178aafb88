"""A running SGLang server as the sampler of an audit (`zerokl audit MODEL --sampler http://HOST:PORT`).

Its own endpoint takes and gives token ids, with the log-probability of each: POST /generate with input_ids
and return_logprob. What it draws is written as a log, and audited as one: beside the model, by every
hypothesis. The form is that of SGLang 0.5.23 (sglang/srt/entrypoints/http_server.py).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from ..audit.config import AuditConfig
from ..audit.drawing import requests
from ..audit.engines.audited_model import audited_model
from ..engine.display.progress import silent
from ..engine.tasks.tokenizer import Tokenizer
from ..files.http_request import request
from ..files.reading import one_line, parse_json
from ..kernels.sampling_params import SamplingParams
from ..model.checkpoint import resolve_model
from .proxy_answers import Exchange, NotRecordedError, completions
from .recorder import Recorder

# Prompts of one request.
_TOGETHER = 64
# What tells about the model; the second is what it was called before.
_MODEL_INFO = ("/model_info", "/get_model_info")


def draw_log(address: str, cfg: AuditConfig, log: Path, stage: Callable[[str], None] = silent) -> None:
    """Let a server draw cfg.n completions, and write them to `log`, which must not exist.

    stage: is called with what begins now, in words. Raises ValueError for a server that does not answer, or
    is no SGLang.
    """
    address = address.rstrip("/")
    name = served_model(address)
    folder = resolve_model(cfg.model)
    model = audited_model(folder, ())
    tokenizer = Tokenizer(folder, model.vocab_size)
    prompts, max_tokens = requests(cfg, tokenizer, model.max_positions)
    prompts = [prompts[i % len(prompts)] for i in range(cfg.n)]
    params = request_params(cfg.sampling_params.check(), max_tokens, sorted(tokenizer.stop_ids))
    stage(f"drawing {cfg.n} completions with SGLang at {address}, which serves {name}")
    with Recorder(log) as recorder:
        for start in range(0, len(prompts), _TOGETHER):
            for ids, logprobs, prompt, fields in _drawn(address, prompts[start : start + _TOGETHER], params):
                recorder.record(prompt, ids, logprobs, **fields)


def served_model(address: str) -> str:
    """The model that a server of SGLang serves. Raises ValueError for another server, and for none."""
    for path in _MODEL_INFO:
        try:
            body = _answer(address + path, None)
        except HTTPError:
            continue
        try:
            info = parse_json(body)
        except ValueError as error:
            raise ValueError(f"audit: {address}{path} {error}") from None
        if isinstance(info, dict) and isinstance(info.get("model_path"), str):
            return one_line(info["model_path"])
    raise ValueError(
        f"audit: {address} is no server of SGLang ({' and '.join(_MODEL_INFO)} name no model_path); of "
        f"another one, stand `zerokl record --upstream {address}` before it, and audit the log"
    )


def request_params(params: SamplingParams, max_tokens: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Sampling parameters in SGLang's names. All are given: a server has defaults of its own."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": max_tokens,
        "stop_token_ids": list(stop_ids),
    }


def _drawn(address: str, prompts: Sequence[Sequence[int]], params: dict[str, Any]) -> list[tuple]:
    """(completion_ids, logprobs, prompt_ids, fields) of each prompt."""
    asked = {"input_ids": [list(ids) for ids in prompts], "sampling_params": params, "return_logprob": True}
    content = json.dumps(asked).encode()
    try:
        answer = _answer(f"{address}/generate", content)
        drawn = list(completions(Exchange("/generate", {}, content, {}, [answer])))
    except HTTPError as error:
        told = one_line(error.read(2000).decode(errors="replace"))
        raise ValueError(f"audit: {address}/generate answers {error.code}: {told}") from None
    except NotRecordedError as error:
        raise ValueError(f"audit: {address}/generate: {error}") from None
    if len(drawn) != len(prompts):
        raise ValueError(f"audit: {address}/generate gave {len(drawn)} completions of {len(prompts)} prompts")
    return [(x.completion_ids, x.logprobs, x.prompt_ids, x.fields) for x in drawn]


def _answer(url: str, content: bytes | None) -> bytes:
    """As `request`, whose ValueError is of the audit."""
    try:
        return request(url, content)
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None
