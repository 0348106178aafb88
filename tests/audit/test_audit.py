"""The audit: figures equal plain formulas, planted differences are named, logs of any framework are read."""

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from zerokl.audit.as_json import as_json
from zerokl.audit.audit import audit
from zerokl.audit.conclusion.conclude import concluded
from zerokl.audit.conclusion.outcome import NO_TOLERANCES, Kind
from zerokl.audit.conclusion.verdict import verdict
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.audit.engines.hf import HfEngine
from zerokl.audit.figures.measure import measure
from zerokl.audit.logs.scan import scan_log
from zerokl.cli import main
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.operations import operation_names
from zerokl.verify.operation_outputs import compare_traces, first_divergence

from tests.audit.settings import audit_config, audit_json

PAIR = ((5, 6, 7, 8, 9), (10, 11, 12, 13, 14, 15))
SAMPLING = SamplingParams()
LAYERS = 2


def _words(model: Path, out: Path, *more: str) -> list[str]:
    defaults = {"-n": "6", "--max-tokens": "8", "--out": str(out)}
    options = [word for option in defaults.items() if option[0] not in more for word in option]
    return ["audit", str(model), *options, *more]


# --- the figures ---


def _clustered(x: np.ndarray, lengths: tuple[int, ...]) -> float:
    """The larger of the error of independent tokens and of the error with sequences as clusters."""
    sums = [(part - x.mean()).sum() for part in np.split(x, np.cumsum(lengths)[:-1])]
    count = len(lengths)
    clustered = math.sqrt(sum(s * s for s in sums) * count / (count - 1)) / len(x)
    return max(clustered, x.std(ddof=1) / math.sqrt(len(x)))


def test_figures_are_their_formulas():
    rng = np.random.default_rng(0)
    sampler = [-rng.random(n).astype(np.float32) for n in (5, 1, 9)]
    trainer = [s + rng.normal(0, 0.1, len(s)).astype(np.float32) for s in sampler]
    m = as_json(measure(trainer, sampler))
    d = np.concatenate(trainer).astype(float) - np.concatenate(sampler)
    r = np.exp(d)
    for name, x in (("k1", -d), ("k2", d * d / 2), ("k3", r - 1 - d)):
        assert m[name]["value"] == pytest.approx(x.mean())
        assert m[name]["standard_error"] == pytest.approx(_clustered(x, (5, 1, 9)))
    assert m["mean_ratio"]["value"] == pytest.approx(r.mean())
    assert m["mean_ratio"]["standard_error"] == pytest.approx(_clustered(r, (5, 1, 9)))
    # The three stakes, each with a third of the capital.
    assert m["mean_ratio"]["evidence"] == pytest.approx(
        max(np.log1p(c * (r - 1)).sum() for c in (0.05, 0.3, 1.0)) - math.log(3)
    )
    assert m["perplexity_sampler"] == pytest.approx(math.exp(-np.concatenate(sampler).mean()))
    sequence = np.exp([(t.astype(float) - s).sum() for t, s in zip(trainer, sampler, strict=True)])
    assert m["sequence"]["chi2"] == pytest.approx(((sequence - 1) ** 2).mean())
    assert m["sequence"]["ess"] == pytest.approx(sequence.sum() ** 2 / (3 * (sequence**2).sum()))
    assert [(row["from"], row["to"], row["tokens"]) for row in m["by_position"]] == [
        (0, 0, 3),
        (1, 1, 2),
        (2, 3, 4),
        (4, 7, 5),
        (8, 15, 1),
    ]
    assert sum(m["ratio_histogram"]["tokens"]) == 15


# --- first divergence ---


def test_every_operation_is_recorded_by_both(model):
    names = operation_names(ModelConfig.from_file(model))
    for engine in (
        ZeroklEngine(model, torch.float32),
        HfEngine(model, torch.float32, "eager"),
        HfEngine(model, torch.float32, "sdpa"),
    ):
        trace = engine.trace(PAIR, SAMPLING)
        assert list(trace) == names, engine.name
        assert {len(x) for name, x in trace.items() if name != "logprob"} == {10}
        assert trace["logprob"].numel() == 6


def test_ours_and_transformers_mean_the_same_by_each_name(model):
    """In fp32 the two are close at every operation; a wrong mapping of names would be far off."""
    differences = compare_traces(
        ZeroklEngine(model, torch.float32).trace(PAIR, SAMPLING),
        HfEngine(model, torch.float32, "eager").trace(PAIR, SAMPLING),
    )
    assert max(d.relative for d in differences) < 1e-5


def _plant_epsilon(model: torch.nn.Module, layer: int, rng: random.Random) -> str:
    norms = [("input_layernorm", "input_norm"), ("post_attention_layernorm", "post_norm")]
    name, op = rng.choice(norms)
    getattr(model.model.layers[layer], name).variance_epsilon *= 10
    return op


