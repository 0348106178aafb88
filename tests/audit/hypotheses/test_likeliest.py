"""Wrong numbers that only a model tells, an 8-bit cache, and what a checkpoint's defaults leave.

transformers computes what is planted, so a plant shares no code with the hypothesis.
"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from zerokl.audit.engines.generation_config import generation_defaults, not_obeyed
from zerokl.audit.engines.hf import cache_argument

from tests.audit.hypotheses.planted import SAMPLING, draw, relogged, report_of, write


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


class EightBits(DynamicCache):
    """A cache in fp8 e4m3."""

    def update(self, keys, values, *args, **kwargs):
        rounded = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
        return super().update(*rounded, *args, **kwargs)


@pytest.mark.full
def test_a_cache_in_fp8_is_named_through_the_rounding_of_bf16(case, tmp_path):
    """The log is of a bf16 engine. The control is the same engine with a plain cache: that is rounding."""
    drawn, named = draw(case.decoder, SAMPLING, each=6), {}
    for name, cache in (("fp8", lambda config: EightBits(config=config)), ("plain", None)):
        logged = [of_tokens(logp_rows(case.folder, x, 0.8, torch.bfloat16, cache), x) for x in drawn]
        report = report_of(case, write(tmp_path / f"{name}.jsonl", relogged(drawn, logged)))
        named[name] = report["cause"]["kind"], report["outcome"]["kind"]
    assert named == {"fp8": ("keys and values rounded", "differs"), "plain": ("rounding", "sound")}


def test_an_audit_that_draws_says_which_defaults_it_does_not_obey(tmp_path):
    assert not_obeyed(tmp_path, "hf") == []
    values = {"top_k": 50, "top_p": 1.0, "temperature": "0.7", "repetition_penalty": 1.05, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert generation_defaults(tmp_path) == {"top_k": 50, "repetition_penalty": 1.05}
    (note,) = not_obeyed(tmp_path, "hf")
    assert "asks for top_k 50, repetition_penalty 1.05. hf drew here without it" in note
