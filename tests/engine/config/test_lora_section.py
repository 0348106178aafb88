"""The section lora of the configuration: what is refused, and that off is off."""

import pytest
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.lora_section import REFUSED
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.ledger_head import binding

ON = {"lora.rank": 4}


def chained(overrides: dict) -> dict:
    return binding(load_config(None, None, overrides))


def test_off_chains_nothing_and_on_chains_what_differs():
    off = binding(Config())
    assert not any(key.startswith("lora") for key in off)
    assert chained(ON) == off | {"lora.rank": 4}
    targets = {"lora.targets": ["v_proj", "q_proj", "v_proj"]}
    assert chained(ON | targets | {"lora.alpha": 8.0}) == off | {
        "lora.rank": 4,
        "lora.alpha": 8.0,
        "lora.targets": ["q_proj", "v_proj"],
    }
    assert chained(ON | {"lora.adapter": "folder"}) == chained(ON)


def test_the_scale_is_alpha_over_rank():
    assert load_config(None, None, ON).lora.shape.scale == 8.0
    assert load_config(None, None, {"lora.rank": 1}).lora.shape.scale == 32.0
    assert Config().lora.shape is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(pytest.param(ON | {f"lora.{key}": 0.1}, f"lora.{key} is refused", id=key) for key in REFUSED),
        ({"lora.alpha": 8.0}, "need lora.rank; set it"),
        ({"lora.adapter": "x"}, "need lora.rank; set it"),
        (ON | {"lora.targets": ["embed_tokens"]}, r"lora.targets.0 \('embed_tokens'\)"),
        (ON | {"lora.targets": []}, "must name a matrix"),
        (ON | {"lora.rank": -1}, "lora.rank"),
        (ON | {"lora.alpha": 0.0}, "lora.alpha"),
        (ON | {"frozen": ["lm_head.*"]}, "only the adapters are trained"),
    ],
)
def test_what_is_not_built_is_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, None, overrides)


def test_a_section_in_a_file_is_refused_in_the_same_words():
    with pytest.raises(ValueError, match=r"lora.dropout is refused"):
        Config.model_validate({"lora": {"rank": 2, "dropout": 0.1}})