class _HalfSiLU(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.bfloat16()).to(x.dtype)


def _plant_silu(model: torch.nn.Module, layer: int, rng: random.Random) -> str:
    model.model.layers[layer].mlp.act_fn = _HalfSiLU()
    return "silu_mul"


def _plant_bit(model: torch.nn.Module, layer: int, rng: random.Random) -> str:
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    op = rng.choice([*attention, "gate_proj", "up_proj", "down_proj"])
    block = model.model.layers[layer]
    weight = getattr(block.self_attn if op in attention else block.mlp, op).weight
    row, column = rng.randrange(weight.shape[0]), rng.randrange(weight.shape[1])
    with torch.no_grad():
        # A bit of the mantissa that is large enough to survive the rounding of a sum.
        weight.view(torch.int32)[row, column] ^= 1 << rng.randrange(14, 23)
    return op


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plant", [_plant_epsilon, _plant_silu, _plant_bit])
def test_a_planted_difference_is_found_where_it_is(model, plant, seed):
    rng = random.Random(seed)
    clean, changed = HfEngine(model, torch.float32, "sdpa"), HfEngine(model, torch.float32, "sdpa")
    assert first_divergence(clean.trace(PAIR, SAMPLING), changed.trace(PAIR, SAMPLING)) is None
    layer = rng.randrange(LAYERS)
    op = plant(changed.model, layer, rng)
    difference = first_divergence(clean.trace(PAIR, SAMPLING), changed.trace(PAIR, SAMPLING))
    assert difference.op == f"layers.{layer}.{op}"


# --- the command ---


def test_native_against_zerokl_is_equal(model, tmp_path, capsys):
    assert main(_words(model, tmp_path / "out")) == 0
    assert "same log-probability, bit for bit" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert (report["frac_equal"], report["k3"]["value"], report["first_divergence"]) == (1.0, 0.0, None)
    assert report["own_invariance"]["zerokl"]["decode against prefill"]["unequal"] == 0
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "bit for bit" in page
    assert "Equal to the bit" in page


def test_transformers_against_zerokl_differs_and_names_the_operation(model, tmp_path, capsys):
    words = _words(model, tmp_path / "out", "--sampler", "hf", "--max-abs", "1")
    assert main(words) == 0, "within the tolerance"
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert report["frac_equal"] < 1.0
    assert report["first_divergence"]["op"] in operation_names(ModelConfig.from_file(model))
    assert f"Bits first part at {report['first_divergence']['op']}" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(_words(model, tmp_path / "two", "--sampler", "hf")) == 1
    assert main(_words(model, tmp_path / "three", "--sampler", "hf", "--max-k3", "0")) == 1


def test_a_sampler_in_another_dtype_parts_at_the_embedding(model):
    report = audit_json(
        audit_config(str(model), "native", "zerokl", "float32", sampler_dtype="bfloat16", n=4, max_tokens=8)
    )
    assert report["first_divergence"]["op"] == "embed"
    assert report["first_divergence"]["max_ulp"] is None


def test_logits_in_another_dtype_on_one_side_are_named(model):
    settings = audit_config(
        str(model), "native", "zerokl", "bfloat16", head_dtype="float32", n=4, max_tokens=8
    )
    assert audit(settings).outcome.kind is Kind.EQUAL
    report = audit_json(settings.model_copy(update={"sampler_head_dtype": "bfloat16"}))
    assert (report["first_divergence"]["op"], report["first_divergence"]["max_ulp"]) == ("logits", None)
    assert (report["head_dtype"], report["sampler_head_dtype"]) == ("float32", "bfloat16")


def test_transformers_logits_can_be_wider_than_the_rest(model):
    trace = HfEngine(model, torch.bfloat16, "sdpa", torch.float32).trace(PAIR, SAMPLING)
    assert (trace["norm"].dtype, trace["logits"].dtype) == (torch.bfloat16, torch.float32)
    ours = ZeroklEngine(model, torch.bfloat16, torch.float32).trace(PAIR, SAMPLING)
    logits = compare_traces({"logits": ours["logits"]}, {"logits": trace["logits"]})[0]
    assert logits.relative < 0.05


# --- logs ---


