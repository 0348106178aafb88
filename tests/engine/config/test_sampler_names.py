"""One vocabulary of samplers: the same names in settings, helps and pages; former names are refused."""

import re
from pathlib import Path

import pytest
from zerokl.audit import config as audit_config
from zerokl.audit.config import AuditSettings
from zerokl.cli import main
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.sampler_names import EXTERNAL, RENAMED, SAMPLERS
from zerokl.engine.runs.resume import run_config

from tests.made_run import made_run

DOCS = Path(__file__).resolve().parents[3] / "docs"


def _rows(page: str, section: str) -> dict[str, list[str]]:
    """The first table of a section of a page: the code in the first cell -> the other cells."""
    text = (DOCS / page).read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    table = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table[0].splitlines()[2:]]
    return {first.strip(" `"): others for first, *others in rows}


def test_the_helps_of_train_and_audit_say_what_each_name_is():
    train, audit = (model.model_fields["sampler"].description for model in (Config, AuditSettings))
    for name, line in SAMPLERS.items():
        assert f"{name} ({line})" in train
        assert (f"{name} ({line})" in audit) == (name in audit_config.SAMPLERS)
    assert set(SAMPLERS) - set(audit_config.SAMPLERS) == {"vllm-exact"}


def test_the_page_of_what_is_supported_has_every_sampler():
    assert list(_rows("support.md", "Samplers")) == list(SAMPLERS)
    assert "<!-- generated: samplers -->" in (DOCS / "vllm.md").read_text()


@pytest.mark.parametrize("name", EXTERNAL)
def test_an_external_sampler_is_never_exact(name):
    with pytest.raises(ValueError, match=rf'sampler \("{name}"\) with exact = true: .* set exact = false'):
        load_config(None, "demo", {"sampler": name})
    check_settings(Config(sampler=name, exact=False))


def test_vllm_with_exact_is_refused_with_the_name_of_our_decoder_inside(tmp_path):
    (tmp_path / "run.toml").write_text('sampler = "vllm"\n')
    message = 'vllm is vLLM as it comes now, .*"vllm-zerokl", which is zerokl\'s decoder inside vLLM'
    with pytest.raises(ValueError, match=message):
        load_config(str(tmp_path / "run.toml"))


@pytest.mark.parametrize("exact", ["true", "false"])
def test_a_former_name_is_refused_with_the_two_that_it_was(tmp_path, capsys, exact):
    words = ["--preset", "demo", "--run_dir", str(tmp_path / "run"), "--sampler", "vllm-stock"]
    assert main(["train", *words, "--exact", exact]) == 2
    assert f"sampler ('vllm-stock'): {RENAMED['vllm-stock']}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not RENAMED.keys() & (SAMPLERS.keys() | audit_config.SAMPLERS.keys())


@pytest.mark.parametrize("value", [["vllm-stock"], 3, "vlm"])
def test_any_other_value_is_refused_with_the_names(value):
    with pytest.raises(ValueError, match=r"sampler .*'native', 'hf', 'vllm', 'vllm-exact' or 'vllm-zerokl'"):
        load_config(None, None, {"sampler": value})


def _with_vllm(run: Path) -> Path:
    """A run whose config.toml names vllm, as one has that sampled with zerokl's decoder inside vLLM."""
    text = (run / "config.toml").read_text()
    text = text.replace('sampler = "native"', 'sampler = "vllm"').replace("exact = true", "exact = false")
    (run / "config.toml").write_text(text)
    return run


def test_a_run_that_did_not_sample_with_vllm_as_it_comes_is_refused(tmp_path):
    run = _with_vllm(made_run(tmp_path / "run"))
    message = 'sampler \\("vllm"\\) in .*config.toml is vLLM as it comes now, .*set it to "vllm-zerokl" there'
    with pytest.raises(ValueError, match=message):
        run_config(run, {})
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace('sampler = "vllm"', 'sampler = "vllm-zerokl"')
    )
    assert run_config(run, {}).sampler == "vllm-zerokl"


def test_control_a_run_that_sampled_with_vllm_as_it_comes_is_read(tmp_path):
    run = made_run(tmp_path / "run", settings={"sampler": "vllm", "exact": False})
    assert run_config(run, {}).sampler == "vllm"
