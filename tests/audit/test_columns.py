"""The two columns of a log: figures, bands, rounding, weight versions and the summary; and large files."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from zerokl.audit.as_json import as_json
from zerokl.audit.figures.bands import BANDS, band_figures
from zerokl.cli import main

from tests.audit.settings import columns_json

SAMPLES = Path(__file__).parent / "log_samples"


def write_log(path: Path, sampler: list[list], trainer: list[list], **fields) -> Path:
    rows = [
        {"prompt_ids": [1], "completion_ids": [2] * len(s), "logprobs": s, "trainer_logprobs": t} | fields
        for s, t in zip(sampler, trainer, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(log: Path, out: Path, *words: str) -> tuple[int, dict]:
    code = main(["audit", str(log), "--out", str(out), *words])
    return code, json.loads((out / "audit.json").read_text())


def test_equal_columns_pass_and_are_doubted(tmp_path, capsys):
    log = write_log(tmp_path / "log.jsonl", [[-1.0, -0.5]], [[-1.0, -0.5]])
    code, report = run(log, tmp_path / "out")
    assert (code, report["tokens"], report["frac_equal"]) == (0, 2, 1.0)
    assert "can be one column written twice" in report["log_notes"][0]
    assert "can be one column written twice" in capsys.readouterr().out


def test_one_bit_fails(tmp_path):
    other = float(np.nextafter(np.float32(-0.5), np.float32(0)))
    log = write_log(tmp_path / "log.jsonl", [[-1.0, -0.5]], [[-1.0, other]])
    code, report = run(log, tmp_path / "out")
    assert (code, report["frac_equal"]) == (1, 0.5)
    (worst,) = report["worst"]
    assert (worst["position"], worst["before"]) == (1, f"{log}, line 1")


def test_small_differences_that_mask_every_sequence_are_said(tmp_path):
    """trl#4772: 0.012 nats a token over 100 tokens is a ratio of 3.3, and every sequence is masked."""
    sampler = [[-1.0] * 100 for _ in range(8)]
    biased = write_log(tmp_path / "biased.jsonl", sampler, [[-0.988] * 100 for _ in range(8)])
    code, report = run(biased, tmp_path / "out")
    assert code == 1
    (note,) = [n for n in report["notes"] if n.startswith("Small differences add up over the 100 tokens")]
    assert "exceeds 3 in 0.00% of the tokens, that of a sequence in 100.00% of the sequences" in note
    # control: differences of the same size that do not add up
    signs = [[-1.0 + 0.012 * (-1) ** i for i in range(100)] for _ in range(8)]
    sound = columns_json(write_log(tmp_path / "sound.jsonl", sampler, signs))
    assert not [n for n in sound["notes"] if n.startswith("Small differences")]


def test_what_truncated_metrics_hide_is_said(tmp_path):
    """trl#5231: the trainer logs ratios after their truncation at 2, where a few are 50."""
    sampler = [[-1.0] * 19 + [-4.0]]
    log = write_log(tmp_path / "log.jsonl", sampler, [[-1.0] * 19 + [-4.0 + math.log(50)]])
    report = columns_json(log)
    row = report["corrections"]["cut"][0]
    assert (row["bound"], row["tokens"]) == (2.0, 0.05)
    assert row["mean_ratio"] == pytest.approx((19 + 50) / 20, rel=1e-5)
    assert row["mean_truncated"] == pytest.approx((19 + 2) / 20, rel=1e-5)
    text = "ratios reach 50, and their mean is 3.45, but 1.05 once they are cut at 2"
    assert any(text in note for note in report["notes"])


def test_the_figures_leave_out_what_was_not_drawn(tmp_path):
    log = write_log(
        tmp_path / "log.jsonl", [[-1.0, None, -3.0, -1.0]], [[-1.5, -1.0, -9.0, None]], mask=[1, 1, 0, 1]
    )
    report = columns_json(log)
    assert (report["tokens"], report["max_abs"]) == (1, 0.5)