def _write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_log(model: Path, path: Path, **changes: object) -> list[dict]:
    """Write a log of four rollouts, drawn in bf16, with `changes` in every row; returns its rows."""
    generation_params = GenerationParams(SamplingParams(0.7, 0, 0.9), 2, 8, frozenset({1}))
    rollouts = complete(
        NativeSampler(load_decoder(model, torch.bfloat16)),
        [(5, 6, 7), (8, 9)],
        generation_params,
        RngKey(0, 0),
    )
    rows = [
        {
            "prompt_ids": r.prompt_ids,
            "completion_ids": r.completion_ids,
            "logprobs": r.logprobs.tolist(),
            "temperature": 0.7,
            "top_p": 0.9,
        }
        | changes
        for r in rollouts
    ]
    _write_rows(path, rows)
    return rows


def test_a_log_is_audited(model, tmp_path):
    _write_log(model, tmp_path / "log.jsonl")
    assert main(_words(model, tmp_path / "out", "--sampler", str(tmp_path / "log.jsonl"))) == 0
    _write_log(model, tmp_path / "wrong.jsonl", temperature=1.0)
    assert main(_words(model, tmp_path / "wrong", "--sampler", str(tmp_path / "wrong.jsonl"))) == 1


def test_what_other_frameworks_write_is_read(model, tmp_path, capsys):
    """A byte order mark, null for what is not set, -1 for all tokens.

    Strings may also hold characters that end a line elsewhere, but not in JSON.
    """
    rows = [
        row | {"top_k": -1, "weight_version": None, "text": "a\u2028b\x85"}
        for row in _write_log(model, tmp_path / "log.jsonl")
    ]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "log.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    assert main(_words(model, tmp_path / "out", "--sampler", str(tmp_path / "log.jsonl"))) == 0
    log = scan_log(tmp_path / "log.jsonl", 10**6, format="zerokl").rollouts
    assert [(d.top_k, r.weight_version) for r, d in log] == [(0, 0)] * len(rows)


def test_all_of_a_log_is_read_and_what_is_left_out_is_said(model, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    rows = _write_log(model, log)
    words = _words(model, tmp_path / "out", "--sampler", str(log), "-n", "2")
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + "garbage\n")
    assert main(words) == 2
    assert f"line {len(rows) + 1}: " in capsys.readouterr().err
    _write_rows(log, rows)
    assert main(words) == 0
    assert f"2 of {len(rows)}" in capsys.readouterr().out


