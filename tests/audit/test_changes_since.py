"""`zerokl audit --against`: the settings of the engines have a fingerprint, and changes are named."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface
from zerokl.audit.changes_since import fingerprint, read_audit, settings_of
from zerokl.audit.engines import make as engines
from zerokl.audit.engines.hf import HfEngine
from zerokl.cli import main


def _audit(model: Path, out: Path, *words: str) -> tuple[int, dict]:
    few = ("-n", "4", "--max-tokens", "6", "--dtype", "float32")
    code = main(["audit", str(model), *few, "--sampler", "hf", "--out", str(out), *words])
    return code, json.loads((out / "audit.json").read_text())


def _fingerprint(report: dict) -> str:
    settings = settings_of(report, report["assumed"]["versions"], report["engine_settings"])
    return fingerprint(settings)


def _coarse_attention(module, q, k, v, mask, **options):
    """Attention whose outputs are rounded to fp8, as a backend of another release might do."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, weights = sdpa_attention_forward(module, q, k, v, mask, **options)
    return out.to(torch.float8_e4m3fn).to(out.dtype), weights


def test_an_upgrade_that_changes_a_backend_is_named(model, tmp_path, monkeypatch, capsys):
    """NeMo-RL#2586: a release chose another kernel by default, and the mismatch grew."""
    earlier = _audit(model, tmp_path / "old")[1]
    AttentionInterface.register("coarse", _coarse_attention)
    monkeypatch.setattr(
        engines, "HfEngine", lambda folder, dtype, _attention, *more: HfEngine(folder, dtype, "coarse", *more)
    )
    code, report = _audit(model, tmp_path / "new", "--against", str(tmp_path / "old"))
    assert code == 1
    assert report["settings_fingerprint"] != earlier["settings_fingerprint"]
    changed = {c["setting"]: (c["before"], c["now"]) for c in report["against"]["changed"]}
    assert changed == {"sampler: attention backend": ("sdpa", "coarse")}
    assert report["against"]["grown"]
    assert report["cause"]["kind"] == "settings"
    assert "attention backend was sdpa and is coarse" in report["cause"]["text"]
    assert "The error jumps at layers.0.attention" in report["cause"]["text"]
    assert "attention backend" in (tmp_path / "new" / "audit.html").read_text()
    assert "since " in capsys.readouterr().out


def test_the_same_settings_have_one_fingerprint(model, tmp_path, capsys):
    earlier = _audit(model, tmp_path / "old")[1]
    report = _audit(model, tmp_path / "new", "--against", str(tmp_path / "old" / "audit.json"))[1]
    assert report["settings_fingerprint"] == earlier["settings_fingerprint"] == _fingerprint(earlier)
    assert report["against"]["changed"] == []
    assert report["cause"]["kind"] != "settings"
    assert "no setting has changed" in " ".join(capsys.readouterr().out.split())


def test_every_setting_is_in_the_fingerprint(model, tmp_path):
    report = _audit(model, tmp_path / "out")[1]
    assert len(read_audit(str(tmp_path / "out")).settings) > 15
    for where in report["engine_settings"]:
        for name in report["engine_settings"][where]:
            other = json.loads(json.dumps(report))
            other["engine_settings"][where][name] += "?"
            assert _fingerprint(other) != _fingerprint(report), (where, name)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sampler": 3}', "[" * 10_000, "\0"])
def test_what_is_no_audit_is_refused_before_any_work(model, tmp_path, capsys, text):
    (tmp_path / "audit.json").write_text(text)
    words = ["audit", str(model), "--against", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("zerokl: audit: --against ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_figure_of_an_earlier_audit_that_is_no_number_is_refused(model, tmp_path, capsys):
    report = _audit(model, tmp_path / "old")[1]
    for value in (10**400, "x", [1]):
        (tmp_path / "old" / "audit.json").write_text(json.dumps(report | {"max_abs": value}))
        words = ["audit", str(model), "--against", str(tmp_path / "old"), "--out", str(tmp_path / "out")]
        capsys.readouterr()
        assert main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_earlier_audit_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_audit(str(tmp_path / "none"))
