"""The first difference of two logs, or of two files of metrics, of any framework."""

import json
from pathlib import Path

import pytest
import torch
from zerokl.cli import main
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder

SAMPLES = Path(__file__).parents[1] / "log_samples"


def rows(count: int = 4) -> list[dict]:
    return [
        {
            "prompt_ids": [1, 2, 3 + i],
            "completion_ids": [5, 6, 7],
            "logprobs": [-0.5, -1.0, -1.5],
            "trainer_logprobs": [-0.5, -1.0, -1.5],
            "reward": 1.0,
            "step": i // 2,
            "prompt": 0,
            "sample": i % 2,
        }
        for i in range(count)
    ]


def write(path: Path, content: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


@pytest.fixture
def differ(tmp_path, capsys):
    """differ(a, b): exit code and words."""

    def run(a: list[dict], b: list[dict]) -> tuple[int, str]:
        files = [str(write(tmp_path / f"{name}.jsonl", x)) for name, x in (("a", a), ("b", b))]
        code = main(["diff", *files])
        return code, capsys.readouterr().out

    return run


def test_equal_logs_are_equal_in_any_order_of_a_step(differ):
    a = rows()
    assert differ(a, a) == (0, "equal: 4 completions\n")
    assert differ(a, [a[1], a[0], a[3], a[2]])[0] == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prompt_ids": [1, 2, 9]}, "prompt token at position 2: 5 and 9"),
        ({"completion_ids": [5, 6, 9]}, "completion token at position 2: 7 and 9, and every logprob before"),
        ({"logprobs": [-0.5, -1.25, -1.5]}, "sampler's logprob at position 1: -1.0 and -1.25"),
        (
            {"logprobs": [-0.5, -1.25, -1.5], "completion_ids": [5, 6, 9]},
            "sampler's logprob at position 1: -1.0 and -1.25; the first other token follows at position 2",
        ),
        (
            {"completion_ids": [5, 6], "logprobs": [-0.5, -1.0], "trainer_logprobs": [-0.5, -1.0]},
            "completion tokens: 3 and 2, equal as far as both go",
        ),
        ({"trainer_logprobs": [-0.5, -1.0, -1.75]}, "trainer's logprob at position 2: -1.5 and -1.75"),
        ({"reward": 0.5}, "reward 1.0 and 0.5"),
        ({"mask": [1, 1, 0]}, "sampler's logprob at position 2"),
    ],
)
def test_the_first_difference_has_its_step_and_its_place(differ, change, expected):
    a, b = rows(), rows()
    b[2] |= change
    b[3] |= {"reward": 7.0}
    code, words = differ(a, b)
    first, *meaning = words.splitlines()
    assert (code, len(meaning)) == (1, 1)
    assert words.startswith("first difference at step 1: ")
    assert expected in words
    assert "a.jsonl, line 3 and " in first


@pytest.mark.parametrize(
    ("planted", "expected", "meaning"),
    [
        ("seeds", "completion token at position", "compare seeds"),
        ("kernels", "sampler's logprob at position", "Seeds are not the cause"),
    ],
)
def test_one_seed_and_two_curves(tmp_path, capsys, model, planted, expected, meaning):
    """verl#3126: two runs of one seed part. The first difference tells the draw from the numbers."""
    decoder = load_decoder(model, torch.float32)
    if planted == "kernels":
        other = load_decoder(model, torch.bfloat16)
    files = []
    for name in ("a", "b"):
        changed = name == "b"
        sampler = NativeSampler(other if changed and planted == "kernels" else decoder)
        log = []
        for step in range(3):
            seed = 7 if changed and planted == "seeds" and step == 1 else 0
            params = GenerationParams(SamplingParams(), 4, 8, frozenset())
            drawn = complete(sampler, [(5, 6, 7)], params, RngKey(seed, step))
            log += [
                {
                    "prompt_ids": r.prompt_ids,
                    "completion_ids": r.completion_ids,
                    "logprobs": r.logprobs.tolist(),
                    "step": step,
                }
                for r in drawn
            ]
        files.append(str(write(tmp_path / f"{name}.jsonl", log)))
    assert main(["diff", *files]) == 1
    words = " ".join(capsys.readouterr().out.split())
    step = 1 if planted == "seeds" else 0
    assert f"first difference at step {step}: {expected}" in words
    assert meaning in words


