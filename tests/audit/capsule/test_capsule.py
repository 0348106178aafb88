"""Capsules: what is in the file, what is refused, and what a replay says has changed since."""

import gzip
import hashlib
import json
import pickle
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from zerokl.audit.capsule.capsule import Header, read_capsule, write_capsule
from zerokl.audit.capsule.folder_hashes import weight_hashes
from zerokl.cli import main
from zerokl.engine.runs.checks.tensor_hashes import tensor_hashes
from zerokl.files.writing import hash_json

from tests.helpers import property_settings
from tests.random_model import ONE_LAYER, random_model


def log_lines(count: int = 3, apart: float = 1e-3) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        logprobs = (-rng.exponential(1.0, 9)).astype(np.float32)
        trainer = np.minimum(logprobs + rng.normal(0, apart, 9), -1e-4).astype(np.float32)
        rows.append(
            {
                "prompt_ids": rng.integers(0, 9, 4).tolist(),
                "completion_ids": rng.integers(0, 9, 9).tolist(),
                "logprobs": logprobs.tolist(),
                "trainer_logprobs": trainer.tolist(),
                "temperature": 1.0,
            }
        )
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("capsule"), ONE_LAYER)


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in log_lines()))
    return file


def bits(values: list) -> list[int]:
    return np.array(values, np.float32).view(np.uint32).tolist()


def test_a_capsule_of_a_log_is_gzip_of_its_lines_to_the_bit(log, capsys):
    assert main(["capsule", "make", str(log), "--out", "c.zkc", "--band", "nemo-rl"]) == 0
    head, *rows = (json.loads(line) for line in gzip.open("c.zkc"))
    assert (head["zerokl_capsule"], head["bounds"]["band"], len(rows)) == (1, "nemo-rl", 3)
    for row, line in zip(rows, log_lines(), strict=True):
        for name in ("logprobs", "trainer_logprobs"):
            assert bits(row[name]) == bits(line[name])
        assert row["completion_ids"] == line["completion_ids"]
    assert Path("c.zkc").stat().st_size < 3000
    # The same log gives the same file: no date, no path.
    assert main(["capsule", "make", str(log), "--out", "d.zkc", "--band", "nemo-rl"]) == 0
    assert Path("c.zkc").read_bytes() == Path("d.zkc").read_bytes()


@pytest.mark.parametrize(("apart", "code", "words"), [(1e-3, 0, "Within"), (0.5, 1, "Beyond")])
def test_check_holds_the_columns_to_the_capsules_own_band(log, capsys, apart, code, words):
    log.write_text("".join(json.dumps(row) + "\n" for row in log_lines(apart=apart)))
    assert main(["capsule", "make", str(log), "--out", "c.zkc", "--band", "nemo-rl"]) == 0
    assert main(["capsule", "check", "c.zkc", "--junit", "j.xml", "--summary", "s.md"]) == code
    assert f"outcome of c.zkc: {words} the tolerance" in capsys.readouterr().out
    suite = ElementTree.parse("j.xml").getroot()
    assert suite.get("failures") == str(code)
    assert len(list(suite.iter("failure"))) == code
    assert f"### zerokl capsule: {'failed' if code else 'passed'}" in Path("s.md").read_text()


