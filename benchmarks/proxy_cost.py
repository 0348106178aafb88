"""What `zerokl record` costs before a real server: answers of vLLM directly and through the proxy, by turns.

    .venv-vllm/bin/python -m zerokl.benchmarks.proxy_cost MODEL [--tokens 128] [--at_once 8] [--rounds 10]

Prints the medians of a round in seconds, their ratio, and whether both ways gave the same answers.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BIN = Path(sys.executable).parent
START_S = 600.0


@contextlib.contextmanager
def server(model: str) -> Iterator[int]:
    """vLLM's server of the model; its port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [BIN / "vllm", "serve", model, "--served-model-name", "m", "--port", str(port)]
    words += ["--logprobs-mode", "processed_logprobs", "--max-model-len", "1024", "--enforce-eager"]
    log = tempfile.TemporaryFile()
    process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                yield port
                return
            time.sleep(1)
        log.seek(max(0, log.tell() - 2000))
        sys.exit(f"vllm serve did not start: {log.read().decode(errors='replace')}")
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def proxy(upstream: int, out: Path) -> Iterator[int]:
    """The recording proxy before it; its port."""
    words = [
        BIN / "zerokl",
        "record",
        "--upstream",
        f"http://127.0.0.1:{upstream}",
        "--out",
        out,
        "--port",
        "0",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield int(re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[1])
    finally:
        process.terminate()
        process.wait()


def answer(port: int, seed: int, tokens: int) -> list[int]:
    """The token ids of one streamed completion."""
    body = {
        "model": "m",
        "prompt": [5 + seed, 6, 7, 8],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
    }
    body |= {"stream": True, "return_token_ids": True, "logprobs": 0, "temperature": 1.0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    ids = []
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
    return ids


def a_round(port: int, at_once: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and ids of `at_once` answers side by side."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        ids = list(pool.map(lambda seed: answer(port, seed, tokens), range(at_once)))
    return time.perf_counter() - begin, ids


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name, value in (("tokens", 128), ("at_once", 8), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with (
        tempfile.TemporaryDirectory() as folder,
        server(a.model) as port,
        proxy(port, Path(folder) / "log.jsonl") as recording,
    ):
        ways = {"directly": port, "through the proxy": recording}
        rounds = {name: [] for name in ways}
        for i in range(a.rounds + 1):
            for name in sorted(ways, reverse=i % 2 == 1):
                rounds[name].append(a_round(ways[name], a.at_once, a.tokens))
    seconds = {name: statistics.median(s for s, _ in found[1:]) for name, found in rounds.items()}
    for name, median in seconds.items():
        print(f"{name}: {median:.3f} s, median of {a.rounds} rounds of {a.at_once} x {a.tokens} tokens")
    print(f"ratio {seconds['through the proxy'] / seconds['directly']:.4f}")
    answers = [ids for found in rounds.values() for _, ids in found]
    print("the same answers" if all(ids == answers[0] for ids in answers) else "other answers")


if __name__ == "__main__":
    main()
