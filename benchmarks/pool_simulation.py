"""What a pool of actors would give on 8, 64 and 1,024 GPUs, and which part ends its growth.

    python -m zerokl.benchmarks.pool_simulation [--model 0.6B] [--samples_per_actor 128] [--nic_gb_s 25]

Events of a run, with the rules of rollout/pool/dispatch.py and train/ahead.py: when step t begins, the draw
of step t + k can begin, as soon as its weights lie on the actor's node; batches wait in their order; an actor
takes the next one when it is free; step t trains when all its batches have been answered and taken.

    a decoding turn, forward and backward     predict_step.py, from rates measured on an H100
    lengths                                   log-normal, median a third of the limit, cut there
    the driver's work for a sample            measured here: processor time of the real objects
    hashing weights                           measured here, on each side
    weights' way                              an assumption: --nic_gb_s, in a tree over nodes of 8 GPUs

The trainer's GPUs divide its work evenly, and exchange fp32 gradients at --nic_gb_s. The pool takes one rank
today, so more trainer GPUs than one are what ranks beside a pool would give. A step has --samples_per_actor
for each actor, in batches of 64. The split of the GPUs into trainer and actors is the best of all powers of
two. Nothing of this was run on a cluster.
"""

import argparse
import hashlib
import heapq
import json
import math
import pickle
import time
from typing import NamedTuple

import numpy as np
from zerokl.benchmarks.machine import SHAPES, shape_config
from zerokl.benchmarks.predict_step import BUDGET, VOCABULARY, training, turn
from zerokl.engine.rollout.pool.actor import Answer, WeightsId
from zerokl.engine.rollout.types import Completion, Rollout
from zerokl.model.config import ModelConfig
from zerokl.model.operation import Work
from zerokl.model.weights import Layout

PROMPT, LIMIT, BATCH, STEPS, NODE = 128, 1024, 64, 12, 8
# Different batches, of which each one of a run is one.
KINDS = 64


class Rates(NamedTuple):
    """Seconds."""

    batches: list[tuple[float, int]]  # seconds and tokens of some batches
    train_token_s: float
    sample_s: float  # of the driver, for a sample
    hash_s: float  # of all weights, on one side
    weight_bytes: int
    nic: float  # bytes a second


class Outcome(NamedTuple):
    """Of a whole run, without its first steps."""

    step_s: float
    trainer_idle: float
    actors_idle: float
    driver_busy: float


def driver_sample_s(tokens: int) -> float:
    """Processor seconds of the driver for a sample: to read an answer, and to make and hash a rollout."""
    ids, logprobs = tuple(range(tokens)), np.zeros(tokens, np.float32)
    answer = Answer([Completion(ids, logprobs, "stop", 3)] * BATCH, WeightsId(3, "0" * 64), 1.0)
    sent = pickle.dumps(answer)
    began = time.process_time()
    for _ in range(20):
        for c in pickle.loads(sent).completions:
            rollout = Rollout.of_one_turn(0, 0, ids[:PROMPT], c.ids, c.logprobs, c.finish, c.weight_version)
            hashlib.sha256(np.array(rollout.ids).tobytes() + rollout.logprobs.tobytes()).digest()
    return (time.process_time() - began) / (20 * BATCH)


def hash_bytes_per_s() -> float:
    """SHA-256 of one core."""
    data = bytes(64 << 20)
    began = time.process_time()
    hashlib.sha256(data).digest()
    return len(data) / (time.process_time() - began)


