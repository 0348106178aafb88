"""Logs of other frameworks: each sample is read for what it says, and no input breaks a reader."""

import copy
import json
import pickle
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.audit.audit import audit
from zerokl.audit.command import find_log
from zerokl.audit.formats.registry import read_rollouts
from zerokl.audit.frameworks import FRAMEWORKS, LOGS
from zerokl.audit.frameworks.zerokl import as_row, parse
from zerokl.audit.hypotheses.value_checks import LogValues
from zerokl.cli import main
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.audit.formats.samples import (
    FILES,
    SAMPLES,
    first_row,
    holder,
    places,
    read,
    rows_of,
    write_rows,
)
from tests.audit.settings import audit_config, audit_json
from tests.helpers import property_settings

SCHEMA = json.loads((PACKAGE_ROOT / "audit/formats/log.schema.json").read_text())
VALID = jsonschema.Draft202012Validator(SCHEMA)
# A line with every field of ours.
FULL = first_row(SAMPLES / "zerokl.jsonl")


def slime_sample() -> dict:
    """A sample as slime's Sample.to_dict() has it, with tensors."""
    row = first_row(SAMPLES / "slime.jsonl")
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    return row | {name: torch.tensor(row[name], dtype=torch.int32) for name in names}


def test_a_turn_with_a_tools_answer_of_prime_rl():
    first, second = read(SAMPLES / "prime-rl.jsonl")
    assert first.prompt_ids == (12, 5, 39, 2)
    assert first.completion_ids == (27, 29, 5, 19, 8, 9, 2, 33, 25, 40)
    assert first.mask.tolist() == [True] * 4 + [False] * 3 + [True] * 3
    assert np.isnan(first.logprobs).tolist() == (~first.mask).tolist()
    assert (
        first.logprobs[first.mask].tolist()
        == np.float32([-0.1133, -1.5471, -0.2545, -0.5187, -0.3339, -2.3469, -2.5836]).tolist()
    )
    assert first.trainer_logprobs[0] == np.float32(-0.1123)
    assert (first.decimals, first.trainer_decimals, first.tolerance()) == (4, 4, 1e-4)
    assert first.sampling_params == SamplingParams(0.8)
    assert (first.weight_span, second.weight_span) == ((5, 6), (5, 5))
    assert (first.step, first.prompt, first.sample, first.reward) == (7, "group-0", "trace-0", 1.0)


def test_paths_that_part_late_count_their_beginning_once():
    row = json.loads((SAMPLES / "prime-rl.jsonl").read_text().splitlines()[0])
    nodes = row["traces"][0]["nodes"]
    nodes.append(copy.deepcopy(nodes[3]) | {"parent": 1, "token_ids": [2, 6, 6, 6]})
    first, second = LOGS["prime-rl"].parse(row, Path())
    assert int(first.mask.sum()) == 7
    assert second.completion_ids == (27, 29, 5, 19, 2, 6, 6, 6)
    assert second.mask.tolist() == [False] * 5 + [True] * 3


def test_both_columns_and_the_padding_of_nemo_rl():
    first, second = read(SAMPLES / "train_data_step4.jsonl")
    assert (first.prompt_ids, len(first.completion_ids)) == ((12, 5, 39), 4)
    assert second.mask.tolist() == [True] * 4 + [False] * 2 + [True] * 2
    np.testing.assert_allclose(first.trainer_logprobs, first.logprobs * 1.001, rtol=1e-6)
    assert np.isnan(second.trainer_logprobs[4:6]).all()
    assert (first.step, first.reward, second.sample) == (4, 1.0, 1)
    assert first.sampling_params is None


def test_the_samples_of_a_call_of_tinker():
    rollouts = read(SAMPLES / "tinker.jsonl")
    assert [r.completion_ids for r in rollouts] == [(27, 29, 5, 19), (33, 25, 40, 16, 35, 11)]
    assert {r.sampling_params for r in rollouts} == {SamplingParams(1.0)}
    assert [(r.step, r.prompt, r.sample) for r in rollouts] == [(3, 0, 0), (3, 0, 1)]


