"""What the engines that run here do to the gradient of SmolLM2-135M-Instruct, beside exact rollouts.

    python benchmarks/real/gradient.py MODEL OUT [KEY=VALUE ...]

Each row is a run of train.toml in a process of its own, small enough for two CPU cores: the trainer computes
in fp32, another sampler draws, and each step measures its gradient (`monitor.gradient`, docs/gradient.md).
Prints the table in Markdown and writes the figures to OUT/gradient.json. Samplers that are not installed
are named and left out.
"""

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SAMPLERS = {
    "zerokl, weights in fp8 e4m3": {"perturb.weights": "float8_e4m3fn/tensor"},
    "zerokl, weights in fp8 e5m2": {"perturb.weights": "float8_e5m2/tensor"},
    "transformers, bf16": {"sampler": "hf", "precision.sampler_dtype": "bfloat16"},
    "vLLM, bf16": {"sampler": "vllm", "precision.sampler_dtype": "bfloat16"},
}
SMALL = {
    "exact": "false",
    "monitor.gradient": "1",
    "steps": "4",
    "prompts": "4",
    "num_generations": "4",
    "evaluation.every": "0",
}
LOSSES = ("none", "tis", "full_sequence")


def run(model: str, folder: Path, settings: dict[str, str]) -> list[dict]:
    """The metrics of each step of a run. Raises SystemExit where it fails."""
    zerokl = str(Path(sys.executable).with_name("zerokl"))
    command = [zerokl, "train", str(Path(__file__).with_name("train.toml")), "--model", model]
    command += ["--run_dir", str(folder)]
    for key, value in settings.items():
        command += [f"--{key}", value]
    print(*command, flush=True)
    process = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if process.returncode:
        raise SystemExit(f"gradient: the run above ended with {process.returncode}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(rows: list[dict]) -> dict[str, float]:
    """Means over the steps. length: of the expected gradient along the exact one, from sums over steps."""
    names = [
        "cosine_floor",
        "distance_floor",
        *(f"{what}_{x}" for what in ("cosine", "distance") for x in LOSSES),
    ]
    result = {name: statistics.fmean(row[f"gradient/{name}"] for row in rows) for name in names}
    exact = sum(row["gradient/inner_exact"] for row in rows)
    result |= {f"length_{x}": sum(row[f"gradient/inner_{x}"] for row in rows) / exact for x in LOSSES}
    return result | {
        "k3": statistics.fmean(row["mismatch/k3"] for row in rows),
        "steps": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
    }


def main() -> None:
    """Make all runs, and print the table."""
    model, out, *pairs = sys.argv[1:]
    given = SMALL | dict(pair.split("=", 1) for pair in pairs)
    found: dict[str, dict[str, float]] = {}
    for name, settings in SAMPLERS.items():
        if settings.get("sampler") == "vllm" and find_spec("vllm") is None:
            print(f"{name}: vllm is not installed")
            continue
        folder = Path(out) / name.replace(", ", "-").replace(" ", "-")
        found[name] = figures(run(model, folder, given | settings))
    headings = ["sampler", "k3, nats a token", *(f"cosine, {x}" for x in LOSSES), "floor"]
    headings += [*(f"distance, {x}" for x in LOSSES), "floor", "length, none"]
    print(f"| {' | '.join(headings)} |\n|{' --- |' * len(headings)}")
    for name, x in found.items():
        cosines, distances = ([x[f"{what}_{loss}"] for loss in LOSSES] for what in ("cosine", "distance"))
        numbers = [*cosines, x["cosine_floor"], *distances, x["distance_floor"], x["length_none"]]
        print(f"| {name} | {x['k3']:.1e} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    (Path(out) / "gradient.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
