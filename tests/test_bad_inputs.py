"""Any input works as documented, or gives one line and exit code 2; no file changes that should not."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zerokl.audit.logs.scan import scan_log
from zerokl.cli import main
from zerokl.engine.config.config_file import known_keys, load_config, to_toml
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.ablations.ablate import read_grid
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.jsonl import read_pairs
from zerokl.engine.tasks.loading import load_task
from zerokl.files.reading import parse_json
from zerokl.model.checkpoint import check_weights, load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.weights import Layout

from tests.helpers import contents, property_settings
from tests.random_model import ONE_LAYER, random_model

NUMBERS = st.sampled_from([0, -1, 1, 2, 60_000, 1 << 31, 1 << 63, 10**400, -0.0, 0.5, 1e-300, 1e300])
NON_FINITE = st.sampled_from([float("nan"), float("inf"), -float("inf")])
TEXTS = st.sampled_from(
    ["", "x", "0", "true", "../../x", "/etc/passwd", "\x00", "\x1b[31m", "é" * 300, "\ud800"]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, NON_FINITE, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(TEXTS, values, max_size=3)),
    max_leaves=5,
)
DEEP = st.integers(20, 200_000).map(lambda n: "[" * n + "1" + "]" * n)


def check_cases(strategy: st.SearchStrategy, examples: int, check: Callable) -> None:
    """Run `check` on drawn cases."""

    @settings(parent=property_settings(examples), suppress_health_check=list(HealthCheck))
    @given(strategy)
    def drawn(case):
        check(case)

    drawn()


EXAMPLES = pytest.mark.parametrize(
    "examples",
    [pytest.param(300, marks=pytest.mark.full), pytest.param(10_000, marks=pytest.mark.proof)],
)


def accepted(function: Callable, *args: object) -> object:
    """The result of function(*args), or None where it raises ValueError with a message of one line."""
    try:
        return function(*args)
    except (ValueError, OSError) as error:
        message = str(error)
        assert message
        assert len(message.splitlines()) == 1, message
        assert len(message) < 4000
        return None


# --- configurations ---


def _toml(key: str, value: object) -> str:
    return f"{key} = {json.dumps(value)}\n"


@EXAMPLES
def test_any_configuration(tmp_path, examples):
    keys = st.one_of(st.sampled_from(sorted(known_keys())), TEXTS.filter(bool))
    file = tmp_path / "c.toml"

    def check(case: list[tuple[str, object]]) -> None:
        file.write_text("".join(_toml(k, v) for k, v in case), errors="replace")
        config = accepted(load_config, str(file))
        assert config is None or isinstance(config, Config)
        if config is not None:
            assert accepted(to_toml, config) is not None
            accepted(load_task, config.task.name, config.task.options)

    values = st.one_of(VALUES, DEEP)
    check_cases(st.lists(st.tuples(keys, values), max_size=3), examples, check)


@EXAMPLES
def test_any_grid(tmp_path, examples):
    file = tmp_path / "grid.toml"
    keys = ["preset", "file", "seeds", "set", "grid", "variants", "other"]
    tables = st.dictionaries(st.sampled_from(["steps", "seed", "dtype", "x.y", ""]), VALUES, max_size=2)

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {inline(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(inline, value)) + "]"
        return json.dumps(value)

    def check(case: dict[str, object]) -> None:
        file.write_text("".join(f"{k} = {inline(v)}\n" for k, v in case.items()), errors="replace")
        accepted(read_grid, file)

    check_cases(
        st.dictionaries(st.sampled_from(keys), st.one_of(VALUES, tables), max_size=4), examples, check
    )


# --- models ---


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"), ONE_LAYER)


CONFIG_FIELDS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings", "attention_bias", "hidden_act"),
    *("layer_types", "use_sliding_window", "quantization_config", "attention_dropout", "pretraining_tp"),
)


@EXAMPLES
def test_any_architecture(model, examples):
    """A field has its value, or the configuration is refused: nothing is replaced by a default."""
    raw = json.loads((model / "config.json").read_text())

    def check(case: tuple[str, object]) -> None:
        name, value = case
        config = accepted(ModelConfig.from_dict, raw | {name: value})
        if config is None or value is None:
            return
        assert all(f > 0 for f in config.frequencies)
        ours = {"num_key_value_heads": "kv_heads", "head_dim": "head_dim", "rms_norm_eps": "eps"}
        if name in ours:
            assert getattr(config, ours[name]) == value

    check_cases(st.tuples(st.sampled_from(CONFIG_FIELDS), VALUES), examples, check)


@pytest.mark.parametrize("name", ["rope_theta", "head_dim", "num_key_value_heads", "num_attention_heads"])
@pytest.mark.parametrize("zero", [0, 0.0, False, ""])
def test_zero_is_no_default(model, name, zero):
    raw = json.loads((model / "config.json").read_text())
    raw.pop("rope_parameters")
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_dict(raw | {name: zero})


@EXAMPLES
def test_any_checkpoint(model, tmp_path, examples):
    """What the check of the headers accepts can be read, and the other way round."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    good = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]

    def check(case: tuple[str, int, object]) -> None:
        how, place, value = case
        name, content = names[place % len(names)], bytearray(good)
        changed = {k: dict(v) for k, v in header.items()}
        if how == "cut":
            content = content[: place % len(content)]
        elif how == "flip":
            content[place % (8 + size)] ^= 1 << place % 8
        elif how == "remove":
            del changed[name]
        elif how == "rename":
            changed[str(value)[:50] + "x"] = changed.pop(name)
        else:
            changed[name][how] = value
        if how not in ("cut", "flip"):
            text = json.dumps(changed).encode()
            content = struct.pack("<Q", len(text)) + text + good[8 + size :]
        (folder / "model.safetensors").write_bytes(content)
        layout, before = Layout(ModelConfig.from_file(folder)), contents(folder)
        checked = accepted(lambda: check_weights(folder, layout) or True)
        loaded = accepted(load_decoder, folder, torch.float32)
        assert (checked is None) == (loaded is None)
        assert contents(folder) == before

    hows = st.sampled_from(["cut", "flip", "remove", "rename", "dtype", "shape", "data_offsets"])
    values = st.one_of(VALUES, st.sampled_from(["BF16", "F16", "F64", "F8_E4M3", "I32"]))
    check_cases(st.tuples(hows, st.integers(0, 1 << 30), values), examples, check)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "\0", "a\\b"]
)
def test_an_index_that_leaves_its_folder_is_refused(model, tmp_path, file):
    folder = tmp_path / "deep" / "model"
    shutil.copytree(model, folder)
    shutil.move(folder / "model.safetensors", folder.parent / "model.safetensors")
    names = Layout(ModelConfig.from_file(folder)).checkpoint_views(
        torch.empty(0, device="meta").new_empty(1 << 20)
    )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, file)})
    )
    with pytest.raises(ValueError, match="must lie beside its index"):
        load_decoder(folder, torch.float32)


