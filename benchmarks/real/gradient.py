"""What another sampler does to the gradient of SmolLM2-135M-Instruct, beside exact rollouts.

    python benchmarks/real/gradient.py MODEL OUT [KEY=VALUE ...]          (`make real-gradient`)

Each row is a run in a process of its own: another sampler draws, and each step measures its gradient
(`monitor.gradient`, docs/gradient.md). All rows begin with the same weights and prompts. Prints the tables in
Markdown and writes the figures to OUT/gradient.json. KEY=VALUE is a setting of the runs, or one of these:

    samplers=NAME,NAME   these only; one that is not installed is named and left out
    config=FILE          the runs' config; gradient.toml is for a GPU. Without it train.toml in fp32, with few
                         completions, for two CPU cores
    jobs=N               as many runs at a time (1); each has its share of the threads

The first of several steps is left out: `late` draws with the weights of the step before, and there is none.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from zerokl.benchmarks.experiment import made_with
from zerokl.benchmarks.real.train import CONFIG, run
from zerokl.pages.markdown import table

SAMPLERS = {
    "e4m3": {"perturb.weights": "float8_e4m3fn/tensor"},
    "e5m2": {"perturb.weights": "float8_e5m2/tensor"},
    "late": {"perturb.delay": "1"},
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
LOSSES = ("none", "tis", "mis_token", "icepop", "mis", "full", "full_sequence")


def figures(rows: list[dict]) -> dict:
    """Of the steps' metrics: means, and what each correction leaves, with standard errors over the steps.

    k3 is in nats. `below` is by how much a cosine lies below that of two exact gradients. `length` is that of
    the expected gradient along the exact one: the quotient of the sums over steps of two unbiased products.
    Errors are nulls where there is one step.
    """

    def of(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    steps, floor, exact = len(rows), of("gradient/cosine_floor"), of("gradient/inner_exact")
    losses = {}
    for loss in LOSSES:
        cosine, inner = of(f"gradient/cosine_{loss}"), of(f"gradient/inner_{loss}")
        below, length = floor - cosine, inner.sum() / exact.sum()
        error = np.sqrt(((inner - length * exact) ** 2).sum()) / exact.sum()
        losses[loss] = {
            "cosine": cosine.mean(),
            "below": [below.mean(), below.std(ddof=1) / steps**0.5 if steps > 1 else None],
            "length": [length, error if steps > 1 else None],
        }
    means = {"k3": "mismatch/k3", "k3_sequence": "mismatch/k3_sequence", "floor": "gradient/cosine_floor"}
    return {"steps": steps} | {name: of(metric).mean() for name, metric in means.items()} | {"losses": losses}


def cosines(rows: list[dict]) -> dict[str, list[float]]:
    """In each step, the first too: the cosine of two exact gradients, and by correction that with them."""
    return {name: [row[f"gradient/cosine_{name}"] for row in rows] for name in ("floor", *LOSSES)}


def mismatches(by_sampler: dict[str, dict]) -> str:
    """Of `figures` by sampler, in Markdown: a row for each sampler."""
    rows = [
        [f"`{name}`", f"{x['k3']:.2g}", f"{x['k3_sequence']:.2g}", f"{x['floor']:.3f}"]
        for name, x in by_sampler.items()
    ]
    return table(("sampler", "k3, nats a token", "a sequence", "floor"), rows)


def corrections(by_sampler: dict[str, dict]) -> str:
    """Of `figures` by sampler, in Markdown: a row for each correction."""
    columns = [f"{name}: {what}" for name in by_sampler for what in ("below the floor", "length")]
    rows = []
    for loss in LOSSES:
        losses = [x["losses"][loss] for x in by_sampler.values()]
        rows.append(
            [f"`{loss}`", *(_cell(x[what], n) for x in losses for what, n in (("below", 3), ("length", 2)))]
        )
    return table(("correction", *columns), rows)


def _cell(value: list[float | None], digits: int) -> str:
    """A value and its standard error, where there is one."""
    return " ± ".join(f"{x:.{digits}f}" for x in value if x is not None)


def main() -> None:
    """Make all runs, and print the tables."""
    model, out, *pairs = sys.argv[1:]
    given = dict(pair.split("=", 1) for pair in pairs)
    wanted = given.pop("samplers", ",".join(SAMPLERS)).split(",")
    config, jobs = given.pop("config", None), int(given.pop("jobs", "1"))
    threads = {"threads": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {}
    settings = threads | (given if config else SMALL | given)
    if unknown := set(wanted) - SAMPLERS.keys():
        raise SystemExit(f"gradient: samplers are {', '.join(SAMPLERS)}, not {', '.join(sorted(unknown))}")
    for name in [name for name in wanted if name.startswith("vllm") and find_spec("vllm") is None]:
        print(f"{name}: vllm is not installed")
        wanted.remove(name)

    def measure(name: str) -> dict:
        rows, _ = run(model, Path(out) / name, settings | SAMPLERS[name], Path(config or CONFIG))
        return figures(rows[1:] or rows) | {"cosines": cosines(rows)}

    with ThreadPoolExecutor(jobs) as pool:
        by_sampler = dict(zip(wanted, pool.map(measure, wanted), strict=True))
    print(mismatches(by_sampler), corrections(by_sampler), sep="\n\n")
    result = {"settings": {"config": config} | settings, "samplers": by_sampler} | made_with()
    (Path(out) / "gradient.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
