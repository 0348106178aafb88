"""benchmarks/real/gradient.py: the figures of its tables, and its setting."""

import json
from pathlib import Path

import pytest
from zerokl.benchmarks.real import gradient
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.config_file import load_config

REAL = Path(__file__).resolve().parents[2] / "benchmarks" / "real"


def _row(floor: float, cosine: float, exact: float, inner: float) -> dict[str, float]:
    row = {"mismatch/k3": 0.25, "mismatch/k3_sequence": 2.0}
    row |= {"gradient/cosine_floor": floor, "gradient/inner_exact": exact}
    for loss in gradient.LOSSES:
        row |= {f"gradient/cosine_{loss}": cosine, f"gradient/inner_{loss}": inner}
    return row


def test_a_length_is_that_of_the_sums_and_not_a_mean_of_quotients():
    rows = [_row(0.8, 0.6, 1.0, 1.0), _row(0.9, 0.5, 3.0, 1.0)]
    measured = gradient.figures(rows)
    assert (measured["steps"], measured["k3"], measured["k3_sequence"]) == (2, 0.25, 2.0)
    tis = measured["losses"]["tis"]
    assert tis["cosine"] == pytest.approx(0.55)
    assert tis["below"] == pytest.approx([0.3, 0.1])  # 0.2 and 0.4
    assert tis["length"] == pytest.approx([0.5, 0.5**0.5 / 4])  # residuals of 0.5 and -0.5
    assert gradient.cosines(rows)["floor"] == [0.8, 0.9]


def test_one_step_has_no_errors_and_its_table_shows_none():
    samplers = {"e4m3": gradient.figures([_row(0.8, 0.6, 2.0, 1.0)])}
    assert samplers["e4m3"]["losses"]["none"]["length"] == [0.5, None]
    assert "| `none` | 0.200 | 0.50 |" in gradient.corrections(samplers)


@pytest.mark.parametrize("name", ["gradient.toml", "train.toml"])
def test_its_settings_go_together(name):
    for sampler in ("e5m2", "late"):
        changes = gradient.SAMPLERS[sampler] | {"exact": "false", "evaluation.every": "0"}
        check_settings(load_config(REAL / name, None, changes), "cpu")


def test_the_committed_result_is_one_of_its_setting():
    """Of six steps five count. What the page draws has all corrections, and an error each."""
    result = json.loads((REAL.parent / "results" / "h100" / "real_gradient.json").read_text())
    steps = load_config(REAL / "gradient.toml", None, {}).steps
    assert {"gpu", "cpu", "torch", "date"} <= result.keys()
    for sampler in result["samplers"].values():
        assert sampler["steps"] == steps - 1
        assert {name: len(x) for name, x in sampler["cosines"].items()} == dict.fromkeys(
            ("floor", *gradient.LOSSES), steps
        )
        assert all(None not in figures["length"] for figures in sampler["losses"].values())
