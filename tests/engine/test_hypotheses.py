"""Hypotheses about a log: a planted fault is named, a sound log names none, similar faults are told apart.

Each test draws a small log from a small model in fp32, plants one fault, and audits the log.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from zerokl.cli import main
from zerokl.engine.commands.audit.audit import AuditConfig, audit
from zerokl.engine.commands.audit.hypotheses.registry import HYPOTHESES
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache, CachedContext
from zerokl.model.checkpoint import load_decoder, write_checkpoint
from zerokl.model.decoder import Decoder, PackedContext
from zerokl.model.scoring import logprobs, pack

from tests.random_model import random_model

WIDTHS = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
PROMPTS = ((5, 6, 7), (8, 9, 10, 11, 12), (20, 21), (30, 31, 32, 33, 34, 35, 36))
SAMPLING, CUT = SamplingParams(0.8), SamplingParams(0.7, 0, 0.9)


@dataclass(frozen=True)
class Case:
    """A model, its decoder in fp32, and the rollouts that it drew."""

    folder: Path
    decoder: Decoder
    rollouts: list[Rollout]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    # With weights of this size the context matters more than rounding does.
    return random_model(tmp_path_factory.mktemp("hypotheses"), WIDTHS, sharper=1.2)


@pytest.fixture(scope="module")
def case(model) -> Case:
    return Case(model, decoder := load_decoder(model, torch.float32), draw(decoder))


def draw(
    decoder: Decoder, params: SamplingParams = SAMPLING, stop: frozenset = frozenset(), each: int = 2
) -> list[Rollout]:
    generation_params = GenerationParams(params, each, 12, stop)
    return NativeSampler(decoder).generate(PROMPTS, generation_params, RngKey(0, 0))


def changed_weights(case: Case, folder: Path, change) -> Path:
    """A checkpoint whose weights are `change` of the case's."""
    flat = change(case.decoder.flat.detach().clone())
    write_checkpoint(folder, case.decoder.layout, flat, companions=case.folder)
    return folder


