"""What is wrong with the files of an audit is told before a model is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from zerokl.audit.engines import engine
from zerokl.cli import main

LINE = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, -2.0], "temperature": 1.0}


def audit(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["audit", *map(str, words)]) == 2
    return " ".join(capsys.readouterr().err.split())


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("target", ["nofile.jsonl", "./no/file.jsonl", "runs/log.jsonl", "nofolder", "a/b/c"])
@pytest.mark.parametrize("model", [[], ["--model", "owner/name"]])
def test_a_target_that_is_not_there_is_told_as_one(target, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"audit: {target}: no such file or folder" in audit(capsys, target, *model)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt_ids": [1], "completion_ids": [3]}], "line 1: logprobs is missing"),
        ([{"input": "1+2=", "output": "3", "score": 1.0}], "line 1: holds text and no token ids; record the"),
        ([LINE, LINE | {"logprobs": [-1.0]}], "line 2: "),
        ([{"eggs": 1}], "line 1: a row with eggs"),
        ([], "log.jsonl holds no row"),
    ],
    ids=["no logprobs", "verl's text", "a bad line", "other fields", "empty"],
)
def test_a_log_is_looked_at_before_its_model(lines, message, tmp_path, capsys):
    """The model's name is of no model: whoever looks for it first says so."""
    log = written(tmp_path / "log.jsonl", *lines)
    assert message in audit(capsys, log, "--model", tmp_path / "no model")
    assert "no model is no folder" in audit(
        capsys, written(tmp_path / "sound.jsonl", LINE), "--model", tmp_path / "no model"
    ), "control"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-1-of-2.safetensors", "optimizer.bin"])
def test_weights_that_nobody_reads_are_named(name, model, tmp_path, capsys):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).write_bytes(b"of an earlier step")
    assert main(["audit", str(folder), "--n", "1", "--max_tokens", "2", "--out", str(tmp_path / "out")]) == 0
    warned = f"also holds {name}, which was not read" in " ".join(capsys.readouterr().out.split())
    assert warned == (name != "optimizer.bin")


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        (
            [LINE] * 20 + [LINE | {"completion_ids": [3, 1 << 20]}],
            [],
            "line 21: completion_ids holds 1048576",
        ),
        ([LINE], ["--adapter", "no adapter"], "--adapter no adapter holds no adapter_config.json"),
    ],
    ids=["a later line", "an adapter"],
)
def test_the_log_and_the_adapters_are_read_before_weights_are(
    lines, words, message, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(engine, "load_decoder", lambda *_: pytest.fail("a model was loaded"))
    log = written(tmp_path / "log.jsonl", *lines)
    assert message in audit(capsys, log, "--model", model, *words)
