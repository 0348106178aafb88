"""`zerokl verify --case`: the rollouts of a mismatch that a run saved are scored again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from ....files.reading import json_number, one_line, read_json
from ....kernels.sampling_params import SamplingParams, bias_by_id
from ....model.checkpoint import DTYPES, load_decoder
from ....model.decoder import Decoder
from ....model.numerics import named_numerics
from ....model.scoring import cached_scores
from ....verify.invariance import Check
from ...config.precision_section import PrecisionConfig
from .verify import Pair, score, scored_alone


def check_case(case: Path, device: torch.device | None = None) -> list[Check]:
    """Score the rollouts of a saved mismatch again, and compare with what sampler and trainer had computed.

    They are scored together, alone and token by token. Raises ValueError when the folder holds no such case.
    """
    saved = _read_case(case)
    loaded = load_decoder(case, DTYPES[saved.dtype], device)
    decoder = Decoder(
        loaded.config,
        loaded.flat.detach(),
        loaded.layout,
        named_numerics(
            saved.precision.head_dtype,
            saved.precision.cache_dtype,
            saved.precision.tiles,
            saved.precision.router_dtype,
            saved.precision.kv,
        ),
    )
    pairs, sampling_params = saved.pairs, saved.sampling_params
    longest, highest = max(len(p) + len(c) for p, c in pairs), max(max(p + c) for p, c in pairs)
    if longest > decoder.config.max_positions or highest >= decoder.config.vocab_size:
        raise ValueError(
            f"verify: {case} holds a rollout of {longest} tokens up to id {highest}; its model has "
            f"{decoder.config.max_positions} positions and {decoder.config.vocab_size} tokens"
        )
    ways = {
        "together": score(decoder, pairs, sampling_params),
        "alone": scored_alone(decoder, pairs, sampling_params),
        "decoded": cached_scores(decoder, pairs, sampling_params, 1),
    }
    drawn = {
        way: [x[mask] for x, mask in zip(scores, saved.masks, strict=True)] for way, scores in ways.items()
    }
    return [
        Check.between(f"{side}'s logprobs, scored again {way}", saved.dtype, [(logged, scores)])
        for side, logged in saved.logprobs.items()
        for way, scores in drawn.items()
    ]


class _CaseRollout(BaseModel):
    """A rollout of mismatch.json."""

    model_config = ConfigDict(strict=True)

    prompt_ids: list[NonNegativeInt] = Field(min_length=1)
    completion_ids: list[NonNegativeInt] = Field(min_length=1)
    mask: list[Literal[0, 1]]  # which of completion_ids were drawn
    sampling_logprobs: list[float]
    trainer_logprobs: list[float]

    @model_validator(mode="after")
    def _as_long(self) -> "_CaseRollout":
        if len(self.mask) != len(self.completion_ids):
            raise ValueError("must have an entry of the mask for each token of the completion")
        if not sum(self.mask) == len(self.sampling_logprobs) == len(self.trainer_logprobs):
            raise ValueError("must have a logprob of both sides for each drawn token of the completion")
        return self


def _numbers(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout of mismatch.json whose logprobs may be infinite, or NaN."""
    return {name: json_number(value) for name, value in rollout.items()}


@dataclass(frozen=True)
class _Case:
    """A saved mismatch."""

    dtype: str
    precision: PrecisionConfig
    sampling_params: SamplingParams
    pairs: list[Pair]
    masks: list[torch.Tensor]  # which tokens of each completion were drawn, bool
    logprobs: dict[str, list[torch.Tensor]]  # of sampler and trainer, for each pair


def _read_case(case: Path) -> _Case:
    """The mismatch that a run saved in `case`. Raises ValueError."""
    try:
        report = read_json(case / "mismatch.json")
        config = report["config"]
        rollouts = [vars(_CaseRollout.model_validate(_numbers(rollout))) for rollout in report["rollouts"]]
        if config["dtype"] not in DTYPES:
            raise ValueError(f"dtype {config['dtype']} is not known")
        if not rollouts:
            raise ValueError("it holds no rollout")
        sampling = config["sampling"]
        return _Case(
            config["dtype"],
            PrecisionConfig.model_validate(config.get("precision", {})),
            SamplingParams.of(
                sampling["temperature"],
                sampling["top_k"],
                sampling["top_p"],
                sampling.get("min_p", 0.0),
                bias_by_id(sampling.get("logit_bias", {})),
                sampling.get("allowed_token_ids"),
            ).check(),
            [(list(r["prompt_ids"]), list(r["completion_ids"])) for r in rollouts],
            [torch.tensor(r["mask"], dtype=torch.bool) for r in rollouts],
            {
                "sampler": [torch.tensor(r["sampling_logprobs"], dtype=torch.float32) for r in rollouts],
                "trainer": [torch.tensor(r["trainer_logprobs"], dtype=torch.float32) for r in rollouts],
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = one_line(str(error))
        raise ValueError(f"verify: {case} holds no readable mismatch.json ({reason})") from None
