"""The map of an ablation: each field has the reward of its combination, wherever it comes in the list."""

import itertools
import random

import numpy as np
from zerokl.engine.runs.ablations.plots import PLOTS, draw_plots

AXES = {"advantage": ("batch", "group"), "lr": ("low", "mid", "high"), "sampler": ("exact", "late")}


def combination(i: int, labels: tuple[str, ...]) -> dict:
    """One with a reward and a k3 that no other one has."""
    spread = {"mean": 0.0, "min": 0.0, "max": 0.0}
    names = ("training_last", "sampler_held_out_last", "held_out_last")
    rewards = {"reward_last10": spread | {"mean": i / 100}} | dict.fromkeys(names, spread)
    k3 = spread | {"mean": 0.01 * i if labels[-1] == "late" else 0.0}
    runs = [{name: value["mean"] for name, value in rewards.items()}]
    settings = dict(zip(AXES, labels, strict=True))
    other = {"settings": settings, "by_step": {metric: [] for metric in PLOTS}, "runs": runs}
    return rewards | other | {"mismatch_k3_sequence_mean": k3}


def test_a_field_of_the_map_is_its_combination(tmp_path, monkeypatch):
    from matplotlib import pyplot as plt

    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    combinations = [combination(i, labels) for i, labels in enumerate(itertools.product(*AXES.values()))]
    (lost,) = (c for c in combinations if tuple(c["settings"].values()) == ("group", "mid", "late"))
    combinations.remove(lost)
    random.Random(0).shuffle(combinations)
    draw_plots(combinations, tmp_path)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")

    panels = figures[-1].axes
    rows = [t.get_text() for t in panels[0].get_yticklabels()]
    found = {}
    for panel in panels:
        columns = [t.get_text() for t in panel.get_xticklabels()]
        rewards = panel.images[0].get_array()
        words = iter(t.get_text() for t in panel.texts)
        for (y, row), (x, column) in itertools.product(enumerate(rows), enumerate(columns)):
            found[(panel.get_title(), row, column)] = (rewards[y, x], next(words))
    for c in combinations:
        reward, k3 = c["reward_last10"]["mean"], c["mismatch_k3_sequence_mean"]["mean"]
        words = f"{reward:.2f}" + (f"\n{k3:.2g} nats" if k3 else "")
        assert found[tuple(c["settings"].values())] == (reward, words)
    value, words = found[("group", "mid", "late")]
    assert (np.ma.is_masked(value) or np.isnan(value), words) == (True, "")


def test_one_axis_and_too_many_panels_have_no_map(tmp_path):
    one = combination(0, ("batch", "low", "exact")) | {"settings": {"sampler": "exact"}}
    many = [combination(i, (str(i), "low", "exact")) for i in range(13)]
    for combinations in ([one], many):
        draw_plots(combinations, tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["policies.png"]
    draw_plots(many[1:], tmp_path)
    assert (tmp_path / "map.png").exists(), "control"
