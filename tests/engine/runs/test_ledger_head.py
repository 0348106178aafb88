"""Which settings the head of a run's ledger chains."""

import pytest
from zerokl.engine.config.loss_section import PRESETS, USUAL, LossConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.section import settings_of
from zerokl.engine.runs.ledger_head import binding

# Settings of the loss that most runs do not have. tests/engine/config/test_settings.py compares heads with
# recorded ones.
RARE = [name for name, setting in settings_of(LossConfig).items() if setting.head.where_set]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_head_of_a_run_without_a_rare_setting_does_not_name_it(preset):
    settings = binding(Config(loss=LossConfig(preset=preset)))
    rare = {f"loss.{name}" for name in RARE if PRESETS[preset][name] == USUAL[name]}
    others = {f"loss.{name}" for name in LossConfig.model_fields} - {f"loss.{name}" for name in RARE}
    assert not rare & settings.keys()
    assert others - settings.keys() == {"loss.preset", "loss.ref_model"}
