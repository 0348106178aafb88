"""atropos: the groups of data_path_to_save_groups, one line each, and the nodes of a ManagedServer.

Every list of a sequence has an entry for each of its tokens. Where a token was not drawn, its mask is -100
and its log-probability 1.0; elsewhere its mask is the token. The trainer's numbers are not in the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..formats import fields
from ..formats.aligned import Aligned
from ..formats.framework import SAMPLER, Framework, Log, having
from ..formats.record import LoggedRollout

_NOT_DRAWN = -100
_COLUMNS = ("tokens", "masks", "scores", "inference_logprobs", "advantages")


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The sequences of a line on which a token was drawn. Raises ValueError, or KeyError with a field."""
    if "masked_tokens" in row:
        columns = [[row["tokens"]], [row["masked_tokens"]], [None], [row.get("logprobs")], [None]]
    else:
        tokens = fields.listed("tokens", row["tokens"], "sequences")
        columns = [row[name] if row.get(name) is not None else [None] * len(tokens) for name in _COLUMNS]
        for name, column in zip(_COLUMNS, columns, strict=True):
            if len(fields.listed(name, column, "one entry for each sequence")) != len(tokens):
                raise ValueError(f"{name} has {len(column)} entries for {len(tokens)} sequences")
    sampling_params = fields.optional_params("generation_params", row.get("generation_params"))
    for index, (ids, mask, score, logprobs, advantage) in enumerate(zip(*columns, strict=True)):
        with fields.named(f"sequence {index}"):
            ids = fields.token_ids("tokens", ids)
            aligned = Aligned("tokens", ids, "masks", _drawn(ids, mask))
            if not aligned.completion_ids:
                continue
            yield LoggedRollout(
                prompt_ids=aligned.prompt_ids,
                completion_ids=aligned.completion_ids,
                logprobs=aligned.logprobs("inference_logprobs", logprobs),
                mask=aligned.mask,
                sampling_params=sampling_params,
                reward=fields.optional_number("scores", score),
                advantage=aligned.advantage("advantages", advantage),
            )


def _drawn(ids: tuple[int, ...], mask: Any) -> list[int]:
    """Which tokens were drawn, as 0 and 1."""
    mask = fields.listed("masks", mask, "tokens and -100")
    if wrong := [m for m, token in zip(mask, ids, strict=False) if m not in (_NOT_DRAWN, token)]:
        raise ValueError(f"masks holds {wrong[0]}, which is neither -100 nor the token there")
    return [int(m != _NOT_DRAWN) for m in mask]


FRAMEWORK = Framework(
    name="atropos",
    title="atropos",
    page="gyms.md#you-use-atropos-do-this",
    source="atropos, `atroposlib/envs/base.py`",
    logs=(
        Log(
            name="atropos",
            file="the file of `data_path_to_save_groups`",
            switch="`data_path_to_save_groups`, and a `ManagedServer`",
            recognises=having("tokens masks scores", "tokens masked_tokens"),
            parse=parse,
            fields={
                "completion_ids": "`tokens`, a list for each sequence of the group",
                "mask": "`masks`: -100 where a token was not drawn, else the token",
                "logprobs": "`inference_logprobs`, not rounded; the 1.0 at tokens that were not drawn is "
                "passed over",
                "sampling_params": "`generation_params`, where it has a temperature; else as given by "
                "`--temperature`",
                "reward advantage": "`scores`, `advantages`",
            },
            marks=("tokens",),
            columns=SAMPLER,
            remedy="let the environment keep inference_logprobs, as a ManagedServer gives them",
        ),
    ),
)