@pytest.mark.parametrize(("off", "code"), [(0.9e-4, 0), (1.1e-4, 1)])
def test_rounded_columns_are_compared_within_their_rounding(tmp_path, capsys, off, code):
    rounded = {"decimals": 4, "trainer_decimals": 4}
    log = write_log(tmp_path / "log.jsonl", [[-1.0, -2.0]], [[-1.0, -2.0 - off]], **rounded)
    exit_code, report = run(log, tmp_path / "out")
    assert (exit_code, report["rounding"]["tokens_beyond"]) == (code, code)
    assert ("the log keeps 4 decimals" in capsys.readouterr().out) == (code == 0)


def test_a_model_is_compared_within_the_rounding_too(model, tmp_path):
    from zerokl.engine.rollout.policy import load_policy

    (rollout,) = load_policy(str(model), "float32").sample(["1+2="], n=1, max_tokens=8)
    row = {"prompt_ids": rollout.prompt_ids, "completion_ids": rollout.completion_ids, "temperature": 1.0}
    row |= {"logprobs": [round(x, 4) for x in rollout.logprobs.tolist()]}
    words = ("--model", str(model), "--dtype", "float32")
    for name, more, code in (("exact", {}, 1), ("rounded", {"decimals": 4}, 0)):
        (tmp_path / name).write_text(json.dumps(row | more) + "\n")
        assert run(tmp_path / name, tmp_path / f"out-{name}", *words)[0] == code


def test_weight_versions_have_their_own_figures(tmp_path):
    log = write_log(
        tmp_path / "log.jsonl", [[-1.0] * 4], [[-1.0, -1.0, -1.5, -1.0]], weight_version=[3, 3, 4, 4]
    )
    report = columns_json(log)
    assert [(r["weight_version"], r["tokens"], r["max_abs"]) for r in report["by_version"]] == [
        (3, 2, 0.0),
        (4, 2, 0.5),
    ]
    assert columns_json(log, version=3)["frac_equal"] == 1.0
    assert columns_json(log, version=4)["frac_equal"] == 0.5
    with pytest.raises(ValueError, match="no trainer logprobs of weight version 5"):
        columns_json(log, version=5)


def test_bands_and_cuts_are_those_of_plain_formulas():
    sampler = [np.float32([-1.0, -2.0]), np.float32([-3.0])]
    trainer = [np.float32([-1.0, -1.992]), np.float32([-3.0 + math.log(4.0)])]
    figures = as_json(band_figures(trainer, sampler))
    means = [math.exp(float(trainer[0][1] - sampler[0][1]) / 2), 4.0]
    for name, (low, high) in BANDS.items():
        outside = [not low <= mean <= high for mean in means]
        assert figures["bands"][name]["sequences_outside"] == sum(outside) / 2, name
    assert {row["bound"]: (row["tokens"], row["sequences"]) for row in figures["cut"]} == {
        2.0: (1 / 3, 0.5),
        3.0: (1 / 3, 0.5),
        5.0: (0.0, 0.0),
        10.0: (0.0, 0.0),
    }


@pytest.mark.parametrize(("band", "code"), [("strict", 1), ("1%", 0), ("5%", 0)])
def test_a_band_decides_the_exit_code(tmp_path, capsys, band, code):
    log = write_log(tmp_path / "log.jsonl", [[-1.0] * 4], [[-1.004] * 4])
    assert run(log, tmp_path / "out", "--band", band)[0] == code
    assert f"Band {band} {'does not hold' if code else 'holds'}" in capsys.readouterr().out