def test_the_turns_of_titanrl():
    rollouts = read(SAMPLES / "titanrl.jsonl")
    assert [(r.sample, r.turn, r.weight_span) for r in rollouts] == [
        (0, 0, (3, 3)),
        (0, 1, (3, 4)),
        (1, 0, (3, 3)),
    ]
    first, second = rollouts[:2]
    assert second.prompt_ids == (*first.prompt_ids, *first.completion_ids, 8, 9)


def test_a_dump_of_slime_opens_without_running_code(tmp_path):
    torch.save({"rollout_id": 5, "samples": [slime_sample()]}, tmp_path / "5.pt")
    (rollout,) = read(tmp_path / "5.pt")
    assert (rollout.prompt_ids, rollout.completion_ids) == ((12, 5, 39), (4, 8, 15))
    assert rollout.sampling_mask == ((4, 7), None, (15,))
    assert (rollout.weight_span, rollout.step, rollout.prompt) == ((3, 4), 5, 2)
    assert np.isnan(rollout.logprobs).tolist() == [False, True, False]
    trained = {"tokens": [1, 2, 3], "response_lengths": 1, "loss_masks": torch.ones(1)}
    trained |= {"log_probs": torch.tensor([-0.5]), "rollout_log_probs": torch.tensor([-0.25])}
    torch.save({"format_version": 2, "rollout_id": 5, "samples": [trained]}, tmp_path / "train.pt")
    (rollout,) = read(tmp_path / "train.pt")
    assert (rollout.trainer_logprobs.tolist(), rollout.logprobs.tolist()) == ([-0.5], [-0.25])


class Opened:
    """Leaves a mark when a pickle of it is loaded."""

    def __reduce__(self):
        return (Path.touch, (Path("opened"),))