# --- logs and data sets ---


def _line(case: object) -> str:
    return case if isinstance(case, str) and case.startswith("[") else json.dumps(case)


@EXAMPLES
def test_any_log_of_rollouts(tmp_path, examples):
    good = {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-0.5, -0.25], "temperature": 1.0}
    file = tmp_path / "log.jsonl"

    def check(case: tuple[object, object]) -> None:
        name, value = case
        file.write_text(json.dumps(good) + "\n" + _line(good | {name: value} if name else value) + "\n")
        accepted(scan_log, file, 10, 0, None, "zerokl")

    names = st.sampled_from([*good, "top_k", "top_p", "weight_version", ""])
    ids = st.lists(st.one_of(NUMBERS, NON_FINITE, TEXTS), max_size=3)
    check_cases(st.tuples(names, st.one_of(VALUES, ids, DEEP)), examples, check)


@EXAMPLES
def test_any_data_set(tmp_path, examples):
    file = tmp_path / "data.jsonl"

    def check(case: object) -> None:
        file.write_text('{"prompt": "1+1=", "answer": 2}\n' + _line(case) + "\n")
        pairs = accepted(read_pairs, str(file))
        assert pairs is None or all(len(answer) <= 4096 and "nan" not in answer for _, answer in pairs)

    record = st.fixed_dictionaries({"prompt": VALUES, "answer": VALUES})
    check_cases(st.one_of(record, VALUES, DEEP), examples, check)


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "(10^{10})!", "9" * 10_000_000], ids=["tower", "factorial", "long"]
)
def test_an_answer_that_takes_too_long_is_refused(tmp_path, answer):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "x", "answer": answer}) + "\n")

    def reward() -> float:
        task = load_task("jsonl", {"file": str(tmp_path / "data.jsonl")})
        return task.reward(task.problems("train")[0], "it is $1$")

    assert accepted(reward) is None


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000, "NaN", "\ud800"], ids=len)
def test_the_reader_of_json_refuses_in_one_line(text):
    accepted(parse_json, text if text != "\ud800" else text.encode("utf-8", "surrogatepass"))