def refused(capsys, *words: str) -> str:
    assert main(["capsule", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def rehashed(head: dict, rows: list[dict]) -> bytes:
    """A capsule with a right hash over content of any kind."""
    whole = {"zerokl_capsule": 1, "sha256": hash_json([head, rows])} | head
    return gzip.compress("".join(json.dumps(row) + "\n" for row in (whole, *rows)).encode())


DRAWN = {"seed": 0, "max_tokens": 9, "stop_ids": [0]}
BAD_BOUNDS = [
    ({"bounds": {"max_k3": -1}}, "bounds.max_k3"),
    ({"bounds": {"max_abs": -1e-9}}, "bounds.max_abs"),
    ({"bounds": {"max_k3": 1e308}}, "bounds.max_k3"),
    ({"bounds": {"band": "any"}}, "bounds.band"),
    ({"bounds": {"max_abs": "NaN"}}, "bounds.max_abs"),
    ({"drawn": DRAWN | {"max_tokens": 0}}, "drawn.max_tokens"),
    ({"drawn": DRAWN | {"max_tokens": -5}}, "drawn.max_tokens"),
    ({"drawn": DRAWN | {"stop_ids": [-1]}}, "drawn.stop_ids"),
]


def test_a_damaged_or_foreign_file_is_refused_in_one_line(log, capsys, tmp_path):
    assert main(["capsule", "make", str(log), "--out", "c.zkc"]) == 0
    whole, file = Path("c.zkc").read_bytes(), tmp_path / "x.zkc"
    lines = gzip.decompress(whole).decode().splitlines()
    head, rows = json.loads(lines[0]), [json.loads(line) for line in lines[1:]]
    changed = [lines[0], lines[1].replace("[", "[1, ", 1), *lines[2:]]
    plain = {name: value for name, value in head.items() if name not in ("zerokl_capsule", "sha256")}
    capsys.readouterr()
    for content, expected in (
        (b"", "is no capsule, or is damaged|is gzip of something"),
        (whole[:-20], "is no capsule, or is damaged"),
        (pickle.dumps({"zerokl_capsule": 1}), "is no capsule, or is damaged"),
        (gzip.compress(b"hello"), "is not JSON"),
        (gzip.compress(b'{"a": 1}\n'), "is gzip of something that is no capsule"),
        (gzip.compress(b" " * 33_000_000), "unpacks to more than"),
        (gzip.compress("\n".join(changed).encode()), "was altered"),
        (gzip.compress(lines[0].replace(": 1,", ": 2,", 1).encode()), "is of another format"),
        (rehashed(plain | {"weights": 3}, rows), "weights"),
        (rehashed(plain | {"other": 3}, rows), "other"),
        (rehashed(plain, [{"prompt_ids": [1]}]), "has a line that is none of a log"),
        (rehashed(plain, []), "holds no completion"),
        *((rehashed(plain | change, rows), expected) for change, expected in BAD_BOUNDS),
    ):
        file.write_bytes(content)
        assert re.search(expected, refused(capsys, "check", str(file))), expected
    assert "missing.zkc" in refused(capsys, "check", "missing.zkc")


@property_settings(40)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path_factory, place, bit):
    folder = tmp_path_factory.mktemp("flip")
    file = folder / "c.zkc"
    head = Header(model="m", sampler="", trainer="")
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in log_lines()))
    assert main(["capsule", "make", str(log), "--out", str(folder / "a.zkc")]) == 0
    capsule = read_capsule(folder / "a.zkc")
    write_capsule(head, capsule.rollouts, file)
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    file.write_bytes(content)
    again, message = None, ""
    try:
        again = read_capsule(file)
    except ValueError as error:
        message = str(error)
    if again is None:
        assert message.startswith("capsule: ")
        assert "\n" not in message
    else:  # gzip's time, system and flags are no content
        assert again.header == head
        for a, b in zip(again.rollouts, capsule.rollouts, strict=True):
            assert bits(a.logprobs.tolist()) == bits(b.logprobs.tolist())


def test_a_capsule_of_more_than_a_megabyte_is_refused(log, capsys):
    rng = np.random.default_rng(1)
    row = log_lines(1)[0]
    n = 150_000
    row |= {"completion_ids": rng.integers(0, 50_000, n).tolist()}
    row |= {name: (-rng.exponential(1.0, n)).astype(np.float32).tolist() for name in ("logprobs",)}
    row.pop("trainer_logprobs")
    log.write_text(json.dumps(row) + "\n")
    assert "give a smaller -n" in refused(capsys, "make", str(log), "--out", "c.zkc")
    assert not Path("c.zkc").exists()


