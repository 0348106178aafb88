"""What another sampler does to the gradient of SmolLM2-135M-Instruct, beside exact rollouts.

    python benchmarks/real/gradient.py MODEL OUT [KEY=VALUE ...]          (`make real-gradient`)

Each row is a run of train.toml in a process of its own, small enough for two CPU cores: the trainer computes
in fp32, another sampler draws, and each step measures its gradient (`monitor.gradient`, docs/gradient.md).
All rows begin with the same weights and prompts. Prints the table in Markdown and writes the figures to
OUT/gradient.json. samplers=NAME,NAME takes these only. One that is not installed is named and left out.
"""

import json
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

from train import run

SAMPLERS = {
    "e4m3": {"perturb.weights": "float8_e4m3fn/tensor"},
    "e5m2": {"perturb.weights": "float8_e5m2/tensor"},
    "hf-bf16": {"sampler": "hf", "precision.sampler_dtype": "bfloat16"},
    "vllm-bf16": {"sampler": "vllm", "precision.sampler_dtype": "bfloat16"},
}
# 128 completions a step: of 16 the noise hides each direction.
SMALL = {
    "exact": "false",
    "monitor.gradient": "1",
    "steps": "1",
    "prompts": "8",
    "num_generations": "16",
    "evaluation.every": "0",
}
LOSSES = ("none", "tis", "mis", "full", "full_sequence")


def figures(rows: list[dict]) -> dict[str, float]:
    """Means over the steps: KL a token and a sequence in nats, the cosines, and the floor's."""
    names = {"k3": "mismatch/k3", "k3_sequence": "mismatch/k3_sequence", "floor": "gradient/cosine_floor"}
    names |= {loss: f"gradient/cosine_{loss}" for loss in LOSSES}
    return {name: statistics.fmean(row[metric] for row in rows) for name, metric in names.items()}


def main() -> None:
    """Make all runs, and print the table."""
    model, out, *pairs = sys.argv[1:]
    given = SMALL | dict(pair.split("=", 1) for pair in pairs)
    wanted = given.pop("samplers", ",".join(SAMPLERS)).split(",")
    if unknown := set(wanted) - SAMPLERS.keys():
        raise SystemExit(f"gradient: samplers are {', '.join(SAMPLERS)}, not {', '.join(sorted(unknown))}")
    found: dict[str, dict[str, float]] = {}
    for name in wanted:
        if name.startswith("vllm") and find_spec("vllm") is None:
            print(f"{name}: vllm is not installed")
            continue
        rows, _ = run(model, Path(out) / name, given | SAMPLERS[name])
        found[name] = figures(rows)
    print("| sampler | k3, nats a token | a sequence | floor |", *(f"{loss} |" for loss in LOSSES))
    print("| --- " * (4 + len(LOSSES)) + "|")
    for name, x in found.items():
        cosines = " | ".join(f"{x[key]:.3f}" for key in ("floor", *LOSSES))
        print(f"| {name} | {x['k3']:.2g} | {x['k3_sequence']:.2g} | {cosines} |")
    (Path(out) / "gradient.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
