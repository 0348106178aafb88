"""`zerokl init`: its settings, when it stops, and the tasks that it refuses."""

import json

import pytest
from zerokl.engine.config.init_section import InitConfig, InitSettings
from zerokl.engine.config.run_config import Config, TaskConfig
from zerokl.engine.runs.base_model import is_base
from zerokl.engine.runs.init import initialise
from zerokl.engine.tasks.loading import load_task


def test_init_obeys_its_settings(tmp_path):
    """A target, bounds, sizes and numbers of problems and samples; the same seed gives the same model."""
    settings = InitSettings(
        target=0.1,
        solved=(0.0, 0.5),
        problems=7,
        attempts=4,
        sizes={"hidden_size": 32, "num_hidden_layers": 1},
    )
    report = initialise(tmp_path / "m", "toy:Digits", {"n": 40}, "mini", 0, settings)
    assert 0.1 <= report["accuracy"] < 0.5
    assert (len(report["prompts"]) <= 7, report["samples"]) == (True, 4)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (32, 1, 32)
    again = initialise(tmp_path / "again", "toy:Digits", {"n": 40}, "mini", 0, settings)
    assert again == report
    first, second = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("m", "again"))
    assert first == second


def test_a_base_model_of_other_settings_is_another_one(tmp_path):
    settings = InitSettings(target=0.1, sizes={"hidden_size": 32, "num_hidden_layers": 1})
    task = TaskConfig(name="toy:Digits", options={"n": 40})
    asked = Config(model="init:mini", task=task, seed=5, init=InitConfig(**settings.model_dump(), seed=0))
    initialise(tmp_path / "m", "toy:Digits", {"n": 40}, "mini", 0, settings)
    assert is_base(tmp_path / "m", asked)
    for change in ({"seed": -1}, {"seed": 1}, {"target": 0.2}, {"sizes": {}}):
        other = asked.init.model_copy(update=change)
        assert not is_base(tmp_path / "m", asked.model_copy(update={"init": other})), change


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 1.0}, "less than 1"),
        ({"solved": (0.8, 0.2)}, "must not be above the second"),
        ({"sizes": {"layers": 2}}, "layers is not known; sizes are hidden_size"),
        ({"sizes": {"hidden_size": 0}}, "hidden_size \\(0\\) must be at least 1"),
    ],
)
def test_init_refuses_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        InitSettings(**settings)


def test_init_stops_when_it_solves_some_and_says_which(tmp_path):
    options = {"n": 40}
    report = initialise(tmp_path / "m", "toy:Digits", options, "tiny", 0)
    assert 0.3 <= report["accuracy"] <= 0.8
    assert report["options"] == options
    assert set(report["prompts"]) <= {p.prompt for p in load_task("toy:Digits", options).problems("train")}
    assert report in [json.loads(p.read_text()) for p in (tmp_path / "m").glob("*.json")]
    assert {p.name for p in tmp_path.iterdir()} == {"m"}, "nothing temporary is left"
    with pytest.raises(ValueError, match="already exists"):
        initialise(tmp_path / "m", "toy:Digits", options, "tiny", 0)


@pytest.mark.parametrize("name", ["jsonl", "toy:Riddles"])
def test_init_refuses_a_task_whose_answers_are_no_completions(tmp_path, name):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}))
    options = {"file": str(tmp_path / "a.jsonl")} if name == "jsonl" else {}
    with pytest.raises(ValueError, match="answers that are no completions"):
        initialise(tmp_path / "m", name, options, "tiny", 0)
    assert not (tmp_path / "m").exists()
