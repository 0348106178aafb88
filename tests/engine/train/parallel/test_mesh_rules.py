"""What does not go with a form of ranks is refused in one line that names a setting (docs/scale.md)."""

import re

import pytest
from zerokl.docs._mesh import FORMS, KINDS, SETTINGS, refusal_of_kind, refusal_of_settings


@pytest.mark.parametrize("form", FORMS)
def test_each_refusal_is_one_line_that_names_a_setting(form):
    refusals = [refusal_of_settings(settings, form) for settings in SETTINGS.values()]
    refusals += [refusal_of_kind(kind, form) for kind in KINDS]
    for refusal in filter(None, refusals):
        assert re.fullmatch(r"(config: )?(parallel\.\w+|precision\.leaves|lora\.merge) \(.+", refusal), (
            refusal
        )
    assert None in refusals


def test_control_what_nobody_refuses_is_found():
    assert refusal_of_settings({"workers": 2}, "context")
    assert refusal_of_settings({"workers": 1}, "context") is None
    assert refusal_of_settings({"loss.kl_coef": 0.1}, "fsdp, tensor, context") is None
