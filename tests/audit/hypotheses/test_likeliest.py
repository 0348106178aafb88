"""Wrong numbers that only a model tells, an 8-bit cache, and what a checkpoint's defaults leave.

transformers computes what is planted, so a plant shares no code with the hypothesis.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from zerokl.audit.engines.generation_config import generation_defaults, not_obeyed
from zerokl.audit.engines.hf import cache_argument
from zerokl.kernels.sampling_params import SamplingParams

from tests.audit.hypotheses.planted import SAMPLING, changed_weights, draw, relogged, report_of, write


@torch.no_grad()
def logp_rows(folder, rollout, temperature: float, dtype=torch.float32, cache=None) -> torch.Tensor:
    """log-probabilities of the whole vocabulary at each place of the completion, [C, V] fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prompt, completion = rollout.pair
    ids = torch.tensor([[*prompt, *completion[:-1]]])
    memory = cache_argument(model, cache(model.config)) if cache else {}
    logits = model(ids, use_cache=bool(memory), **memory).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.float() / temperature, -1)


def of_tokens(rows: torch.Tensor, rollout) -> np.ndarray:
    return rows.gather(1, torch.tensor(rollout.pair[1]).unsqueeze(1)).squeeze(1).numpy()


@pytest.mark.full
@pytest.mark.parametrize(
    ("temperature", "words"), [(0.8, "the likeliest token's"), (1.0, "of the raw logits")]
)
def test_another_number_at_every_third_token_is_named(case, tmp_path, temperature, words):
    drawn = draw(case.decoder, SAMPLING, each=4)
    logged = []
    for x in drawn:
        rows = logp_rows(case.folder, x, temperature)
        wrong = rows.amax(1).numpy() if temperature != 1.0 else of_tokens(rows, x)
        logged.append(np.where(np.arange(len(x.logprobs)) % 3 == 1, wrong, x.logprobs))
    found = report_of(case, write(tmp_path / "log.jsonl", relogged(drawn, logged)))["hypotheses"]["found"]
    assert found["name"] == "wrong numbers at some places"
    assert found["what"] == f"in every 3rd token, from place 1 on the sampler's number is {words}"


class EightBits(DynamicCache):
    """A cache in fp8 e4m3."""

    def update(self, keys, values, *args, **kwargs):
        rounded = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
        return super().update(*rounded, *args, **kwargs)


@pytest.mark.full
def test_a_cache_in_fp8_is_named_through_the_rounding_of_bf16(case, tmp_path):
    """The log is of a bf16 engine. The control is the same engine with a plain cache: that is rounding."""
    drawn, found = draw(case.decoder, SAMPLING, each=6), {}
    for name, cache in (("fp8", lambda config: EightBits(config=config)), ("plain", None)):
        logged = [of_tokens(logp_rows(case.folder, x, 0.8, torch.bfloat16, cache), x) for x in drawn]
        report = report_of(case, write(tmp_path / f"{name}.jsonl", relogged(drawn, logged)))
        found[name] = report["cause"]["kind"], report["outcome"]["kind"]
    assert found == {"fp8": ("keys and values rounded", "differs"), "plain": ("rounding", "sound")}


@pytest.mark.full
def test_the_part_of_the_defaults_that_a_request_left_is_named(case, tmp_path):
    """The request said its temperature; top_k came from the file."""
    folder = changed_weights(case, tmp_path / "model", lambda flat: flat)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 12}')
    log = write(tmp_path / "log.jsonl", draw(case.decoder, SamplingParams(0.8, 12), each=4), SAMPLING)
    found = report_of(replace(case, folder=folder), log)["hypotheses"]["found"]
    assert found["what"] == "the sampler took top_k 12 from the checkpoint's generation_config.json"


def test_an_audit_that_draws_says_which_defaults_it_does_not_obey(tmp_path):
    assert not_obeyed(tmp_path, "hf") == []
    values = {"top_k": 50, "top_p": 1.0, "temperature": "0.7", "repetition_penalty": 1.05, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert generation_defaults(tmp_path) == {"top_k": 50, "repetition_penalty": 1.05}
    (note,) = not_obeyed(tmp_path, "hf")
    assert "asks for top_k 50, repetition_penalty 1.05. hf drew here without it" in note
