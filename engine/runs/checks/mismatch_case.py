"""`zerokl verify --case`: the rollouts of a mismatch that a run saved are scored again."""

from pathlib import Path
from typing import Literal

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
from .verify import score, scored_alone


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


def check_case(case: Path, device: torch.device | None = None) -> list[Check]:
    """Score the rollouts of a saved mismatch again, and compare with what sampler and trainer had computed.

    They are scored together, alone and token by token. Raises ValueError when the folder holds no such case.
    """
    dtype, precision, params, rollouts = _read_case(case)
    loaded = load_decoder(case, DTYPES[dtype], device)
    numerics = named_numerics(
        precision.head_dtype,
        precision.cache_dtype,
        precision.tiles,
        precision.router_dtype,
        precision.kv,
        precision.attention,
        precision.leaves,
    )
    decoder = Decoder(loaded.config, loaded.flat.detach(), loaded.layout, numerics)
    pairs = [(r.prompt_ids, r.completion_ids) for r in rollouts]
    longest, highest = max(len(p) + len(c) for p, c in pairs), max(max(p + c) for p, c in pairs)
    if longest > decoder.config.max_positions or highest >= decoder.config.vocab_size:
        raise ValueError(
            f"verify: {case} holds a rollout of {longest} tokens up to id {highest}; its model has "
            f"{decoder.config.max_positions} positions and {decoder.config.vocab_size} tokens"
        )
    ways = {
        "together": score(decoder, pairs, params),
        "alone": scored_alone(decoder, pairs, params),
        "decoded": cached_scores(decoder, pairs, params, 1),
    }
    masks = [torch.tensor(r.mask, dtype=torch.bool) for r in rollouts]
    drawn = {way: [x[mask] for x, mask in zip(scores, masks, strict=True)] for way, scores in ways.items()}
    columns = {
        "sampler": [torch.tensor(r.sampling_logprobs, dtype=torch.float32) for r in rollouts],
        "trainer": [torch.tensor(r.trainer_logprobs, dtype=torch.float32) for r in rollouts],
    }
    return [
        Check.between(f"{side}'s logprobs, scored again {way}", dtype, [(logged, scores)])
        for side, logged in columns.items()
        for way, scores in drawn.items()
    ]


def _read_case(case: Path) -> tuple[str, PrecisionConfig, SamplingParams, list[_CaseRollout]]:
    """The mismatch that a run saved in `case`: dtype, precision, how it was drawn. Raises ValueError."""
    try:
        report = read_json(case / "mismatch.json")
        config, sampling = report["config"], report["config"]["sampling"]
        # A logprob may be infinite, or NaN.
        rows = [{name: json_number(value) for name, value in row.items()} for row in report["rollouts"]]
        if config["dtype"] not in DTYPES:
            raise ValueError(f"dtype {config['dtype']} is not known")
        if not rows:
            raise ValueError("it holds no rollout")
        params = SamplingParams.of(
            sampling["temperature"],
            sampling["top_k"],
            sampling["top_p"],
            sampling.get("min_p", 0.0),
            bias_by_id(sampling.get("logit_bias", {})),
            sampling.get("allowed_token_ids"),
        ).check()
        precision = PrecisionConfig.model_validate(config.get("precision", {}))
        return config["dtype"], precision, params, [_CaseRollout.model_validate(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = one_line(str(error))
        raise ValueError(f"verify: {case} holds no readable mismatch.json ({reason})") from None