def test_a_later_prompt_comes_before_an_earlier_reward(differ):
    a, b = rows(), rows()
    b[0] |= {"reward": 0.5}
    b[1] |= {"prompt_ids": [9]}
    assert "prompt token" in differ(a, b)[1]


def test_a_log_that_ends_early_is_said(differ):
    code, words = differ(rows(4), rows(2))
    assert code == 1
    assert "after 2 completions: " in words
    assert "goes on at " in words


def test_logs_of_two_frameworks_are_compared(tmp_path, capsys):
    """verl's batch, written by our recorder and by the script for its pickles, is one batch."""
    recorded = json.loads((SAMPLES / "verl-recorded.jsonl").read_text().splitlines()[0])
    converted = json.loads((SAMPLES / "skyrl.jsonl").read_text().splitlines()[0])
    assert recorded["completion_ids"] == converted["completion_ids"]
    assert "step" not in converted
    a = write(tmp_path / "a.jsonl", [recorded])
    b = write(tmp_path / "b.jsonl", [converted])
    assert main(["diff", str(a), str(b)]) == 0


def test_folders_of_texts_are_compared_step_by_step(tmp_path, capsys):
    line = json.loads((SAMPLES / "verl.jsonl").read_text().splitlines()[0])
    for folder, last in (("a", "same text"), ("b", "same test")):
        (tmp_path / folder).mkdir()
        for step in (9, 10):
            text = last if step == 10 else "equal"
            write(tmp_path / folder / f"{step}.jsonl", [line | {"step": step, "output": text}])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    words = capsys.readouterr().out
    assert "at step 10: completion at character 7: 'xt' and 'st'" in words


METRICS = [{"step": i, "loss": 0.5 * i, "time/step_s": 1.0 + i, "perf/mfu": 0.1} for i in range(3)]


@pytest.mark.parametrize("form", ["jsonl", "json", "trainer_state", "csv"])
def test_metrics_are_compared_without_those_of_the_clock(tmp_path, capsys, form):
    files = []
    for name, loss in (("a", 1.0), ("b", 1.5), ("c", 1.0)):
        table = [dict(row) for row in METRICS]
        table[2] |= {"loss": loss, "time/step_s": len(files)}
        path = tmp_path / f"{name}.{'json' if form == 'trainer_state' else form}"
        if form == "jsonl":
            write(path, table)
        elif form == "csv":
            lines = [",".join(table[0]), *(",".join(map(str, row.values())) for row in table)]
            path.write_text("\n".join(lines))
        else:
            path.write_text(json.dumps({"log_history": table} if form == "trainer_state" else table))
        files.append(str(path))
    assert main(["diff", files[0], files[2]]) == 0
    assert "equal: 2 metrics of 3 rows" in capsys.readouterr().out
    assert main(["diff", files[0], files[1]]) == 1
    values = "'1.0' and '1.5'" if form == "csv" else "1.0 and 1.5"
    assert f"first difference at step 2: loss {values} (row 3 of both)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ('{"x": 1}', '{"y": 1}', "have no metric in common"),
        # verl's file logger puts them below `data`, and its trackers do not.
        (
            '{"step": 1, "data": {"loss": 1}}',
            '{"step": 1, "loss": 2}',
            "have no metric in common but the step",
        ),
        ('{"x": 1', '{"x": 1}', "line 1: is not JSON"),
        (
            '{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1]}',
            '{"x": 1}',
            "a.jsonl holds rollouts and ",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, a, b, reason):
    for name, content in (("a.jsonl", a), ("b.jsonl", b)):
        (tmp_path / name).write_text(content)
    assert main(["diff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_log_is_not_compared_with_a_run(tmp_path, capsys):
    write(tmp_path / "a.jsonl", rows())
    (tmp_path / "run").mkdir()
    assert main(["diff", str(tmp_path / "a.jsonl"), str(tmp_path / "run")]) == 2
    assert "must both be logs" in capsys.readouterr().err
