"""What a live server of vLLM says of its weights, and of prefixes that it computed before an update.

Its workers hash their weights where the server was started with `ServedWeights` (integrations/weights.py).
"""

import json
import uuid
from typing import Any
from urllib.error import HTTPError

from ....files.http_request import request
from ....files.reading import parse_json

START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls zerokl.integrations.weights.ServedWeights"
)
# Tokens of the prompt that is asked twice: two blocks of a CPU's cache, which have 128.
_PROBE_TOKENS = 272
_FRESH = 3  # prefixes that no earlier request can have filled


def _ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that a server answers. Raises urllib's HTTPError, and ValueError where nothing answers."""
    try:
        return parse_json(request(address.rstrip("/") + path, body and json.dumps(body).encode()))
    except ValueError as error:
        raise ValueError(f"weights: {error}") from None


def served_hashes(address: str) -> Any:
    """The hashes of a server's weights, by the names of its checkpoint, unchecked.

    Raises ValueError where nothing answers, where the server was not started for it, and where it refuses.
    """
    try:
        workers = _ask(address, "/collective_rpc", {"method": "zerokl_weight_hashes"})["results"]
    except (HTTPError, KeyError, TypeError):
        raise ValueError(f"weights: {address} gives no hashes; start it with: {START}") from None
    hashes: dict[str, Any] = {}
    for worker in workers:
        if "refused" in worker:
            raise ValueError(worker["refused"])
        hashes |= worker["tensors"]
    return hashes


def stale_prefix(address: str, vocab_size: int) -> str:
    """How a prefix that the server keeps differs from one that it computes now; empty where it does not.

    One prompt is asked with the prefixes that all requests share, and with prefixes of its own (`cache_salt`
    of vLLM's requests). Each is asked twice, so that both answers read a cached prefix. The shared one is
    from an earlier call, where there was one, so a call before an update of the weights finds the prefix that
    the update left. Raises ValueError where the server cannot be asked.
    """
    try:
        served = _ask(address, "/v1/models")["data"][0]
        tokens = min(_PROBE_TOKENS, served["max_model_len"] - 2)
        body = {
            "model": served["id"],
            "prompt": [(7 * i + 3) % vocab_size for i in range(tokens)],
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 5,
        }
        shared = _cached(address, body)
        fresh = [_cached(address, body | {"cache_salt": uuid.uuid4().hex}) for _ in range(_FRESH)]
    except (HTTPError, LookupError, TypeError) as error:
        raise ValueError(f"weights: {address} gives no completions as vLLM does ({error})") from None
    apart = min(_distance(shared, x) for x in fresh)
    noise = max(_distance(a, b) for a in fresh for b in fresh)
    if apart <= 2.0 * noise:
        return ""
    return (
        f"a prefix that the server keeps gives log-probabilities that are {apart:.3g} nats from those of a "
        f"fresh one (which differ by {noise:.3g} among themselves): the cache survived an update"
    )


def _cached(address: str, body: dict[str, Any]) -> dict[str, float]:
    """The log-probabilities of the likeliest tokens, from the second of two equal requests."""
    answers = [_ask(address, "/v1/completions", body) for _ in range(2)]
    return answers[-1]["choices"][0]["logprobs"]["top_logprobs"][0]


def _distance(a: dict[str, float], b: dict[str, float]) -> float:
    """The largest difference over the tokens that both have; infinite where they share none."""
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=float("inf"))
