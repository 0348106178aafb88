"""`zerokl audit RUN --gradient`: the bias at a checkpoint for a pair of engines, in each part of a report."""

import json

import pytest
from zerokl.cli import main
from zerokl.engine.runs.run import train
from zerokl.engine.train.losses.corrected import MEASURED

from tests.random_model import ONE_LAYER, random_model


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run of one step; its model, and a task whose reward is its own."""
    folder = tmp_path_factory.mktemp("gradient")
    model = random_model(folder / "made", ONE_LAYER, 2.0)
    train(config(model=model, steps=1, tracking=[]), folder / "run")
    return folder / "run"


def audited(run, out, *words: str) -> dict:
    """The gradient's part of audit.json."""
    asked = ["--gradient", "3", "-n", "4", "--max_tokens", "4", "--out", str(out), *words]
    assert main(["audit", str(run), *asked]) in (0, 1)
    return json.loads((out / "audit.json").read_text())["gradient"]


@pytest.mark.full
def test_the_bias_of_a_pair_is_in_terminal_json_and_page(run, tmp_path, capsys):
    gradient = audited(run, tmp_path / "hf", "--sampler", "hf", "--dtype", "bfloat16")
    assert (gradient["step"], gradient["draws"], gradient["sampler"]) == (1, 3, "hf")
    assert list(gradient["losses"]) == list(MEASURED)
    assert set(gradient["layers"]) == {"embed_tokens", "layers.0", "norm"}
    assert all(list(losses) == list(MEASURED) for losses in gradient["layers"].values())
    own_loss = gradient["losses"]["own"]
    assert own_loss.keys() == {"bias", "length", "cosine", "noise", "draws_cosine"}
    assert own_loss["bias"].keys() == {"value", "standard_error"}
    shown, page = capsys.readouterr().out, (tmp_path / "hf" / "audit.html").read_text()
    assert "the gradient against the exact one" in shown
    assert '<div id="gradient"' in page
    assert "full_sequence" in page


@pytest.mark.full
def test_a_pair_without_a_mismatch_has_one_gradient_under_every_correction(run, tmp_path):
    gradient = audited(run, tmp_path / "native", "--sampler", "native", "--dtype", "float32")
    assert len({json.dumps(x) for x in gradient["losses"].values()}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gradient", "2"], "gradient: draws (2) must be at least 3"),
        (["--gradient", "3", "--every", "1"], "audit: --gradient is of one checkpoint of a run"),
        (["--gradient", "3", "--trainer", "hf"], "audit: --gradient with trainer hf"),
        (["--gradient", "3"], "holds no run"),
    ],
)
def test_what_has_no_gradient_is_refused(tmp_path, capsys, words, message):
    assert main(["audit", str(tmp_path), *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