def test_a_summary_is_appended_and_shows_markup_as_text(tmp_path):
    log = tmp_path / "a|<b>`.jsonl"
    write_log(log, [[-1.0] * 4], [[-2.5] * 4])
    (tmp_path / "summary.md").write_text("before\n")
    assert run(log, tmp_path / "out", "--band", "5%", "--summary", str(tmp_path / "summary.md"))[0] == 1
    text = (tmp_path / "summary.md").read_text()
    assert text.startswith("before\n### zerokl audit: failed (band 5%)")
    assert "a&#124;&lt;b&gt;&#96;.jsonl" in text
    assert "<b>" not in text
    assert "| sequences outside of strict (0.999 .. 1.002) | 100.00% |" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sampler", "hf"], "is a log, so it is the sampler"),
        (["-n", "0"], "n (0) must be at least 1"),
        (["--format", "tinker"], "holds no trainer logprobs beside the sampler's; name the model"),
        (["--band", "2%"], "audit: band ('2%')"),
    ],
)
def test_bad_words_are_one_line(tmp_path, capsys, words, reason):
    log = SAMPLES / ("tinker.jsonl" if "tinker" in words else "trl.jsonl")
    assert main(["audit", str(log), "--out", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_n_limits_what_is_compared_and_not_what_is_checked(tmp_path, capsys):
    log = write_log(tmp_path / "log.jsonl", [[-1.0]] * 5, [[-1.5]] * 5)
    report = columns_json(log, most=2)
    assert (report["sequences"], report["logged"]) == (2, 5)
    log.write_text(log.read_text() + "{}\n")
    with pytest.raises(ValueError, match="line 6: prompt_ids is missing"):
        columns_json(log, most=2)


PEAK = """
import sys
from pathlib import Path
from zerokl.cli import main
code = main(["audit", sys.argv[1], "--out", sys.argv[2]])
print(code, Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
def test_a_gigabyte_takes_less_than_two(tmp_path):
    rng = np.random.default_rng(0)
    line = {"prompt_ids": list(range(200)), "completion_ids": rng.integers(0, 50_000, 1000).tolist()}
    line["logprobs"] = np.float32(-rng.random(1000)).tolist()
    line["trainer_logprobs"] = np.float32(-rng.random(1000)).tolist()
    text = (json.dumps(line) + "\n").encode()
    with open(tmp_path / "log.jsonl", "wb") as file:
        for _ in range(-(-(2**30) // len(text))):
            file.write(text)
    words = [sys.executable, "-c", PEAK, str(tmp_path / "log.jsonl"), str(tmp_path / "out")]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    code, peak_kib = process.stdout.split()[-2:]
    assert (code, int(peak_kib) < 2 * 2**20) == ("1", True), peak_kib
    assert "of 1,0" in process.stderr, "progress"
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert report["sequences"] < report["logged"]


def test_without_out_a_new_folder_is_made_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = write_log(tmp_path / "steps.jsonl", [[-1.0, -0.5]], [[-1.0, -0.5]])
    for folder in ("audits/steps", "audits/steps-2"):
        assert main(["audit", str(log)]) == 0
        assert f"report {folder}/audit.html" in capsys.readouterr().out
        assert (tmp_path / folder / "audit.json").exists()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    assert main(["audit", "m"]) == 2
    assert "is a LoRA (PEFT) adapter" in capsys.readouterr().err


def test_a_temperature_that_the_log_does_not_say_is_asked_for_or_taken(tmp_path, model, capsys):
    log = write_log(tmp_path / "log.jsonl", [[-1.0, -0.5]], [[-1.0, -0.5]])
    _, report = run(log, tmp_path / "out")
    assert "temperature is missing. --temperature" in report["log_notes"][-1]
    assert "does not say how all of them were drawn" in report["cause"]["text"]
    _, report = run(log, tmp_path / "said", "--temperature", "0.8")
    assert report["assumed"]["distributions"][0]["temperature"] == 0.8
    assert "they were drawn at temperature 0.8" in report["cause"]["text"]
    words = ["audit", str(log), "--model", str(model), "--out", str(tmp_path / "model")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "line 1: temperature is missing; write it into the log, or say with --temperature" in error
    assert error.count("\n") == 1
    assert main([*words, "--temperature", "0.8"]) == 1
    assert "temperature 0.8, top_k 0 and top_p 1 were assumed" in " ".join(capsys.readouterr().out.split())
