"""A loss, task or model that is named after a file takes the place of what the file chose for another."""

import pytest
from zerokl.engine.config.config_file import load_config, load_with_left, to_toml
from zerokl.engine.config.loss_section import PRESETS, LossConfig
from zerokl.engine.runs.ablations.grid import read_grid

LOSSES = [
    name for name in PRESETS if PRESETS[name]["advantage"] not in ("dpo", "verifree", "brpo", "pass_at_k")
]


@pytest.mark.parametrize("source", ["demo", "jsonl", "turns", "file"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_named_later_is_that_loss(tmp_path, source, name):
    (tmp_path / "c.toml").write_text(to_toml(load_config(None, "demo", {"loss.kl_coef": 0.1})))
    place = (str(tmp_path / "c.toml"), None) if source == "file" else (None, source)
    assert load_config(*place, {"loss.preset": name}).loss == LossConfig(preset=name)
    with_choice = load_config(*place, {"loss.clip_low": 0.5, "loss.preset": name})
    assert with_choice.loss == LossConfig(preset=name, clip_low=0.5)
    left = load_with_left(*place, {"loss.preset": name})[1]
    assert left["loss.advantage"] == "std"
    assert ("loss.kl_coef" in left) == (source == "file")


def test_what_was_chosen_for_a_model_and_a_task_goes_with_them(tmp_path):
    (tmp_path / "c.toml").write_text(
        'model = "init:tiny"\n[init]\ntarget = 0.7\nsizes = { hidden_size = 64 }\n'
        '[task]\nname = "add"\nreward = "numeric"\noptions = { train = 20 }\n[optimizer]\nlr = 0.5\n'
    )
    file = str(tmp_path / "c.toml")
    model = {"model": "init:small"}
    assert load_config(file, None, model).init.sizes == {}
    assert load_config(file, None, {"model": "init:tiny"}).init.sizes == {"hidden_size": 64}
    assert load_with_left(file, None, model)[1] == {"init.sizes": {"hidden_size": 64}}
    given = load_config(file, None, model | {"task.name": "sort", "init.sizes.head_dim": 8})
    assert (given.task.reward, given.task.options, given.init.sizes) == ("", {}, {"head_dim": 8})
    assert (given.init.target, given.optimizer.lr) == (0.7, 0.5)  # no name stands for these
    assert load_with_left(file, None, {"task.name": "sort"})[1] == {
        "task.reward": "numeric",
        "task.options": {"train": 20},
    }
    assert load_with_left(file, None, {"optimizer.lr": 0.1})[1] == {}


def test_a_grids_losses_are_those_of_their_names(tmp_path):
    (tmp_path / "g.toml").write_text('preset = "demo"\n[grid]\nloss.preset = ["pg", "dr_grpo", "ppo"]\n')
    assert [c.config.loss.advantage for c in read_grid(tmp_path / "g.toml")] == [
        "mean",
        "mean",
        "gae",
    ]


def test_the_line_of_a_loss_names_what_differs_from_its_row():
    assert load_config(None, "demo").loss.line.startswith(
        "loss pg: advantage std (pg has mean), correction full"
    )
    line = LossConfig(preset="grpo", bound="none", kl_coef=0.01).line
    assert "bound none (grpo has clip)" in line
    assert "kl_coef 0.01 (grpo has 0.0)" in line
    cut = LossConfig(preset="brpo", budgets=(2, 5), surrogate="mine:bound").line
    assert "surrogate mine:bound," in cut
    assert cut.endswith("budgets (2, 5)")
    assert "\n" not in line


@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_the_advantage_of_another_row_is_named_as_the_cause(name):
    task = {"task.name": "pairs"} if name == "dpo" else {}
    with pytest.raises(
        ValueError, match=rf'loss.advantage \("std"\) with loss.preset \("{name}"\)'
    ) as caught:
        load_config(None, None, {"loss.preset": name, "loss.advantage": "std"} | task)
    assert "leave loss.advantage out" in str(caught.value)