def test_the_hashes_are_those_of_torch_and_of_the_files_bytes(model):
    """The same tensors through safetensors and torch; and one of them cut from the file by hand."""
    tensors = {}
    for file in model.glob("*.safetensors"):
        tensors |= load_file(file)
    hashes = weight_hashes(model)
    assert hashes.keys() == tensors.keys()
    for name, row in tensor_hashes(tensors.items()).items():
        assert hashes[name].split()[2] == row["sha256"][row["dtype"]], name
        expected = hashlib.sha256(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
        assert hashes[name].split()[2] == expected.hexdigest()


@pytest.fixture
def drawn(model, tmp_path, monkeypatch) -> Path:
    """A capsule of the native sampler and zerokl's forward over a copy of the model."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    words = "capsule make native --model model --trainer zerokl --n 3 --max_tokens 6 --dtype float32"
    assert main([*words.split(), "--out", "c.zkc"]) == 0
    return tmp_path / "c.zkc"


BOTH = ["--sampler", "native", "--trainer", "zerokl"]


def test_nothing_changed(drawn, capsys):
    assert main(["capsule", "replay", "c.zkc", *BOTH]) == 0
    out = capsys.readouterr().out
    for name in ("sampler, then and now", "trainer, then and now", "sampler and trainer, now"):
        assert re.search(f"{name}: equal to the bit", out), name
    assert "changed" not in out
    assert "model:" not in out
    shutil.move("model", "elsewhere")
    assert "--model" in refused(capsys, "replay", "c.zkc", *BOTH)
    assert main(["capsule", "replay", "c.zkc", *BOTH, "--model", "elsewhere"]) == 0


def test_other_weights_are_named_and_the_first_bit_that_parts(drawn, capsys):
    file = next(Path("model").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.001
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["capsule", "replay", "c.zkc", "--trainer", "zerokl", "--junit", "j.xml"]) == 1
    out = capsys.readouterr().out
    assert f"weights: 1 of {len(tensors)} tensors differ (model.norm.weight)" in out
    first = re.search(r"trainer, then and now: .*first at completion 0, position (\d+) .*bits (\w+)", out)
    capsule = read_capsule(drawn)
    then = int(capsule.rollouts[0].trainer_logprobs.view(np.uint32)[int(first[1])])
    assert int(first[2], 16) == then
    assert len(list(ElementTree.parse("j.xml").getroot().iter("failure"))) == 1
    assert main(["capsule", "replay", "c.zkc", "--trainer", "zerokl", "--max_abs", "1"]) == 0
    assert "Within the tolerance" in capsys.readouterr().out


@pytest.mark.full
def test_another_dtype_and_another_engine_are_named(drawn, capsys):
    assert main(["capsule", "replay", "c.zkc", *BOTH, "--dtype", "bf16", "--summary", "s.md"]) == 1
    out = capsys.readouterr().out
    assert "changed: dtype: float32 -> bfloat16" in out
    assert "| dtype | float32 | bfloat16 |" in Path("s.md").read_text()
    assert main(["capsule", "replay", "c.zkc", "--trainer", "hf", "--band", "verl"]) == 0
    out = capsys.readouterr().out
    assert "changed: trainer: zerokl -> hf" in out
    assert "trainer, then and now: Band verl holds" in out
    # An engine that did not draw the capsule scores its tokens.
    assert main(["capsule", "replay", "c.zkc", "--sampler", "zerokl"]) == 2
    assert main(["capsule", "replay", "c.zkc", "--sampler", "hf", "--max_abs", "0.01"]) == 0


@pytest.mark.full
def test_a_log_is_scored_by_the_sampler_that_is_named(log, model, capsys):
    words = ["capsule", "make", str(log), "--model", str(model), "--trainer", "zerokl", "--out", "c.zkc"]
    assert main(words) == 0
    assert main(["capsule", "replay", "c.zkc", "--trainer", "zerokl"]) == 0
    assert main(["capsule", "replay", "c.zkc", "--sampler", "hf"]) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("make log.jsonl --out c.zkc --trainer hf", "--model"),
        ("make native --out c.zkc", "--model"),
        ("make nothing --out c.zkc", "is no file and no engine"),
        ("make log.jsonl --out log.jsonl", "exists already"),
        ("make log.jsonl --out c.zkc --trainer x --model m", "trainer x is not known"),
        ("make vllm --out c.zkc --trainer vllm --model m", "two vLLM engines"),
        ("make log.jsonl --out c.zkc --max_k3 -1", "max_k3"),
        ("check", "name a capsule"),
        ("replay log.jsonl --trainer hf", "is no capsule"),
    ],
)
def test_refusals(log, capsys, words, expected):
    assert expected in refused(capsys, *words.split())