def perturbed(flat: torch.Tensor, size: float = 0.1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return flat * (1 + size * torch.randn(flat.shape, generator=generator))


@torch.no_grad()
def scores(decoder: Decoder, rollouts, params: SamplingParams = SAMPLING) -> list[np.ndarray]:
    batch = pack([r.pair for r in rollouts])
    return [x.numpy() for x in logprobs(decoder, batch, params)[0].split(batch.completion_lengths)]


def relogged(rollouts, logged) -> list[Rollout]:
    return [replace(r, logprobs=np.asarray(x, np.float32)) for r, x in zip(rollouts, logged, strict=True)]


def write(path: Path, rollouts, params: SamplingParams = SAMPLING, **more) -> Path:
    rows = [
        {
            "prompt_ids": r.prompt_ids,
            "completion_ids": r.completion_ids,
            "logprobs": [None if x != x else x for x in r.logprobs.tolist()],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
        }
        | more
        for r in rollouts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report_of(
    case: Case, log: Path, dtype: str = "float32", trainer: str = "zerokl", *checkpoints: Path
) -> dict:
    cfg = AuditConfig(str(case.folder), str(log), trainer, dtype, checkpoints=tuple(map(str, checkpoints)))
    return audit(cfg).report


# --- a sound log names none ---


@pytest.mark.parametrize("trainer", ["zerokl", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_log_names_none(case, tmp_path, trainer, dtype):
    drawn = draw(load_decoder(case.folder, getattr(torch, dtype)), CUT)
    other = changed_weights(case, tmp_path / "other", perturbed)
    report = report_of(case, write(tmp_path / "log.jsonl", drawn, CUT), dtype, trainer, other)
    assert report["hypotheses"]["found"] is None
    assert report["log_findings"] == []
    assert (report["frac_equal"] == 1.0) == (trainer == "zerokl")
    assert report["cause"]["kind"] == ("equal" if trainer == "zerokl" else "rounding")


def test_a_fault_that_no_row_knows_fits_none(case, tmp_path):
    noise = np.random.default_rng(0)
    logged = [np.minimum(r.logprobs + noise.normal(0, 0.3, len(r.logprobs)), 0.0) for r in case.rollouts]
    report = report_of(case, write(tmp_path / "log.jsonl", relogged(case.rollouts, logged)))
    assert report["hypotheses"]["found"] is None
    assert report["hypotheses"]["tried"] == len(HYPOTHESES)
    assert report["cause"]["kind"] == "unknown"
    assert f"none of {len(HYPOTHESES)} hypotheses fits" in report["cause"]["text"]


# --- distributions ---

RAW = SamplingParams()
DISTRIBUTIONS = {
    "raw logits": (CUT, RAW),
    "temperature not applied": (CUT, SamplingParams(1.0, 0, 0.9)),
    "top-p and top-k not renormalised": (CUT, SamplingParams(0.7, 0, 1.0)),
    "temperature applied otherwise": (SamplingParams(0.7), SamplingParams(0.49)),
    "another temperature": (SamplingParams(1.0), SamplingParams(0.6)),
    "another top-p or top-k": (SamplingParams(1.0), SamplingParams(1.0, 20)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_distribution_is_named(case, tmp_path, name, dtype):
    said, real = DISTRIBUTIONS[name]
    drawn = draw(case.decoder, real if name.startswith("another") else said)
    log = write(tmp_path / "log.jsonl", relogged(drawn, scores(case.decoder, drawn, real)), said)
    found = report_of(case, log, dtype)["hypotheses"]["found"]
    assert found["name"] == name
    assert found["explained"] > 0.6 * found["distance"] > 0


def test_the_side_at_fault_is_named(case, tmp_path):
    """The sampler's numbers are of the top-p set; the trainer's own column is over the whole vocabulary."""
    drawn = draw(case.decoder, CUT)
    log = write(tmp_path / "log.jsonl", drawn, CUT)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    whole = scores(case.decoder, drawn, SamplingParams(0.7))
    rows = [row | {"trainer_logprobs": x.tolist()} for row, x in zip(rows, whole, strict=True)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = report_of(case, log)
    assert report["cause"]["kind"] == "equal"
    assert report["trainer_column"]["found"]["name"] == "top-p and top-k not renormalised"
    assert any("The log's trainer column differs" in note for note in report["notes"])


def test_the_checkpoints_generation_config_is_named(case, tmp_path):
    folder = changed_weights(case, tmp_path / "model", lambda flat: flat)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    drawn = draw(case.decoder, SamplingParams(0.6, 20, 0.95))
    report = report_of(replace(case, folder=folder), write(tmp_path / "log.jsonl", drawn, RAW))
    assert report["hypotheses"]["found"]["name"] == "generation_config.json"
    assert "top_k 20" in report["cause"]["text"]


# --- weights ---


def test_the_version_of_the_weights_is_named(case, tmp_path):
    """Checkpoints of a run, step by step; the log was drawn with step 2."""
    steps = [
        changed_weights(case, tmp_path / "run" / f"step-{i}", lambda flat, i=i: perturbed(flat, 0.05, i))
        for i in (1, 2, 10)
    ]
    drawn = draw(load_decoder(steps[1], torch.float32))
    report = report_of(case, write(tmp_path / "log.jsonl", drawn), "float32", "zerokl", tmp_path / "run")
    found = report["hypotheses"]["found"]
    assert (found["name"], found["left"]) == ("another checkpoint", 0.0)
    assert str(steps[1]) in found["what"]


@torch.no_grad()
def after_stale_prefix(old: Decoder, new: Decoder, rollout: Rollout) -> np.ndarray:
    """The logprobs of a completion after a prompt whose keys and values are of older weights."""
    prompt, completion = map(list, rollout.pair)
    cache = BlockCache(new.config, 4, torch.float32)
    blocks, first = [cache.allocate(4)], len(prompt) - 1
    old.hidden(torch.tensor(prompt[:first]), CachedContext(cache, [first], [0], blocks))
    rest = torch.tensor([prompt[-1], *completion[:-1]])
    h = new.hidden(rest, CachedContext(cache, [len(rest)], [first], blocks))
    return linear_logprob(h, new.logits_weight(), torch.tensor(completion), SAMPLING)[0].numpy()


@pytest.mark.full
def test_a_stale_prefix_cache_is_told_from_older_weights(case, tmp_path):
    folder = changed_weights(case, tmp_path / "old", lambda flat: perturbed(flat, 0.5))
    old = load_decoder(folder, torch.float32)
    stale = [after_stale_prefix(old, case.decoder, r) for r in case.rollouts]
    for name, logged in (("stale prefix cache", stale), ("another checkpoint", scores(old, case.rollouts))):
        log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
        report = report_of(case, log, "float32", "zerokl", folder)
        assert report["hypotheses"]["found"]["name"] == name


@pytest.mark.full
def test_a_merge_in_bf16_is_named(case, tmp_path):
    """An adapter of rank 2 on every projection: the trainer adds it in fp32, the sampler merges in bf16."""

    def merged(flat, dtype):
        flat = flat.bfloat16().float()
        generator = torch.Generator().manual_seed(1)
        for name, w in case.decoder.layout.checkpoint_views(flat).items():
            if "proj" in name:
                a = torch.randn(2, w.shape[1], generator=generator)
                b = torch.randn(w.shape[0], 2, generator=generator)
                w.copy_((w + 0.01 * (b @ a)).to(dtype))
        return flat

    trainer = changed_weights(case, tmp_path / "fp32", lambda flat: merged(flat, torch.float32))
    sampler = changed_weights(case, tmp_path / "bf16", lambda flat: merged(flat, torch.bfloat16))
    log = write(tmp_path / "log.jsonl", draw(load_decoder(sampler, torch.float32)))
    found = report_of(replace(case, folder=trainer), log)["hypotheses"]["found"]
    assert found["name"] == "weights rounded"
    assert "bfloat16" in found["what"]
    assert "Merge adapters" in found["remedy"]


def test_old_weights_in_some_lines_are_counted(case, tmp_path):
    """An update in the middle of a batch: the first half of the lines is of the old weights."""
    folder = changed_weights(case, tmp_path / "old", perturbed)
    old = scores(load_decoder(folder, torch.float32), case.rollouts)
    half = len(case.rollouts) // 2
    logged = [*old[:half], *(r.logprobs for r in case.rollouts[half:])]
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
    found = report_of(case, log, "float32", "zerokl", folder)["hypotheses"]["found"]
    assert (found["name"], found["lines"], found["lines_tried"]) == ("another checkpoint", half, 2 * half)


@pytest.mark.full
def test_quantised_weights_are_told_from_rounded_ones(case, tmp_path):
    def fp8(flat):
        for name, w in case.decoder.layout.checkpoint_views(flat).items():
            if "proj" in name:
                scale = w.abs().max() / 448
                w.copy_((w / scale).to(torch.float8_e4m3fn).float() * scale)
        return flat

    sampler = changed_weights(case, tmp_path / "fp8", fp8)
    log = write(tmp_path / "log.jsonl", draw(load_decoder(sampler, torch.float32)))
    assert report_of(case, log)["hypotheses"]["found"]["name"] == "weights quantised"


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_told_from_rounded_weights(case, tmp_path, dtype):
    drawn = draw(load_decoder(case.folder, getattr(torch, dtype)))
    found = report_of(case, write(tmp_path / "log.jsonl", drawn))["hypotheses"]["found"]
    assert (found["name"], found["what"]) == ("another dtype", f"the sampler computed in {dtype}")


# --- tokens and lines ---


def pairs_scored(case: Case, pairs) -> list[np.ndarray]:
    fake = [replace(case.rollouts[0], prompt_ids=tuple(p), completion_ids=tuple(c)) for p, c in pairs]
    return scores(case.decoder, fake)


def rolled(items: list) -> list:
    return [*items[2:], *items[:2]]  # two completions a prompt


@pytest.mark.full
def test_lines_that_were_mixed_up_are_told_apart(case, tmp_path):
    prompts, completions, logged = zip(*((*r.pair, r.logprobs) for r in case.rollouts), strict=True)
    swapped_prompts = [replace(r, prompt_ids=p) for r, p in zip(case.rollouts, rolled(prompts), strict=True)]
    swapped_completions = [
        replace(r, completion_ids=c) for r, c in zip(case.rollouts, rolled(completions), strict=True)
    ]
    for name, rollouts in (
        ("another line's prompt", swapped_prompts),
        ("another line's completion", swapped_completions),
        ("another line's numbers", relogged(case.rollouts, rolled(logged))),
    ):
        found = report_of(case, write(tmp_path / "log.jsonl", rollouts))["hypotheses"]["found"]
        assert found["name"] == name


def test_one_line_with_another_prompt_is_enough(case, tmp_path):
    rollouts = [replace(case.rollouts[0], prompt_ids=case.rollouts[4].prompt_ids), *case.rollouts[1:]]
    found = report_of(case, write(tmp_path / "log.jsonl", rollouts))["hypotheses"]["found"]
    assert (found["name"], found["lines"]) == ("another line's prompt", 1)


@torch.no_grad()
def at_positions(case: Case, gaps) -> list[np.ndarray]:
    """The logprobs with a gap between the positions of prompt and completion."""
    out = []
    for r, gap in zip(case.rollouts, gaps, strict=True):
        batch = pack([r.pair])
        context = PackedContext(batch.lengths, case.decoder.config)
        context.positions[len(r.prompt_ids) :] += gap
        h = case.decoder.hidden(batch.ids, context)[batch.rows]
        out.append(linear_logprob(h, case.decoder.logits_weight(), batch.targets, SAMPLING)[0].numpy())
    return out


@pytest.mark.full
def test_positions_and_padding_are_told_apart(case, tmp_path):
    longest = max(map(len, PROMPTS))
    counted = at_positions(case, [longest - len(r.prompt_ids) for r in case.rollouts])
    again = at_positions(case, [-len(r.prompt_ids) for r in case.rollouts])
    read = pairs_scored(
        case, [((0,) * (longest - len(r.prompt_ids)) + r.prompt_ids, r.completion_ids) for r in case.rollouts]
    )
    for name, logged in (
        ("positions shifted by padding", counted),
        ("padding is read", read),
        ("other positions", again),
    ):
        log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
        found = report_of(case, log)["hypotheses"]["found"]
        assert found["name"] == name


def test_a_missing_special_token_is_named(case, tmp_path):
    logged = pairs_scored(case, [((*r.prompt_ids, 1), r.completion_ids) for r in case.rollouts])
    found = report_of(case, write(tmp_path / "log.jsonl", relogged(case.rollouts, logged)))["hypotheses"][
        "found"
    ]
    assert (found["name"], "<eos>" in found["what"]) == ("a special token", True)


def test_an_end_token_that_is_left_out_is_named(case, tmp_path):
    """Nothing is wrong with the log-probabilities: the exit code stays 0, and the report says it."""
    params = SamplingParams(2.0)
    drawn = draw(case.decoder, params, frozenset(range(1, 20, 2)), 6)
    drawn = [r for r in drawn if len(r.completion_ids) > 1]
    ended = [
        replace(r, completion_ids=(*r.completion_ids[:-1], 1)) if r.finish == "stop" else r for r in drawn
    ]
    ended = relogged(ended, scores(case.decoder, ended, params))
    cut = [
        replace(r, completion_ids=r.completion_ids[:-1], logprobs=r.logprobs[:-1])
        if r.finish == "stop"
        else r
        for r in ended
    ]
    for rollouts, names in ((ended, []), (cut, ["end token left out"])):
        report = report_of(case, write(tmp_path / "log.jsonl", rollouts, params))
        assert [x["name"] for x in report["log_findings"]] == names
        assert report["frac_equal"] == 1.0


def test_turns_that_were_retokenised_are_named(case, tmp_path):
    """The next turn begins with the same text as the turn before, in other ids."""
    first = replace(case.rollouts[0], completion_ids=(*case.rollouts[0].completion_ids[:-1], 5))
    first = relogged([first], scores(case.decoder, [first]))[0]
    again = (*first.prompt_ids, *first.completion_ids)

    def turns(prompt) -> dict:
        after = replace(case.rollouts[0], prompt_ids=tuple(prompt))
        after = relogged([after], scores(case.decoder, [after]))[0]
        rows = [
            {"prompt_ids": r.prompt_ids, "completion_ids": r.completion_ids, "logprobs": r.logprobs.tolist()}
            for r in (first, after)
        ]
        return {"temperature": SAMPLING.temperature, "turns": rows}

    for text, names in (("sound", []), ("drift", ["retokenised turns"])):
        # The character tokenizer has one id for each text, so one with two ids for it stands in.
        log = tmp_path / f"{text}.jsonl"
        log.write_text(json.dumps(turns(again)) + "\n")
        folder = case.folder if text == "sound" else two_ids_for_one_text(case, tmp_path / "model")
        if text == "drift":
            log.write_text(json.dumps(turns((*again[:-1], 63))) + "\n")
        report = report_of(replace(case, folder=folder), log)
        assert [x["name"] for x in report["log_findings"]] == names
        assert report["frac_equal"] == 1.0


def two_ids_for_one_text(case: Case, folder: Path) -> Path:
    """The case's model with a tokenizer that decodes ids 5 and 63 to the same text."""
    changed_weights(case, folder, lambda flat: flat)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {
                "type": "Replace",
                "pattern": {"String": character(tokenizer, 63)},
                "content": character(tokenizer, 5),
            },
            tokenizer["decoder"],
        ],
    }
    path.write_text(json.dumps(tokenizer))
    return folder


def character(tokenizer: dict, token: int) -> str:
    return next(text for text, i in tokenizer["model"]["vocab"].items() if i == token)


def test_a_retokenised_prompt_is_named(case, tmp_path):
    """The log has the id that was drawn; the sampler was given the text, which encodes to another id."""
    folder = two_ids_for_one_text(case, tmp_path / "model")
    rollouts = [replace(r, prompt_ids=(*r.prompt_ids[:-1], 63)) for r in case.rollouts]
    read = pairs_scored(case, [((*r.prompt_ids[:-1], 5), r.completion_ids) for r in rollouts])
    report = report_of(replace(case, folder=folder), write(tmp_path / "log.jsonl", relogged(rollouts, read)))
    assert report["hypotheses"]["found"]["name"] == "retokenised text"


def test_doubled_lines_are_named(case, tmp_path, capsys):
    doubled = [r for pair in zip(case.rollouts[::2], case.rollouts[::2], strict=True) for r in pair]
    log = write(tmp_path / "log.jsonl", doubled)
    words = [
        "audit",
        str(log),
        "--model",
        str(case.folder),
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(words) == 0, "the log-probabilities are right"
    assert "lines doubled within a group: 4 completions" in " ".join(capsys.readouterr().out.split())
    assert "lines doubled within a group" in (tmp_path / "o" / "audit.html").read_text()


# --- numbers ---


def shifted(x: np.ndarray, by: int) -> np.ndarray:
    return np.roll(x, by)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rounded log-probabilities", lambda x: np.round(x.astype(np.float64), 2)),
        ("rounded log-probabilities", lambda x: torch.from_numpy(x).bfloat16().float().numpy()),
        ("logarithms to another base", lambda x: x / np.log(10)),
        ("means in place of tokens", lambda x: np.full_like(x, x.mean())),
        ("off by one", lambda x: shifted(x, 1)),
        ("off by one", lambda x: shifted(x, -1)),
    ],
)
def test_other_numbers_are_named(case, tmp_path, name, change):
    logged = [change(r.logprobs) for r in case.rollouts]
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
    assert report_of(case, log)["hypotheses"]["found"]["name"] == name


@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_off_by_one_is_named_with_and_without_a_model(case, tmp_path, by):
    mask = [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    logged = [np.where(np.roll(mask, by), np.roll(r.logprobs, by), np.nan) for r in case.rollouts]
    rollouts = relogged(case.rollouts, logged)
    log = write(tmp_path / "log.jsonl", rollouts, mask=np.roll(mask, by).tolist())
    assert report_of(case, log)["hypotheses"]["found"]["name"] == "mask off by one"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [
        row | {"trainer_logprobs": r.logprobs.tolist()} for row, r in zip(rows, case.rollouts, strict=True)
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["audit", str(log), "--out", str(tmp_path / "out")]) == 1
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["cause"]["kind"] == "mask off by one"


def test_zeros_for_tokens_that_were_not_drawn_are_named(case, tmp_path):
    logged = [np.where(np.arange(12) % 5 == 3, 0.0, r.logprobs) for r in case.rollouts]
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, logged))
    assert report_of(case, log)["hypotheses"]["found"]["name"] == "zeros for tokens not drawn"


# --- the command ---


def test_the_report_says_hypothesis_nats_and_remedy(case, tmp_path, capsys):
    log = write(tmp_path / "log.jsonl", relogged(case.rollouts, scores(case.decoder, case.rollouts, RAW)))
    words = [
        "audit",
        str(log),
        "--model",
        str(case.folder),
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(words) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Likely cause: raw logits:" in out
    assert "nats by which a token differs" in out
    assert "processed_logprobs" in out
    page = (tmp_path / "o" / "audit.html").read_text()
    assert "raw logits (fits)" in page


@pytest.mark.parametrize(
    ("change", "reason"),
    [("no/such/model", "no/such/model"), ("other", "has another")],
)
def test_a_checkpoint_that_cannot_have_drawn_the_log_is_refused(case, tmp_path, capsys, change, reason):
    log = write(tmp_path / "log.jsonl", case.rollouts)
    if change == "other":
        change = str(random_model(tmp_path, WIDTHS | {"num_hidden_layers": 1}))
    words = ["audit", str(log), "--model", str(case.folder), "--checkpoints", change]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