def test_a_folder_of_dumps_is_a_log(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        torch.save({"rollout_id": 5, "samples": [slime_sample()]}, tmp_path / folder / "5.pt")
    assert find_log(str(tmp_path / "a")) == tmp_path / "a"
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


@pytest.mark.parametrize(("name", "format"), [("x.pt", "slime"), ("x.pkl", "skyrl"), ("x.pkl", "verl")])
def test_a_pickle_is_never_loaded(tmp_path, monkeypatch, capsys, name, format):
    monkeypatch.chdir(tmp_path)
    if name == "x.pt":
        torch.save({"samples": [Opened()]}, name)
    else:
        Path(name).write_bytes(pickle.dumps(Opened()))
    assert main(["audit", name, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"zerokl convert {name} --format" in error
    assert main(["convert", name, "--format", format]) == 2
    script, error = capsys.readouterr()
    assert "no log was written" in error
    assert script == FRAMEWORKS[format].script
    assert not Path("opened").exists()
    pickle.loads(pickle.dumps(Opened()))  # control: loading it leaves the mark
    assert Path("opened").exists()


@pytest.mark.parametrize("name", ["skyrl.jsonl", "verl-recorded.jsonl", "trl.jsonl"])
def test_recorded_and_converted_logs_are_ours(name):
    framework = name.split(".")[0].split("-")[0]
    rollouts = read(SAMPLES / name, framework)
    assert all(r.trainer_logprobs is not None and r.sampling_params is not None for r in rollouts)
    for line in (SAMPLES / name).read_text().splitlines():
        VALID.validate(json.loads(line))


def test_texts_are_refused_with_the_way_out(tmp_path, capsys):
    assert main(["audit", str(SAMPLES / "verl.jsonl"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert (
        "verl.jsonl, line 1: holds text and no token ids; record the run with zerokl.integrations.verl"
        in error
    )
    assert main(["convert", str(SAMPLES / "verl.jsonl"), str(tmp_path / "log.jsonl")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_ids_that_titanrl_left_out_are_asked_for(tmp_path, capsys):
    row = json.loads((SAMPLES / "titanrl.jsonl").read_text().splitlines()[0])
    del row["turns"][1]["completion_token_ids"]
    write_rows(tmp_path / "log.jsonl", row)
    assert main(["audit", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "line 1: turns[1] has no completion_token_ids; set log_tensors" in capsys.readouterr().err


def test_every_field_of_our_own_is_read():
    VALID.validate(FULL)
    (rollout,) = parse(FULL, Path())
    assert np.isnan(rollout.logprobs).tolist() == [False, True, True, False]
    assert rollout.weight_span == (3, 4)
    bias, allowed = ((4, 1.5), (16, -2.0)), (4, 8, 15, 16)
    assert rollout.sampling_params == SamplingParams(0.8, 20, 0.9, 0.05, bias, allowed)
    assert rollout.tolerance() == pytest.approx(0.5e-4 + 0.5e-6)
    assert rollout.routed_experts.shape == (4, 1, 2)
    undrawn = FULL | {"logprobs": [-0.25, None, None, -0.125], "trainer_logprobs": [-0.25, -0.5, None, None]}
    assert as_row(rollout) == undrawn
    assert set(SCHEMA["properties"]) == {*FULL, "turns"}


@pytest.mark.parametrize(
    ("drawn_with", "message"),
    [
        ({"min_p": 1.5}, r"min_p \(1.5\) must lie in \[0, 1\]"),
        ({"min_p": "little"}, "min_p .* must be a number"),
        ({"logit_bias": {"four": 1.0}}, "logit_bias: 'four' is no token id"),
        ({"logit_bias": {"04": 1.0}}, "logit_bias: '04' is no token id"),
        ({"logit_bias": {"4": None}}, "logit_bias of token 4 .* must be a number"),
        ({"logit_bias": {"4": 101}}, "logit_bias \\(101.0\\) of token 4"),
        ({"logit_bias": [4]}, "logit_bias .* must be a JSON object"),
        ({"allowed_token_ids": []}, "must be a list of token ids that is not empty"),
        ({"allowed_token_ids": [4.5]}, "allowed_token_ids"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty \(1.1\) is refused: a penalty makes"),
        ({"presence_penalty": -0.5}, r"presence_penalty \(-0.5\) is refused"),
        ({"frequency_penalty": "much"}, "frequency_penalty .* is refused"),
    ],
    ids=str,
)
def test_a_filter_that_cannot_be_and_a_penalty_are_refused_by_name(drawn_with, message):
    with pytest.raises(ValueError, match=message):
        list(parse(FULL | drawn_with, Path()))


def test_a_penalty_that_is_off_is_no_penalty():
    (plain,) = parse(FULL, Path())
    (off,) = parse(FULL | {"repetition_penalty": 1.0, "presence_penalty": 0, "min_p": 0.05}, Path())
    assert off.sampling_params == plain.sampling_params


def test_turns_take_what_is_said_beside_them():
    turns = [{k: FULL[k] for k in ("prompt_ids", "completion_ids", "logprobs")}] * 2
    first, second = parse({"turns": turns, "temperature": 0.5, "weight_version": 7}, Path())
    assert (first.turn, second.turn) == (0, 1)
    assert first.sampling_params.temperature == second.sampling_params.temperature == 0.5
    assert second.weight_span == (7, 7)


WITH_IDS = [file for name, files in FILES.items() if LOGS[name].columns for file in files]


@pytest.mark.parametrize("file", WITH_IDS, ids=lambda p: p.name)
def test_a_converted_log_says_the_same(file, tmp_path):
    out = tmp_path / "log.jsonl"
    assert main(["convert", str(file), str(out)]) == 0
    for line in out.read_text().splitlines():
        VALID.validate(json.loads(line))
    for a, b in zip(read(file), read(out, "zerokl"), strict=True):
        for name in (
            "prompt_ids",
            "completion_ids",
            "sampling_params",
            "decimals",
            "reward",
            "step",
            "prompt",
        ):
            assert getattr(a, name) == getattr(b, name), name
        for name in ("logprobs", "trainer_logprobs", "mask"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None and y is None) or x.tobytes() == y.tobytes(), name
    assert main(["convert", str(file), str(out)]) == 2  # nothing is overwritten


BAD = [
    ({"logprobs": [-1.0]}, "logprobs has 1 entries for a completion of 4 tokens"),
    ({"trainer_logprobs": [-1.0] * 3}, "trainer_logprobs has 3 entries for a completion of 4 tokens"),
    ({"trainer_logprobs": [-1.0, "2.0", -1.0, -1.0]}, "trainer_logprobs[1] ('2.0') must be a number"),
    ({"trainer_logprobs": [-1, -(10**400), 2.0, -1]}, "trainer_logprobs[1] (-1000"),
    ({"mask": [1, 1]}, "mask has 2 entries for a completion of 4 tokens"),
    ({"mask": [1, 2, 1, 1]}, "mask[1] (2) must be 0 or 1"),
    ({"mask": "1111"}, "mask ('1111') must be a list of 0 and 1"),
    (
        {"weight_version": [1, 2]},
        "weight_version ([1, 2]) must be a whole number, or one for each of",
    ),
    ({"weight_version": 2.5}, "weight_version (2.5) must be a whole number"),
    ({"decimals": 30}, "decimals (30) must lie in 0 .. 20"),
    ({"sampling_mask": [[4], None, None, [15]]}, "the drawn token 16 is not among them"),
    ({"sampling_mask": [[4]]}, "sampling_mask has 1 entries"),
    ({"routed_experts": [[1], [2]]}, "routed_experts must be expert ids, nested as tokens, layers, k"),
    ({"routed_experts": [[[1]], [[2]]]}, "routed_experts has 2 tokens, not 4 or 7 or 6"),
    ({"advantage": [1.0]}, "advantage has 1 entries for a completion of 4 tokens"),
    ({"reward": "good"}, "reward ('good') must be a number"),
    ({"prompt": [1]}, "prompt ([1]) must be a whole number or a text"),
    ({"prompt_text": 5}, "prompt_text (5) must be a text"),
    ({"completion_ids": [-1, 1, 1, 1]}, "completion_ids holds -1, which is no token id"),
    ({"turns": [{"prompt_ids": [1]}]}, "has turns, and prompt_ids beside them"),
    ({"step": 1e300}, "step (1e+300) must be a whole number"),
]


@pytest.mark.parametrize(("change", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_wrong_field_is_named_with_file_and_line(tmp_path, capsys, change, reason):
    write_rows(tmp_path / "log.jsonl", FULL, FULL | change)
    assert main(["audit", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zerokl: audit: {tmp_path / 'log.jsonl'}, line 2: ")
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no row"),
        (b"\xff\xfe\n", "line 1: is not UTF-8"),
        (b"[" * 100_000, "line 1: is nested deeper than 32 levels"),
        (b'{"a": 1}\n', "line 1: a row with a is not of a known format"),
        (b"PK\x03\x04broken", "is no whole file of torch's"),
        (b"PAR1broken", "Parquet"),
    ],
)
def test_a_file_that_is_no_log_is_named(tmp_path, capsys, content, reason):
    (tmp_path / "log.jsonl").write_bytes(content)
    assert main(["audit", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "log.jsonl") in error
    assert reason in error or (reason == "Parquet" and "cannot be read" in error)
    assert error.count("\n") == 1


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path):
    for step in (10, 2, 1):
        (tmp_path / f"step_{step}").mkdir()
        write_rows(tmp_path / f"step_{step}" / "x.jsonl", FULL | {"step": step})
    assert [r.step for r in read(tmp_path)] == [1, 2, 10]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


# A row of each form.
FORMS = {(name, *sorted(row)): row for name in LOGS for row, _ in rows_of(name)}
ROWS = [(name, row) for (name, *_), row in FORMS.items()]


@pytest.mark.parametrize(("format", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
@property_settings(200)
@given(data=st.data())
def test_a_reader_takes_a_row_or_says_why_not(format, row, data):
    """Any value at any place: the reader returns completions whose columns fit, or raises ValueError."""
    changed = copy.deepcopy(row)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(changed) or [("x",)]))
        parent = holder(changed, path)
        if data.draw(st.booleans()) and isinstance(parent, (dict, list)) and len(path) and path[-1] != "x":
            del parent[path[-1]]
        else:
            parent[path[-1]] = data.draw(ANY)
    try:
        rollouts = list(LOGS[format].parse(changed, Path("train_data_step4.jsonl")))
    except (ValueError, KeyError):
        return
    for rollout in rollouts:
        if rollout.completion_ids is None:
            assert rollout.completion_text is None or isinstance(rollout.completion_text, str)
            continue
        for column in (rollout.logprobs, rollout.trainer_logprobs, rollout.mask):
            assert column is None or len(column) == len(rollout.completion_ids)
        assert rollout.prompt_ids
        line = json.loads(json.dumps(as_row(rollout)))
        # What is no log-probability is read, to be counted, and the schema has no place for it.
        values = LogValues()
        values.taken("", rollout, rollout.drawn())
        assert VALID.is_valid(line) or values.counts(), line
        (again,) = parse(line, Path())
        assert again.completion_ids == rollout.completion_ids


@property_settings(300)
@given(content=st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
def test_bytes_that_are_no_log_are_named(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(file))):
        list(read_rollouts(file))


def test_a_model_scores_only_what_it_drew(model, tmp_path):
    """A tool's tokens, missing logprobs and tokens of other weights stay out of the figures."""
    base = audit_json(audit_config(str(model), n=1, max_tokens=6, dtype="float32"))
    assert base["corrections"]["bands"]["strict"]["sequences_outside"] == 0.0
    row = FULL | {"temperature": 1.0, "top_k": None, "top_p": None, "sampling_mask": None, "decimals": None}
    log = write_rows(tmp_path / "log.jsonl", row)
    report = audit_json(audit_config(str(model), str(log), dtype="float32", weight_version=4))
    assert report["tokens"] == 1  # of four: one missing, one a tool's, one of version 3
    assert [w["position"] for w in report["worst"]] == [3]
    report = audit_json(audit_config(str(model), str(log), dtype="float32", weight_version=3))
    assert [w["position"] for w in report["worst"]] == [0]
    with pytest.raises(ValueError, match=r"weight versions \[3, 4\]"):
        audit(audit_config(str(model), str(log), dtype="float32"))


@pytest.mark.full
@pytest.mark.usefixtures("without_knobs")
def test_a_log_without_a_temperature_is_scored_with_the_one_given(model, tmp_path):
    log = SAMPLES / "train_data_step4.jsonl"
    report = audit_json(
        audit_config(str(model), str(log), dtype="float32", sampling_params=SamplingParams(0.5))
    )
    assert report["log_notes"] == [
        "2 of 2 rollouts do not say how they were drawn; temperature 0.5, top_k 0 and top_p 1 were assumed "
        "(--temperature, --top_k, --top_p)."
    ]


NON_FINITE = [
    ("reward", float("nan")),
    ("reward", float("inf")),
    ("advantage", float("nan")),
    ("advantage", [0.5, float("nan"), float("-inf"), 0.5]),
    ("trainer_logprobs", [-0.25, float("nan"), -1.5, float("-inf")]),
]


@pytest.mark.parametrize(("name", "value"), NON_FINITE, ids=str)
def test_what_is_written_is_strict_json_that_says_what_was_read(tmp_path, name, value):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    (tmp_path / "a.jsonl").write_text(json.dumps(FULL | {name: value}) + "\n")
    assert main(["convert", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0
    row = json.loads((tmp_path / "b.jsonl").read_text(), parse_constant=refuse)
    VALID.validate(row)
    ((_, before),), ((_, after),) = (read_rollouts(tmp_path / f"{x}.jsonl") for x in "ab")
    np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert main(["capsule", "make", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "c.zkc")]) == 0
