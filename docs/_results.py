"""Tables of the pages that are drawn from committed results (benchmarks/results)."""

import json
from functools import partial

from zerokl.benchmarks.real.gradient import corrections
from zerokl.engine.runs.ablations.hypotheses import expectation
from zerokl.pages.markdown import table

from ._definitions import ROOT

_RESULTS = ROOT / "benchmarks" / "results"


def engine_pairs() -> str:
    """The rows that `make pairs` has left, by dtype; the versions and the machine of each."""
    files = sorted((_RESULTS / "cpu" / "pairs").glob("*.json"))
    order = ["float32", "bfloat16", "float16"]
    rows = sorted((json.loads(f.read_text()) for f in files), key=lambda r: order.index(r["dtype"]))
    if not rows:
        return "No row has been made for these versions yet."
    head = ["dtype", "sampler", "trainer", "equal tokens", "largest", "k3", "bits part at", "with", "date"]
    return table(head, [_pair(row) for row in rows])


def _pair(row: dict) -> list[str]:
    equal = (
        f"all {row['tokens']}" if row["frac_equal"] == 1 else f"{row['frac_equal']:.1%} of {row['tokens']}"
    )
    part = f"`{row['first_divergence']}`" if row["first_divergence"] else "nowhere"
    packages = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    engines = [f"`{row['sampler']}`", f"`{row['trainer']}`"]
    figures = [f"{row['max_abs']:.2g}", f"{row['k3']:.1e}"]
    return [row["dtype"], *engines, equal, *figures, part, packages, row["date"]]


def _experiment(name: str) -> dict:
    return json.loads((_RESULTS / _EXPERIMENTS[name] / f"{name}.json").read_text())


# Column -> figure of an ablation, and its format.
_COLUMNS = {
    "training reward": ("reward_last10", "{:.3f}"),
    "training problems, saved": ("training_last", "{:.3f}"),
    "held-out, saved": ("held_out_last", "{:.3f}"),
    "held-out, sampler's": ("sampler_held_out_last", "{:.3f}"),
    "entropy": ("entropy_last10", "{:.3f}"),
    "k3 a token": ("mismatch_k3_mean", "{:.2g}"),
    "k3 a sequence": ("mismatch_k3_sequence_mean", "{:.2g}"),
    "mean \\|d\\|": ("mismatch_mean_abs_mean", "{:.2g}"),
}


def _combinations(name: str) -> str:
    """A row for each combination of an experiment: means over seeds, least and most of the rewards.

    Without the columns of an evaluation that was off.
    """
    result = _experiment(name)
    first = result["combinations"][0]
    columns = {title: x for title, x in _COLUMNS.items() if first[x[0]]["mean"] is not None}
    rows = []
    for c in result["combinations"]:
        cells = [_spread(c[figure], form) for figure, form in columns.values()]
        rows.append([f"`{', '.join(c['settings'].values())}`", *cells])
    seeds = len(result["combinations"][0]["seeds"])
    machine = ", ".join(result[part] for part in ("gpu", "cpu") if part in result)
    made = f"{seeds} seeds a row; {machine}, torch {result['torch']}, {result['date']}."
    return f"{table(['run', *columns], rows)}\n\n{made}"


def _spread(values: dict, form: str) -> str:
    """The mean, and for a reward the least and the most."""
    mean, low, high = (form.format(values[key]) for key in ("mean", "min", "max"))
    return f"{mean}<br>{low} to {high}" if form == "{:.3f}" and low != high else mean


def _hypotheses(name: str) -> str:
    """A row for each hypothesis of an experiment: what was expected, what came, and what became of it."""
    rows = []
    for h in _experiment(name)["hypotheses"]:
        rows.append(
            [
                h["says"],
                f"`{h['figure']}`: {_named(h['of'])} {expectation(h)} against {_named(h['against'])}",
                f"{h['difference']:+.3f}",
                f"{h['p_adjusted']:.2g}",
                f"**{h['result']}**",
            ]
        )
    return table(["hypothesis", "expected", "difference", "p, adjusted", "result"], rows)


def _named(settings: dict) -> str:
    return "`" + ", ".join(settings.values()) + "`"


# README's rows: in words, and the run's name in gap.toml and in real/gap.toml.
_COSTS = {
    "weights in fp8, e4m3": "e4m3",
    "weights in fp8, e5m2": "e5m2",
    "e5m2, with truncated importance sampling (TIS)": "e5m2_tis",
    "e5m2 on both sides, which is exact": "e5m2_on_both_sides",
    "none: exact": "exact",
}


def costs() -> str:
    """README's table: the reward of the curve and of the saved policy after each sampler, on two models."""
    small, real = (
        {", ".join(c["settings"].values()): c for c in _experiment(name)["combinations"]}
        for name in ("gap", "real_gap")
    )
    rows = []
    for words, run in _COSTS.items():
        columns = [
            (small, "reward_last10"),
            (small, "training_last"),
            (real, "reward_last10"),
            (real, "held_out_last"),
        ]
        figures = [f"{cells[run][figure]['mean']:.3f}" if run in cells else "" for cells, figure in columns]
        rows.append([words, *figures])
    head = ["what the sampler does", "small model: curve", "saved", "SmolLM2-135M: curve", "saved"]
    return table(head, rows)


def real_gradient() -> str:
    """What samplers do to the gradient of SmolLM2, by correction: benchmarks/real/gradient.py on a GPU."""
    result = json.loads((_RESULTS / "h100" / "real_gradient.json").read_text())
    made = f"{result['gpu']}, torch {result['torch']}, {result['date']}."
    return f"{corrections(result['samplers'])}\n\n{made}"


_ON_A_CPU = ("gap", "gap_again", "late", "step_size", "kinds", "length", "length_again", "rare_tokens")
# Experiment -> folder of its result.
_EXPERIMENTS = dict.fromkeys(_ON_A_CPU, "cpu") | {"real_gap": "h100", "real_gap_again": "h100"}
_TABLES = {"": _combinations, "-hypotheses": _hypotheses}
RESULTS = {"costs": costs, "engine-pairs": engine_pairs, "real-gradient": real_gradient} | {
    name.replace("_", "-") + part: partial(table_of, name)
    for name in _EXPERIMENTS
    for part, table_of in _TABLES.items()
}