def test_transformers_draws_from_the_whole_distribution(model, tmp_path):
    """A checkpoint may ask for repetition penalties and the like, which no trainer computes."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    generation_params = GenerationParams(SAMPLING, 1, 12, frozenset())
    (plain,) = HfEngine(folder, torch.float32).generate([[3, 4, 5]], generation_params, 0)
    penalties = {"repetition_penalty": 3.0, "min_p": 0.2, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(penalties))
    (rollout,) = HfEngine(folder, torch.float32).generate([[3, 4, 5]], generation_params, 0)
    assert rollout.completion_ids == plain.completion_ids
    assert rollout.logprobs.tobytes() == plain.logprobs.tobytes()


def test_two_engines_of_one_name_are_told_apart(model):
    report = audit_json(audit_config(str(model), "hf", "hf", sampler_dtype="float32", n=4, max_tokens=8))
    assert set(report["own_invariance"]) == {"hf (sampler)", "hf (trainer)"}
    ways = {way for ways in report["own_invariance"].values() for way in ways}
    assert ways >= {"drawn against scored", "decode against prefill"}
    assert "drawn against scored" not in report["own_invariance"]["hf (trainer)"]


def test_a_log_of_several_weight_versions_must_be_told_which(model, tmp_path, capsys):
    rows = _write_log(model, tmp_path / "log.jsonl")
    older = [row | {"weight_version": 3} for row in rows]
    newer = [row | {"weight_version": 4, "temperature": 1.0} for row in rows]
    _write_rows(tmp_path / "log.jsonl", older + newer)
    words = ("--sampler", str(tmp_path / "log.jsonl"))
    assert main(_words(model, tmp_path / "out", *words)) == 2
    assert "weight versions [3, 4]; choose the model's with --weight_version" in capsys.readouterr().err
    assert main(_words(model, tmp_path / "out", *words, "--weight-version", "5")) == 2
    assert "holds no rollout of weight version 5" in capsys.readouterr().err
    assert main(_words(model, tmp_path / "three", *words, "--weight-version", "3")) == 0
    assert main(_words(model, tmp_path / "four", *words, "--weight-version", "4")) == 1
    assert json.loads((tmp_path / "four" / "audit.json").read_text())["weight_version"] == 4


@pytest.mark.full
def test_rollouts_of_older_weights_are_told_apart_from_another_operation(model, tmp_path):
    """With a stale cache or stale weights the logged logprobs differ, while every operation agrees."""
    rows = _write_log(model, tmp_path / "log.jsonl")
    rows[0]["logprobs"][3] += -0.25
    _write_rows(tmp_path / "log.jsonl", rows)
    (worst,) = audit_json(audit_config(str(model), str(tmp_path / "log.jsonl"), "zerokl"))["worst"]
    assert (worst["sequence"], worst["position"]) == (0, 3)
    report = audit(audit_config(str(model), "native", "zerokl", n=4, max_tokens=8))
    figures = replace(report.figures, frac_equal=0.5)  # as a sampler with a stale cache would leave it
    report = concluded(replace(report, figures=figures), NO_TOLERANCES)
    assert "comes from batching, from the cache, or from other weights" in verdict(report)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": [-1.0]}, "logprobs has 1 entries for a completion of"),
        ({"logprobs": ["x"]}, "logprobs[0] ('x') must be a number"),
        ({"logprobs": {"1": -1.0}}, "logprobs ({'1': -1.0}) must be a list of numbers"),
        ({"logprobs": [True] * 8}, "logprobs[0] (True) must be a number"),
        ({"prompt_ids": []}, "prompt_ids ([]) must be a list of token ids that is not empty"),
        ({"prompt_ids": [1, 2.5]}, "prompt_ids ([1, 2.5]) must be a list"),
        ({"completion_ids": [999999] * 8}, "completion_ids holds 999999, outside the model's vocabulary"),
        ({"temperature": None}, "temperature (None) must be a number"),
        ({"temperature": True}, "temperature (True) must be a number"),
        ({"temperature": "0.7"}, "temperature ('0.7') must be a number"),
        ({"top_k": 2.7}, "top_k (2.7) must be a whole number"),
        ({"weight_version": "a"}, "weight_version ('a') must be a number"),
        ({"prompt_ids": [3] * 600}, "tokens, more than the model's context (512)"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_a_malformed_line_is_named(model, tmp_path, capsys, change, reason):
    rows = _write_log(model, tmp_path / "log.jsonl")
    rows[2] |= change
    _write_rows(tmp_path / "log.jsonl", rows)
    assert main(_words(model, tmp_path / "out", "--sampler", str(tmp_path / "log.jsonl"))) == 2
    error = capsys.readouterr().err
    assert "log.jsonl, line 3: " in error
    assert reason in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1"),
        ("[1]", "line 1: is no JSON object"),
        ("{}", "prompt_ids is missing"),
        ("\n", "holds no"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path, text, reason):
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(ValueError, match=reason):
        scan_log(tmp_path / "log.jsonl", 100, format="zerokl")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--sampler", "nothing"], "sampler nothing is no file; choose native, hf"),
        (["--sampler", "vllm-exact"], "vllm-exact cannot be audited: only train draws with it"),
        (["--sampler", "vllm-stock"], 'write "vllm-exact" (vLLM\'s own model in'),
        (["--trainer", "vllm-exact"], "it scores nothing; choose zerokl, hf"),
        (["--trainer", "vllm-zerokl"], "its forward is zerokl; choose zerokl, hf"),
        (["--trainer", "native"], "its forward is zerokl; choose zerokl, hf"),
        (["--trainer", "trl"], "trainer trl is not known; choose zerokl, hf"),
        (["--own", "4"], "audit: --own is called --batch_invariance now"),
        (["--full"], "audit: --full is called --full_vocab now"),
        (["--dtype", "fp8"], "audit: dtype ('fp8')"),
        (["-n", "0"], "n (0) must be at least 1"),
        (["--weight-version", "3"], "chooses among the rollouts of a log"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
        (["--max-tokens", "0"], "max_tokens (0)"),
        (["--temperature", "-1"], "temperature"),
        (
            ["--sampler", "vllm", "--trainer", "vllm", "--sampler-dtype", "float32"],
            "two engines in one process",
        ),
        (["--head-dtype", "fp8"], "dtype fp8 is not known"),
        (["--nope", "1"], "Unknown option: --nope"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(model, tmp_path, capsys, words, reason):
    assert main(_words(model, tmp_path / "out", *words)) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_audit_is_not_overwritten(model, tmp_path, capsys):
    assert main(_words(model, tmp_path / "out")) == 0
    assert main(_words(model, tmp_path / "out")) == 2
    assert "already holds an audit" in capsys.readouterr().err


def test_prompts_go_through_the_chat_template_where_asked(model, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(model, folder)
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "prompts.txt").write_text("1+2\n")
    words = ["audit", str(folder), "-n", "1", "--max-tokens", "2", "--prompts", str(tmp_path / "prompts.txt")]
    for chat in (["--chat"], []):
        out = tmp_path / f"out{len(chat)}"
        assert main([*words, *chat, "--out", str(out)]) == 0
        (sequence,) = json.loads((out / "audit.json").read_text())["token_texts"]["sequences"]
        assert sequence["prompt"] == ("<1+2>" if chat else "1+2")
