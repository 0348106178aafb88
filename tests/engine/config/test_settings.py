"""A setting is one field: its place in the ledger's head and what it refuses follow from it."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.section import (
    WHERE_SET,
    Facts,
    Head,
    PlannedRun,
    free,
    kept,
    rule,
    setting,
    settings_of,
)
from zerokl.engine.config.training_sections import OptimizerConfig
from zerokl.engine.runs.ledger_head import binding, is_free

# The heads of configurations as they were when each kind of key still had a list: all settings alone, each
# with several values, and 60 draws of up to 20 settings. A row has what differs from the default's head; null
# is a key that the head does not have. A new setting that is chained always makes other heads, and breaks
# every ledger that exists: that is what this file is for.
RECORDED = json.loads((Path(__file__).parent / "heads.json").read_text())


def config_of(overrides: dict[str, Any]) -> Config:
    values: dict[str, Any] = {}
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = value
    return Config.model_validate(values)


def heads_that_differ() -> list[dict[str, Any]]:
    """The recorded configurations whose head is another one now."""
    default, other = RECORDED["default"], []
    for overrides, changes in [({}, {}), *RECORDED["rows"]]:
        head = json.loads(json.dumps(binding(config_of(overrides))))
        keys = sorted(default.keys() | head.keys())
        now = {key: head.get(key) for key in keys if head.get(key) != default.get(key)}
        if now != changes:
            other.append(overrides)
    return other


def test_the_heads_are_those_that_were_recorded():
    names = {key for overrides, _ in RECORDED["rows"] for key in overrides}
    assert len(RECORDED["rows"]) > 500
    assert len(names) > 150
    hint = "a new setting needs head=WHERE_SET, free(why) or kept(why), or new heads.json"
    assert heads_that_differ()[:3] == [], hint


@pytest.mark.parametrize("key", ["loss.k", "steps", "precision.scale", "native.cache_bytes", "optimizer.lr"])
def test_control_a_key_with_another_place_in_the_head_makes_other_heads(monkeypatch, key):
    settings = settings_of(Config)
    usual = settings[key].head
    other = Head() if usual != Head() else free("a test")
    monkeypatch.setattr(type(settings[key]), "head", property(lambda s: other if s.key == key else _head(s)))
    assert key in {name for overrides in heads_that_differ() for name in overrides}


def _head(s: Any) -> Head:
    return s.facts.head or s.section.head


def test_a_field_says_facts_or_nothing_and_a_reason_where_it_is_not_chained():
    for key, s in settings_of(Config).items():
        extra = s.field.json_schema_extra
        assert extra is None or (extra.keys() == {"facts"} and isinstance(extra["facts"], Facts)), key
        if s.head.kept or s.head.is_free(Config()):
            assert len(s.head.why_not) > 10, key
        assert not (s.head.where_set and s.head.why_not), key


class _Section(OptimizerConfig):
    plain: int = Field(3, ge=0)
    rare: int = setting(3, head=WHERE_SET)
    loose: int = setting(3, head=free("a test", lambda config: config.prompts == 16))
    still: int = setting(3, head=kept("a test"))
    apart: int = setting(3, differs=True)
    whole: int = setting(3, needs_whole=lambda value: value > 4)

    @rule
    def _refused(self, run: PlannedRun) -> str | None:
        if self.rare == 7:
            return f"optimizer.rare ({self.rare}) with prompts ({run.config.prompts})"


class _Config(Config):
    optimizer: _Section = _Section()


def _with(prompts: int = 16, **values: Any) -> _Config:
    return _Config(prompts=prompts, optimizer=_Section(**values))


def test_a_new_field_is_chained_unless_it_says_otherwise():
    before = binding(Config())
    new = {"optimizer.plain": 3, "optimizer.apart": 3, "optimizer.whole": 3}
    assert binding(_Config()) == before | new
    assert binding(_with(plain=4)) == before | new | {"optimizer.plain": 4}
    assert binding(_with(rare=4)) == before | new | {"optimizer.rare": 4}
    assert binding(_with(loose=4)) == binding(_with(still=4)) == before | new
    assert binding(_with(2, loose=4)) == before | new | {"optimizer.loose": 4, "prompts": 2}
    free_keys = [
        name for name in ("plain", "rare", "loose", "still") if is_free(f"optimizer.{name}", _with())
    ]
    assert free_keys == ["rare", "loose"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rare": 7}, r"^config: optimizer\.rare \(7\) with prompts \(16\)$"),
        ({"apart": 4}, "make sampler and trainer differ; set exact = false"),
    ],
)
def test_a_new_field_is_refused_as_it_says(values, words):
    check_settings(_with(**{name: 3 for name in values}))
    with pytest.raises(ValueError, match=words):
        check_settings(_with(**values))


def test_a_new_field_that_needs_whole_weights_is_refused_with_pieces():
    pieces = load_config(None, None, {"parallel.engine": "fsdp"}).parallel
    check_settings(_with(whole=4).model_copy(update={"parallel": pieces}))
    with pytest.raises(ValueError, match=r'parallel\.engine \("fsdp"\) with optimizer\.whole \(5\)'):
        check_settings(_with(whole=5).model_copy(update={"parallel": pieces}))


def test_a_word_that_is_no_fact_is_refused():
    with pytest.raises(AssertionError, match="heads"):
        setting(3, heads=WHERE_SET)