# --- run folders ---


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    values = {
        "model": str(model),
        "steps": 3,
        "prompts": 2,
        "num_generations": 2,
        "sampling.max_tokens": 4,
        "task.options": {"max_value": 9, "train": 20, "held_out": 10},
        "evaluation.every": 0,
        "checkpoint.every": 1,
        "workers": 1,
        "threads": 1,
    }
    train(load_config(None, None, values), path)
    return path


HOWS = ("cut", "flip", "remove", "folder", "link", "swap", "nest", "empty")


def _harm(path: Path, how: str, file: int, place: int) -> Path:
    files = sorted(p for p in path.rglob("*") if p.is_file() and "tensorboard" not in str(p))
    victim, other = files[file % len(files)], files[place % len(files)]
    content = bytearray(victim.read_bytes())
    if how == "cut":
        victim.write_bytes(content[: place % len(content)])
    elif how == "flip":
        content[place // 8 % len(content)] ^= 1 << place % 8
        victim.write_bytes(content)
    elif how == "swap":
        victim.write_bytes(other.read_bytes())
    elif how == "nest":
        victim.write_text("[" * 100_000)
    elif how == "empty":
        victim.write_text("")
    else:
        victim.unlink()
        if how == "folder":
            victim.mkdir()
        elif how == "link":
            victim.symlink_to(path.parent / "nothing")
    return victim


def _check_folder(run: Path, folder: Path, how: str, file: int, place: int, capsys, unfinished: bool) -> None:
    path = folder / "run"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(run, path)
    if unfinished:
        (path / "summary.json").unlink()
        shutil.rmtree(path / "checkpoints" / "step-000003")
    _harm(path, how, file, place)
    before = contents(path)
    for words, codes in (
        (["verify", "run", str(path), "--replays", "0"], (0, 1, 2)),
        (["train", "--resume", str(path)], (0, 2)),
    ):
        capsys.readouterr()
        code = main(words)
        error = capsys.readouterr().err
        assert code in codes, error
        assert "internal error" not in error, error
        assert len(error.splitlines()) == (code == 2), error
        if code == 2 or words[0] == "verify":
            assert contents(path) == before
    if code == 0:
        # Where a setting that decides no bit was changed, a line says that the run went on with another one.
        lines = (path / "ledger.jsonl").read_bytes().splitlines()
        kept = [line for line in lines if b'"kind":"resumed"' not in line]
        assert kept == (run / "ledger.jsonl").read_bytes().splitlines()


@pytest.mark.parametrize(
    "examples", [pytest.param(100, marks=pytest.mark.full), pytest.param(10_000, marks=pytest.mark.proof)]
)
def test_any_run_folder(run, tmp_path, capsys, monkeypatch, examples):
    """Whatever happens to a file of a run: one line, or the run goes on to its own ledger."""
    place = st.integers(0, 1 << 30)

    def check(case: tuple[str, int, int, bool]) -> None:
        how, file, where, unfinished = case
        _check_folder(run, tmp_path, how, file, where, capsys, unfinished)

    check_cases(st.tuples(st.sampled_from(HOWS), place, place, st.booleans()), examples, check)


@pytest.mark.parametrize("how", [*HOWS[:3], *(pytest.param(x, marks=pytest.mark.full) for x in HOWS[3:])])
def test_the_first_file_of_a_run_in_every_way(run, tmp_path, capsys, how):
    for file in range(3):
        _check_folder(run, tmp_path, how, file, 5, capsys, False)


def test_control_the_run_itself_holds(run, capsys):
    assert main(["verify", "run", str(run), "--replays", "1"]) == 0
    assert os.path.exists(run / "summary.json")
