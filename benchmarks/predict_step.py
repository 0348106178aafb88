"""An exact step on an H100, predicted part by part without a GPU, from counts and measured rates.

    python -m zerokl.benchmarks.predict_step [--budget tests/triton/budget.json] [--launch_us 14]

Floating-point operations and kept numbers are those of model/operations.py, launches those of budget.json.
The rates were measured on an H100 80GB HBM3 with prototypes of the kernels that the code has now. So the
table says what to compare with on the day of a GPU, and a part that is slower must be looked at. Figures that
the same prototypes showed as a whole stand below it, as a check of the way of predicting.

A part takes the larger of its GPU time and of its host time, because launches run ahead. Graphs of a decoding
turn have no launches of the host.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from zerokl.benchmarks.machine import SHAPES, shape_config
from zerokl.model.config import ModelConfig
from zerokl.model.operation import Equation, Work
from zerokl.model.operations import layer_bytes_per_token, operations
from zerokl.model.weights import Layout

BUDGET = Path(__file__).parents[1] / "tests" / "triton" / "budget.json"
PROMPTS, SAMPLES, PROMPT, NEW = 8, 8, 128, 256
VOCABULARY = 151936
# Floating-point operations a second, bf16: products forward and for dx; weight gradients; attention forward
# and backward at sequences of 512.
PRODUCTS, WEIGHT_GRADIENTS, ATTENTION, ATTENTION_BACKWARD = 630e12, 390e12, 203e12, 200e12
# Bytes a second of kernels that only move data.
MEMORY = 3.0e12
# Seconds that a kernel of few rows takes in a graph beyond what it reads, fitted to the turns below.
SMALL_KERNEL = 4.7e-6
# Passes over the logits of the head: forward, logits again, dh, and the weight gradient apart.
HEAD_PASSES = 3
# Launches of a layer that a decoding turn would not have, where another kernel did their work.
FUSIONS = {
    "silu in the product of gate and up": 1,
    "q/k norm, rope and cache in the product of q, k, v": 1,
    "both additions and norms in the products that read them": 2,
}


class Part(NamedTuple):
    """Seconds of a part of a step."""

    name: str
    gpu: float
    host: float

    @property
    def seconds(self) -> float:
        return max(self.gpu, self.host)


def _flops(c: ModelConfig, work: Work, *equations: Equation) -> float:
    rows = [row for _, _, row in operations(c) if row.equation in equations]
    return sum(n * each for row in rows for n, each in zip(work, row.flops, strict=True))


def turn(c: ModelConfig, rows: int, context: int, launches: int) -> float:
    """GPU seconds of a decoding turn: weights and cache are read once, and each kernel takes its least."""
    weights = Layout(c).numel * 2
    cache = rows * context * c.layers * 2 * c.kv_heads * c.head_dim * 2
    return (weights + cache) / MEMORY + launches * SMALL_KERNEL


def training(c: ModelConfig, work: Work) -> float:
    """GPU seconds of a forward and backward."""
    layers = _flops(c, work, Equation.LINEAR)
    head = _flops(c, work, Equation.LOGPROB)
    attention = _flops(c, work, Equation.ATTENTION)
    moved = 4 * work.tokens * c.layers * layer_bytes_per_token(c, 2)  # written, read, and the same backward
    return (
        (2 * layers + HEAD_PASSES * head) / PRODUCTS
        + (layers + head) / WEIGHT_GRADIENTS
        + attention / ATTENTION
        + 2.5 * attention / ATTENTION_BACKWARD
        + moved / MEMORY
    )


def parts(c: ModelConfig, budget: dict[str, dict[str, int]], launch_s: float) -> list[Part]:
    """The parts of a step of PROMPTS x SAMPLES x NEW tokens."""
    sequences, weights = PROMPTS * SAMPLES, Layout(c).numel
    mean_context = PROMPT + NEW // 2
    decoding = NEW * turn(c, sequences, mean_context, budget["turn"]["launches"])
    tokens, pairs = sequences * NEW + PROMPTS * PROMPT, sequences * NEW * mean_context
    trained = training(c, Work(tokens, pairs, sequences * NEW))
    prompts = training(c, Work(PROMPTS * PROMPT, PROMPTS * PROMPT**2 // 2, 0)) / 3
    passes = 2 * budget["pass"]["launches"] * launch_s  # 8 virtual shards, 4 in a pass
    return [
        Part("prompts read", prompts, budget["turn"]["launches"] * launch_s),
        Part(f"decoding, {NEW} turns in graphs", decoding, 0.0),
        Part("forward and backward", trained, passes),
        # AdamW: gradient, three fp32 states read and written, the rounded weights written.
        Part("optimizer", weights * (4 + 6 * 4 + 2) / MEMORY, 0.0),
        # The digests read gradient, moments, master and rounded weights.
        Part("ledger's digests", weights * (4 + 8 + 4 + 2) / MEMORY, 0.0),
    ]


def main() -> None:
    """Print the prediction."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=Path, default=BUDGET)
    parser.add_argument("--launch_us", type=float, default=14.0, help="host time of a launch")
    args = parser.parse_args()
    budget = json.loads(args.budget.read_text())["0.6B"]
    c = shape_config(SHAPES["0.6B"], VOCABULARY)
    rows = parts(c, budget, args.launch_us * 1e-6)
    print(f"{'part':<34}{'GPU ms':>9}{'host ms':>9}{'ms':>9}")
    for part in rows:
        print(f"{part.name:<34}{part.gpu * 1e3:>9.1f}{part.host * 1e3:>9.1f}{part.seconds * 1e3:>9.1f}")
    print(f"{'step':<52}{sum(part.seconds for part in rows) * 1e3:>9.1f}")
    print("\nthe same way of predicting, beside what the prototypes showed as a whole")
    whole = training(c, Work(4096, 4096 * 256, 4096))
    print(f"{'forward and backward, 4,096 tokens':<43}{whole * 1e3:>9.1f}   shown 37.8")
    for context, shown in ((64, 1.90), (128, 2.06), (256, 2.37)):
        predicted = turn(c, 64, context, budget["turn"]["launches"])
        print(
            f"{f'a decoding turn of 64 rows at {context} tokens':<43}{predicted * 1e3:>9.2f}   shown {shown}"
        )
    launches = budget["turn"]["launches"]
    today = turn(c, 64, 256, launches)
    least = launches * SMALL_KERNEL
    print(f"\nthat turn at 256 tokens: {launches} launches, of which {least * 1e3:.2f} ms are their least")
    for name, n in [*FUSIONS.items(), ("all three", sum(FUSIONS.values()))]:
        fused = turn(c, 64, 256, launches - n * c.layers)
        print(f"{name:<57}{launches - n * c.layers:>5}{fused * 1e3:>6.2f}{fused / today:>6.2f}")


if __name__ == "__main__":
    main()
