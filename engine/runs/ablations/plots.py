"""The plots of an ablation.

Each metric of PLOTS has one, by step. policies.png has what each combination's runs earned at the end, and
map.png, of a grid with two axes or more, the reward that belongs to each pair of labels.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import PLOTS

# The halves of policies.png: title, and the figures that are drawn, each with its mark and colour.
_HALVES = (
    ("training problems", {"reward_last10": ("o", "tab:gray"), "training_last": ("D", "tab:red")}),
    ("held-out problems", {"sampler_held_out_last": ("o", "tab:gray"), "held_out_last": ("D", "tab:red")}),
)
# More would make a picture that nobody reads.
_MOST_PANELS = 12


def draw_plots(combinations: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write the plots of the combinations (figures.summarise) to `out`."""
    import matplotlib

    matplotlib.use("Agg")
    for metric in PLOTS:
        if any(c["by_step"][metric] for c in combinations):  # evaluation may be off
            _by_step(combinations, metric, out)
    _policies(combinations, out / "policies.png")
    if len(combinations[0]["settings"]) > 1:
        _map(combinations, out / "map.png")


def _by_step(combinations: Sequence[Mapping[str, Any]], metric: str, out: Path) -> None:
    """A line and a band for each combination: the mean over seeds, and minimum to maximum."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for c in combinations:
        points = c["by_step"][metric]
        steps = [p["step"] for p in points]
        (line,) = axes.plot(
            steps, [p["mean"] for p in points], label=", ".join(c["settings"].values()) or "run"
        )
        axes.fill_between(
            steps,
            [p["min"] for p in points],
            [p["max"] for p in points],
            color=line.get_color(),
            alpha=0.15,
            lw=0,
        )
    axes.set_xlabel("step")
    axes.set_ylabel(PLOTS[metric])
    axes.grid(alpha=0.3)
    if metric == "mismatch/k3":
        axes.set_yscale("symlog", linthresh=1e-9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(out / f"{metric.replace('/', '-').removesuffix('-mean')}.png", dpi=120)
    plt.close(figure)


def _policies(combinations: Sequence[Mapping[str, Any]], file: Path) -> None:
    """A row for each combination: a small mark for each seed's figure, and a large one for their mean."""
    from matplotlib import pyplot as plt

    size = (9, 1.3 + 0.36 * len(combinations))
    figure, halves = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for axes, (title, marks) in zip(halves, _HALVES, strict=True):
        for shift, (name, (marker, color)) in zip((-0.13, 0.13), marks.items(), strict=True):
            for row, c in enumerate(combinations):
                values = [run[name] for run in c["runs"]]
                axes.plot(values, [row + shift] * len(values), marker, color=color, ms=3, alpha=0.35)
                axes.plot(c[name]["mean"], row + shift, marker, color=color, ms=7)
        axes.set_xlabel(f"reward, {title}")
        axes.grid(alpha=0.3)
    names = [", ".join(c["settings"].values()) or "all runs" for c in combinations]
    halves[0].set_yticks(range(len(names)), names)
    halves[0].invert_yaxis()
    entries = [plt.Line2D([], [], marker=m, color=c, ls="", ms=7) for m, c in _HALVES[0][1].values()]
    labels = ["the sampler's policy", "the trainer's policy, which is saved"]
    figure.legend(entries, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _map(combinations: Sequence[Mapping[str, Any]], file: Path) -> None:
    """A field for each combination, with its reward: the last axis to the right, the one before upwards.

    The axes before them make panels of their own. Where the sampler differs, the field has k3 a sequence,
    too. A combination of which no run has ended has no colour. Of more than _MOST_PANELS there is no map.
    """
    from matplotlib import pyplot as plt

    labels = zip(*(c["settings"].values() for c in combinations), strict=True)
    *panels, rows, columns = (list(dict.fromkeys(of_axis)) for of_axis in labels)
    titles = list(itertools.product(*panels))
    if len(titles) > _MOST_PANELS:
        return
    by_settings = {tuple(c["settings"].values()): c for c in combinations}
    means = [c["reward_last10"]["mean"] for c in combinations]
    least, most = min(0.0, *means), max(1.0, *means)  # a reward may lie outside
    size = (1.2 + 1.1 * len(columns) * len(titles), 1.3 + 0.7 * len(rows))
    figure, drawn = plt.subplots(
        1, len(titles), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    names = list(combinations[0]["settings"])
    for axes, title in zip(drawn[0], titles, strict=True):
        fields = [[by_settings.get((*title, row, column)) for column in columns] for row in rows]
        rewards = [[c["reward_last10"]["mean"] if c else math.nan for c in line] for line in fields]
        axes.imshow(rewards, vmin=least, vmax=most, cmap="RdYlGn", aspect="auto", origin="lower")
        for (y, line), x in itertools.product(enumerate(fields), range(len(columns))):
            axes.text(x, y, _field(line[x]), ha="center", va="center", fontsize=8)
        axes.set_title(", ".join(title))
        axes.set_xlabel(names[-1])
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
    drawn[0][0].set_ylabel(names[-2])
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _field(combination: Mapping[str, Any] | None) -> str:
    """The words of a field of the map."""
    if combination is None:
        return ""
    k3 = combination["mismatch_k3_sequence_mean"]["mean"]
    nats = f"\n{k3:.2g} nats" if math.isfinite(k3) and k3 else ""
    return f"{combination['reward_last10']['mean']:.2f}{nats}"
