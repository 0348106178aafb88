"""Which settings the head of a run's ledger chains."""

import pytest
from zerokl.engine.config.loss_section import PRESETS, USUAL, LossConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.ledger_head import binding

# Settings of the loss that most runs do not have, each with a value that is no default.
RARE = {
    "k": 3,
    "beta": 0.5,
    "semantic_entropy": 0.25,
    "router_aux_coef": 0.01,
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "whiten": True,
    "value_coef": 0.5,
    "value_clip": 0.25,
    "budgets": [2, 4],
    "budget_weights": [1.0, 3.0],
    "answers": 8,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_head_of_a_run_without_a_rare_setting_does_not_name_it(preset):
    settings = binding(Config(loss=LossConfig(preset=preset)))
    rare = {f"loss.{name}" for name in RARE if PRESETS[preset][name] == USUAL[name]}
    others = {f"loss.{name}" for name in LossConfig.model_fields} - {f"loss.{name}" for name in RARE}
    assert not rare & settings.keys()
    assert others - settings.keys() == {"loss.preset", "loss.ref_model"}


@pytest.mark.parametrize("name", RARE)
def test_a_rare_setting_is_chained_where_it_is_set(name):
    config = Config(loss=LossConfig(**{name: RARE[name]}))
    assert binding(config) == binding(Config()) | {f"loss.{name}": RARE[name]}


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("sampling", "answer_max_tokens", 8), ("optimizer", "critic_lr_ratio", 2.0)],
)
def test_other_rare_settings_are_chained_where_they_are_set(section, name, value):
    key = f"{section}.{name}"
    assert key not in binding(Config())
    assert binding(Config(**{section: {name: value}})) == binding(Config()) | {key: value}


@pytest.mark.parametrize(("name", "value"), [("equivalence", "mine:same"), ("answer_prefix", "so ")])
def test_a_rare_setting_of_the_task_is_chained_where_there_is_one(name, value):
    assert f"task.{name}" not in binding(Config())
    assert binding(Config(task={name: value})) == binding(Config()) | {f"task.{name}": value}
