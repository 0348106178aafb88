"""A small model in fp32, the log that it drew, and the ways to plant a fault in it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint_writing import write_checkpoint
from zerokl.model.decoder import Decoder
from zerokl.model.scoring import logprobs, pack

from tests.audit.settings import audit_config, audit_json

WIDTHS = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)
PROMPTS = ((5, 6, 7), (8, 9, 10, 11, 12), (20, 21), (30, 31, 32, 33, 34, 35, 36))
RAW = SamplingParams()
SAMPLING, CUT = SamplingParams(0.8), SamplingParams(0.7, 0, 0.9)


@dataclass(frozen=True)
class Case:
    """A model, its decoder in fp32, and the rollouts that it drew."""

    folder: Path
    decoder: Decoder
    rollouts: list[Rollout]


def altered(rollout: Rollout, **parts: Any) -> Rollout:
    """A rollout of one turn with other prompt_ids, completion_ids or logprobs."""
    names = ("prompt_ids", "completion_ids", "logprobs")
    kept = {name: parts.get(name, getattr(rollout, name)) for name in names}
    r = rollout
    return Rollout.of_one_turn(r.prompt, r.sample, *kept.values(), r.finish, r.weight_version)


def draw(
    decoder: Decoder, params: SamplingParams = SAMPLING, stop: frozenset = frozenset(), each: int = 2
) -> list[Rollout]:
    generation_params = GenerationParams(params, each, 12, stop)
    return complete(NativeSampler(decoder), PROMPTS, generation_params, RngKey(0, 0))


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
    return [x.numpy() for x in logprobs(decoder, batch, params)[0].split(batch.drawn_lengths)]


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
            "min_p": params.min_p,
            "logit_bias": {str(token): bias for token, bias in params.logit_bias},
            "allowed_token_ids": params.allowed_token_ids,
        }
        | more
        for r in rollouts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report_of(
    case: Case, log: Path, dtype: str = "float32", trainer: str = "zerokl", *checkpoints: Path, **more: Any
) -> dict:
    named = {"checkpoints": tuple(map(str, checkpoints))}
    return audit_json(audit_config(str(case.folder), str(log), trainer, dtype, **named, **more))


def pairs_scored(case: Case, pairs) -> list[np.ndarray]:
    fake = [altered(case.rollouts[0], prompt_ids=tuple(p), completion_ids=tuple(c)) for p, c in pairs]
    return scores(case.decoder, fake)


def audit_words(case: Case, log: Path, out: Path) -> list[str]:
    """The command line that audits a log with the case's model."""
    options = {"--model": case.folder, "--dtype": "float32", "--out": out}
    return ["audit", str(log), *(str(word) for option in options.items() for word in option)]
