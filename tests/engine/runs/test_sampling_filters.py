"""Runs that draw with min_p, logit_bias and allowed_token_ids: exact, bound by the ledger where they are set.

A run folder that was written before these keys existed is read, resumed and verified as before.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from zerokl.cli import main
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.ledger_head import binding
from zerokl.engine.runs.run import resume, train
from zerokl.files.writing import hash_json

from tests.engine.runs.exact_runs import faults, forget_end

ALWAYS = {"temperature", "top_k", "top_p", "max_tokens"}
# Ids of the character tokenizer: 0 to 2 are special, and the letters are among the rest.
FILTERS: dict[str, Any] = {
    "min_p": 0.3,
    "logit_bias": {"20": 3.0, "21": -2.5},
    "allowed_token_ids": tuple(range(1, 64, 2)),
}


def without_the_keys(path: Path) -> None:
    """Make a run folder one from before the keys existed: configuration and ledger do not have them."""
    file = path / "config.toml"
    text = re.sub(r"^min_p = .*\n|^\[sampling.logit_bias\]\n", "", file.read_text(), flags=re.MULTILINE)
    assert not any(name in text for name in FILTERS)
    file.write_text(text)
    first, *others = (path / "ledger.jsonl").read_text().splitlines(keepends=True)
    head = json.loads(first)
    noted = [key for key in head["environment"] if key.removeprefix("process.sampling.") in FILTERS]
    assert len(noted) == len(FILTERS)
    for key in noted:
        del head["environment"][key]
    del head["sum"]
    head["sum"] = hash_json(head)
    (path / "ledger.jsonl").write_text(json.dumps(head) + "\n" + "".join(others))


@pytest.mark.parametrize("name", FILTERS)
def test_the_ledger_chains_a_filter_where_it_is_set_and_only_there(config, name):
    def chained(cfg: Config) -> set[str]:
        return {key.removeprefix("sampling.") for key in binding(cfg) if key.startswith("sampling.")}

    assert chained(config()) == ALWAYS
    assert chained(config(**{f"sampling__{name}": FILTERS[name]})) == ALWAYS | {name}


def test_equal_filters_are_equal_settings(config):
    one = config(sampling__logit_bias={"21": 1, "3": 2.0}, sampling__allowed_token_ids=[5, 3, 3])
    same = config(sampling__logit_bias={3: 2.0, 21: 1.0}, sampling__allowed_token_ids=(3, 5))
    assert hash_json(binding(one)) == hash_json(binding(same))
    other = config(sampling__logit_bias={"21": 1, "3": 2.5}, sampling__allowed_token_ids=[5, 3])
    assert hash_json(binding(one)) != hash_json(binding(other))


@pytest.mark.full
def test_a_run_folder_without_the_keys_is_verified_and_goes_on_as_the_whole_run(config, tmp_path):
    whole = train(config(steps=3, checkpoint__every=1), tmp_path / "whole")
    old = tmp_path / "old"
    train(config(steps=2, checkpoint__every=1), old)
    without_the_keys(old)
    assert faults(old, 3) == []
    assert resume(old, {"steps": 3}).fingerprint == whole.fingerprint
    assert faults(old, 3) == []


@pytest.fixture(scope="module")
def filtered(config, tmp_path_factory, read_jsonl) -> Path:
    """A run with every filter."""
    path = tmp_path_factory.mktemp("filtered") / "run"
    summary = train(
        config(
            checkpoint__every=1,
            sampling__temperature=0.9,
            sampling__top_k=25,
            sampling__top_p=0.95,
            **{f"sampling__{name}": value for name, value in FILTERS.items()},
        ),
        path,
    )
    assert (summary.mismatch_max_abs, summary.tokens_unequal) == (0.0, 0)
    assert summary.tokens > 3 * 9
    drawn = {token for line in read_jsonl(path / "rollouts.jsonl") for token in line["completion_ids"]}
    assert drawn <= set(FILTERS["allowed_token_ids"])
    return path


def test_a_run_with_every_filter_is_repeated_and_goes_on(filtered, tmp_path):
    assert faults(filtered, 3) == []
    path = shutil.copytree(filtered, tmp_path / "run")
    forget_end(path)
    fingerprint = json.loads((filtered / "summary.json").read_text())["fingerprint"]
    assert resume(path).fingerprint == fingerprint


ALTERED = {
    "min_p": (r"^min_p = 0.3\n", ""),
    "logit_bias": (r"^20 = 3.0$", "20 = 3.5"),
    "allowed_token_ids": (r"^allowed_token_ids = \[[^]]*\]\n", ""),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_filter_is_found(filtered, tmp_path, name, capsys):
    path = shutil.copytree(filtered, tmp_path / "run")
    file = path / "config.toml"
    text, count = re.subn(*ALTERED[name], file.read_text(), flags=re.MULTILINE)
    assert count == 1
    file.write_text(text)
    assert any(f"sampling.{name}" in line for line in faults(path, 3))
    assert main(["train", "--resume", str(path), "--steps", "4"]) == 2
    assert f"sampling.{name} is " in capsys.readouterr().err


def test_a_filter_cannot_change_in_a_run_that_exists(filtered, tmp_path, capsys):
    path = shutil.copytree(filtered, tmp_path / "run")
    assert main(["train", "--resume", str(path), "--sampling.min_p", "0"]) == 2
    assert "sampling.min_p (0.0, was 0.3) decides bits" in capsys.readouterr().err