def rates(c: ModelConfig, nic: float) -> Rates:
    """Measured and predicted rates for a model."""
    launches = json.loads(BUDGET.read_text())["0.6B"]["turn"]["launches"]
    contexts = range(0, PROMPT + LIMIT + 64, 64)
    table = np.array([[turn(c, max(1, b), x, launches) for x in contexts] for b in range(BATCH + 1)])
    draw, tokens = np.random.default_rng(0), 1 << 16
    batches = [(batch_s(x, table), int(x.sum())) for x in (lengths_of(BATCH, draw) for _ in range(KINDS))]
    train_s = training(c, Work(tokens, tokens * (PROMPT + LIMIT // 4), tokens)) * 4 / 3  # older weights too
    weight_bytes = Layout(c).numel * 2
    hash_s = weight_bytes / hash_bytes_per_s()
    return Rates(batches, train_s / tokens, driver_sample_s(LIMIT // 3), hash_s, weight_bytes, nic)


def batch_s(lengths: np.ndarray, turn_s: np.ndarray) -> float:
    """Seconds of a batch: turns until the longest sample has ended, each with the rows that are left."""
    turns = np.arange(lengths.max())
    rows = (lengths[None, :] > turns[:, None]).sum(axis=1)
    return float(turn_s[rows, (PROMPT + turns) // 64].sum())


def lengths_of(n: int, draw: np.random.Generator) -> np.ndarray:
    """Tokens of n completions."""
    return np.minimum(LIMIT, np.maximum(1, draw.lognormal(math.log(LIMIT / 3), 0.6, n))).astype(int)


def simulate(actors: int, trainers: int, samples: int, k: int, r: Rates, tree: bool) -> Outcome:
    """A run of STEPS steps. tree: weights go in a tree; else from the driver's node to each other one."""
    draw, nodes = np.random.default_rng(1), -(-actors // NODE)
    hops = math.ceil(math.log2(nodes + 1)) if tree else nodes
    publish_s = 2 * r.hash_s + hops * r.weight_bytes / r.nic
    gradients_s = 0.0 if trainers == 1 else 2 * 2 * r.weight_bytes / r.nic
    free, ended = [0.0] * actors, [0.0]  # ended[t]: of step t - 1, when the weights of step t are known
    busy_s = idle_s = driver_s = driver_free = 0.0
    for t in range(STEPS):
        start, tokens, done = ended[max(0, t - k)] + publish_s, 0, []
        for kind in draw.integers(KINDS, size=samples // BATCH):
            seconds, batch_tokens = r.batches[kind]
            end = max(start, heapq.heappop(free)) + seconds
            heapq.heappush(free, end)
            done.append(end)
            busy_s, tokens = busy_s + seconds, tokens + batch_tokens
        for end in sorted(done):  # the driver takes one answer at a time
            driver_free = max(driver_free, end) + BATCH * r.sample_s
            driver_s += BATCH * r.sample_s
        train_began = max(ended[-1], driver_free)
        idle_s += train_began - ended[-1]
        ended.append(train_began + tokens * r.train_token_s / trainers + gradients_s)
    total = ended[-1]
    return Outcome(total / STEPS, idle_s / total, 1 - busy_s / (total * actors), driver_s / total)


def best(gpus: int, samples_per_actor: int, k: int, r: Rates, tree: bool) -> tuple[float, int, Outcome]:
    """Samples a second of the best split, its trainer's GPUs, and its outcome."""
    candidates = []
    for trainers in (1 << i for i in range(int(math.log2(gpus)))):
        actors = gpus - trainers
        samples = actors * samples_per_actor // BATCH * BATCH
        outcome = simulate(actors, trainers, samples, k, r, tree)
        candidates.append((samples / outcome.step_s, trainers, outcome))
    return max(candidates)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="0.6B")
    parser.add_argument("--samples_per_actor", type=int, default=128)
    parser.add_argument("--nic_gb_s", type=float, default=25.0)
    args = parser.parse_args()
    r = rates(shape_config(SHAPES[args.model], VOCABULARY), args.nic_gb_s * 1e9)
    hashed = r.weight_bytes / r.hash_s / 1e9
    print(f"driver {r.sample_s * 1e6:.0f} us a sample, SHA-256 {hashed:.2f} GB/s a core")
    print(f"{'k':>2}{'weights':>9}{'GPUs':>6}{'trainer':>9}{'step s':>8}{'samples/s':>11}", end="")
    print(f"{'of linear':>11}{'trainer idle':>14}{'actors idle':>13}{'driver busy':>13}")
    for k in (0, 1, 2):
        for tree in (True, False):
            alone = 0.0
            for gpus in (8, 64, 1024):
                rate, trainers, o = best(gpus, args.samples_per_actor, k, r, tree)
                alone = alone or rate / gpus
                words = "tree" if tree else "star"
                print(f"{k:>2}{words:>9}{gpus:>6}{trainers:>9}{o.step_s:>8.2f}{rate:>11.0f}", end="")
                print(f"{rate / gpus / alone:>11.2f}{o.trainer_idle:>14.2f}{o.actors_idle:>13.2f}", end="")
                print(f"{o.driver_busy:>13.2f}", flush=True)


if __name__ == "__main__":
    main()
