"""What `zerokl record` costs a real server: answers of vLLM's own server, directly and through the proxy.

    python benchmarks/proxy_cost.py MODEL        (`make bench-proxy`)

vLLM's OpenAI-compatible server runs MODEL on this machine, and `zerokl record` runs before it. A turn
is STREAMS answers at once of TOKENS tokens each, streamed with ids and log-probabilities. The two ways take
turns, in an order that changes, and the ratio is taken turn by turn. The answers are greedy, so both ways
have the same work, and each answer must be the same token by token. Two settings:

- apart: the server has a core of its own, and the proxy and the client have the others.
- shared: the server computes on all cores, so every microsecond of the proxy is taken from it.

Results go to benchmarks/results/cpu/proxy_cost.json.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout
from zerokl.verify.run_environment import cpu_name

OUT = Path(__file__).parent / "results" / "cpu" / "proxy_cost.json"
Answers = list[list[int]]  # the token ids of each answer


def start_server(model: Path, dtype: str, cores: set[int], port: int, log: Path) -> subprocess.Popen:
    """vLLM's server on these cores. It is not ready yet. Its own words go to `log`."""
    command = ["taskset", "-c", ",".join(map(str, sorted(cores)))]
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "model", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", "512", "--disable-uvicorn-access-log"]
    # Its threads follow the cores above; by itself vLLM would bind them to all cores.
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["OMP_NUM_THREADS"] = str(len(cores))
    with log.open("w") as words:
        return subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, env=environment)


def start_proxy(upstream: str, log: Path) -> tuple[subprocess.Popen, str]:
    """The proxy and its address."""
    zerokl = Path(sys.executable).with_name("zerokl")
    command = [zerokl, "record", "--upstream", upstream, "--out", str(log), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    return process, re.search(r"http://127\.0\.0\.1:\d+", line)[0]


async def ready(session: ClientSession, address: str, process: subprocess.Popen) -> None:
    """Wait until the server answers. Raises SystemExit where it has ended."""
    while process.poll() is None:
        try:
            async with session.get(f"{address}/health") as answer:
                if answer.status == 200:
                    return
        except ClientError:
            pass
        await asyncio.sleep(0.5)
    raise SystemExit(f"proxy_cost: the server ended with {process.returncode}")


async def answer(session: ClientSession, address: str, number: int, tokens: int) -> list[int]:
    """The ids of one streamed answer."""
    body = {
        "model": "model",
        "prompt": [1, 4093, 198, 2683 + number, 253, 2988],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
    }
    ids: list[int] = []
    async with session.post(f"{address}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
    return ids


async def turn(session: ClientSession, address: str, streams: int, tokens: int) -> tuple[float, Answers]:
    """Seconds that `streams` answers at once take, and the answers."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(answer(session, address, i, tokens) for i in range(streams)))
    return time.perf_counter() - began, answers


async def compare(args: argparse.Namespace, server: subprocess.Popen, direct: str, proxy: str) -> list[dict]:
    """The seconds of each turn, by way."""
    turns: list[dict] = []
    async with ClientSession(timeout=ClientTimeout(total=None)) as session:
        await ready(session, direct, server)
        _, expected = await turn(session, direct, args.streams, args.tokens)
        assert {len(ids) for ids in expected} == {args.tokens}
        for i in range(args.turns + 1):
            seconds = {}
            for way, address in (("direct", direct), ("proxy", proxy))[:: 1 if i % 2 else -1]:
                seconds[way], answers = await turn(session, address, args.streams, args.tokens)
                assert answers == expected, f"turn {i}, {way}: other tokens"
            turns.append(seconds)
            print(f"turn {i}: direct {seconds['direct']:.3f} s, proxy {seconds['proxy']:.3f} s", flush=True)
    return turns[1:]  # the first one warms up


def summary(turns: list[dict], recorded: int) -> dict:
    """What is written: medians, and the spread of the turns' ratios."""
    ratios = sorted(t["proxy"] / t["direct"] for t in turns)
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "turns": len(turns),
        "direct_s": statistics.median(t["direct"] for t in turns),
        "proxy_s": statistics.median(t["proxy"] for t in turns),
        "ratio": statistics.median(ratios),
        "ratio_quarters": [quarters[0], quarters[2]],
        "recorded": recorded,
    }


def measure(args: argparse.Namespace, server_cores: set[int], other_cores: set[int], folder: Path) -> dict:
    """Both ways by turns, with the server on some cores, and the proxy and the client on others."""
    direct, log = f"http://127.0.0.1:{args.port}", folder / "log.jsonl"
    os.sched_setaffinity(0, other_cores)
    proxy, address = start_proxy(direct, log)
    server = start_server(args.model, args.dtype, server_cores, args.port, folder / "server.log")
    try:
        turns = asyncio.run(compare(args, server, direct, address))
    except SystemExit:
        print((folder / "server.log").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        for process in (proxy, server):
            process.send_signal(signal.SIGINT)
            process.wait()
    return summary(turns, len(log.read_text().splitlines()))


def main() -> None:
    """Run both ways by turns, print the ratio, and write it to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--port", type=int, default=8765, help="of vLLM's server")
    args = parser.parse_args()
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    settings = {"apart": (one, cores - one), "shared": (cores, cores)}
    result = {name: getattr(args, name) for name in ("dtype", "streams", "tokens")}
    result |= {"machine": cpu_name(), "cores": len(cores), "vllm-cpu": version("vllm-cpu")}
    for name, arguments in settings.items():
        with tempfile.TemporaryDirectory() as folder:
            result[name] = measure(args, *arguments, Path(folder))
        print(name, "proxy / direct {ratio:.3f}, quarters {ratio_quarters}".format(**result[name]))
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
