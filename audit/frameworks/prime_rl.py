"""prime-rl and verifiers: the record of rollouts, and the trainer's token exports.

rollouts/step_N/.../traces.jsonl has one line for each episode (or for each trace). A trace is a graph of
messages, and every path from its root to a leaf is a sequence. A message has its tokens, a mask of those that
were drawn, and the logprobs of the drawn ones alone. The record rounds them to four decimals.

token_exports/step_N/rank_N.jsonl has one line for each sequence, with both columns. Every list has an entry
for each token of the sequence, the prompt's included. All digits are there, and a number that is not finite
is null. The file says nothing about the temperature.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...kernels.sampling_params import SamplingParams
from ...verify.mismatch import mean
from ..figures.gates import Columns, Gate
from ..formats import fields
from ..formats.aligned import Aligned
from ..formats.framework import SAMPLER, Framework, Log, having
from ..formats.record import LoggedRollout

# What the record keeps, unless its writer was asked for every digit.
_DECIMALS = 4
# Of a token export.
_SCHEMA = 1


def recognises_trace(row: dict[str, Any]) -> bool:
    """Whether a line is an episode or a trace."""
    return isinstance(row.get("traces"), list) or (isinstance(row.get("nodes"), list) and "task" in row)


def parse_trace(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The paths on which a token was drawn. Raises ValueError, or KeyError with a field."""
    traces = fields.objects("traces", row["traces"], "traces") if "traces" in row else [row]
    for index, trace in enumerate(traces):
        with fields.named(f"traces[{index}]"):
            yield from _paths(trace, row)


def _paths(trace: dict[str, Any], episode: dict[str, Any]) -> Iterator[LoggedRollout]:
    nodes = fields.objects("nodes", trace["nodes"], "messages")
    for index, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and not (type(parent) is int and 0 <= parent < index):
            raise ValueError(f"nodes[{index}].parent ({parent!r}) must be the index of an earlier message")
    parents = {node.get("parent") for node in nodes}
    seen: set[int] = set()
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = _path(nodes, leaf)
        # Paths that part late share their beginning; its tokens count once.
        rollout = _sequence(nodes, path, seen, trace, episode)
        seen |= set(path)
        if rollout is not None:
            yield rollout


def _path(nodes: list[dict[str, Any]], leaf: int) -> list[int]:
    """The messages from the root to a leaf."""
    path = [leaf]
    while (parent := nodes[path[-1]].get("parent")) is not None:
        path.append(parent)
    return path[::-1]


def _sequence(
    nodes: list[dict[str, Any]],
    path: list[int],
    seen: set[int],
    trace: dict[str, Any],
    episode: dict[str, Any],
) -> LoggedRollout | None:
    ids: list[int] = []
    masks: list[np.ndarray] = []
    new: list[np.ndarray] = []
    columns: dict[str, list[np.ndarray]] = {"logprobs": [], "trainer_logprobs": []}
    for index in path:
        node = nodes[index]
        place = f"nodes[{index}]"
        empty = not (node.get("token_ids") or node.get("mask"))
        tokens = () if empty else fields.token_ids(f"{place}.token_ids", node.get("token_ids"))
        drawn = fields.mask(f"{place}.mask", node.get("mask") or [0] * len(tokens), len(tokens))
        for name, column in columns.items():
            column.append(_spread(f"{place}.{name}", node.get(name), drawn))
        ids += tokens
        masks.append(drawn)
        new.append(drawn & (index not in seen))
    mask = np.concatenate(new)
    if not mask.any():
        return None
    start = int(np.concatenate(masks).argmax())
    if start == 0:
        raise ValueError("the first token of a path was drawn, so there is no prompt")
    sampler, trainer = (np.concatenate(column)[start:] for column in columns.values())
    sampler, trainer = (np.where(mask[start:], x, np.float32(np.nan)) for x in (sampler, trainer))
    work = fields.mapping("run.work", fields.mapping("run", episode.get("run")).get("work"))
    return LoggedRollout(
        prompt_ids=tuple(ids[:start]),
        completion_ids=tuple(ids[start:]),
        logprobs=sampler,
        trainer_logprobs=None if np.isnan(trainer).all() else trainer,
        mask=mask[start:],
        sampling_params=_params(trace, path),
        weight_span=_span(work.get("policy")),
        decimals=_decimals(sampler),
        trainer_decimals=_decimals(trainer),
        reward=_reward(trace),
        step=fields.optional_integer("run.work.step", work.get("step")),
        prompt=fields.label("group.id", fields.mapping("group", episode.get("group")).get("id")),
        sample=fields.label("id", trace.get("id")),
    )


def _spread(name: str, values: Any, mask: np.ndarray) -> np.ndarray:
    """The logprobs of the drawn tokens at their places, [tokens] fp32; NaN elsewhere."""
    result = np.full(len(mask), np.nan, np.float32)
    if values:
        drawn = int(mask.sum())
        if len(fields.listed(name, values, "numbers")) != drawn:
            raise ValueError(f"{name} has {len(values)} entries, and the mask beside it {drawn} drawn tokens")
        result[mask] = fields.logprobs(name, values, drawn)
    return result


def _decimals(logprobs: np.ndarray) -> int | None:
    """Four, where no value has more. The record's writer can be asked for every digit."""
    known = logprobs[~np.isnan(logprobs)].astype(np.float64)
    rounded = np.round(known, _DECIMALS).astype(np.float32)
    return _DECIMALS if len(known) and (rounded == known.astype(np.float32)).all() else None


def _params(trace: dict[str, Any], path: list[int]) -> SamplingParams | None:
    """The sampling parameters of a path's calls, where all have the same."""
    distinct = set()
    for call in fields.listed("calls", trace.get("calls") or [], "calls"):
        call = fields.mapping("calls", call)
        if call.get("node") not in path:
            continue
        sampling = fields.mapping("sampling", call.get("sampling"))
        if sampling.get("temperature") is None:
            return None
        distinct.add(fields.sampling_params(sampling))
    return distinct.pop() if len(distinct) == 1 else None


def _span(policy: Any) -> tuple[int, int] | None:
    if not isinstance(policy, dict):
        return None
    start = fields.integer("run.work.policy.start", policy.get("start"))
    return start, fields.integer("run.work.policy.end", policy.get("end"))


def _reward(trace: dict[str, Any]) -> float | None:
    """The weighted sum of a trace's rewards."""
    rewards = [fields.mapping("rewards", r) for r in fields.mapping("rewards", trace.get("rewards")).values()]
    values = [
        fields.number("score", r["score"]) * fields.number("weight", r.get("weight"), 1.0)
        for r in rewards
        if r
    ]
    return sum(values) if values else None


def parse_export(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The sequence of a line; none where no token was drawn. Raises ValueError, or KeyError with a field."""
    schema = fields.integer("schema_version", row.get("schema_version"), _SCHEMA)
    if schema != _SCHEMA:
        raise ValueError(
            f"schema_version ({schema}) must be {_SCHEMA}, the one that zerokl knows; write the lines in "
            "zerokl's own format (docs/log-format.md)"
        )
    ids = fields.token_ids("token_ids", row["token_ids"])
    aligned = Aligned("token_ids", ids, "loss_mask", _trained(row))
    if not aligned.completion_ids:
        return
    yield LoggedRollout(
        prompt_ids=aligned.prompt_ids,
        completion_ids=aligned.completion_ids,
        logprobs=aligned.logprobs("inference_logprobs", row["inference_logprobs"]),
        trainer_logprobs=aligned.logprobs("trainer_logprobs", row.get("trainer_logprobs")),
        mask=aligned.mask,
        advantage=aligned.advantage("advantages", row.get("advantages")),
        step=fields.optional_integer("step", row.get("step")),
    )


def _trained(row: dict[str, Any]) -> list:
    """The loss mask without the tokens of a frozen model: the policy's components have no weight on them.

    A weight of null is the default: 1 of `rl_weights`, 0 of `ref_kl_weights`.
    """
    mask = fields.listed("loss_mask", row["loss_mask"], "0 and 1")
    nulls = [None] * len(mask)
    weights = [row.get(name) or nulls for name in ("rl_weights", "ref_kl_weights")]
    if any(not isinstance(w, list) or len(w) != len(mask) for w in weights):
        raise ValueError(f"rl_weights and ref_kl_weights must have an entry for each of {len(mask)} tokens")
    return [m if rl != 0 or ref not in (0, None) else 0 for m, rl, ref in zip(mask, *weights, strict=True)]


def _k3(c: Columns) -> float:
    size = np.abs(c.d)
    with np.errstate(invalid="ignore"):
        return mean(np.where(np.isinf(size), math.inf, np.exp(c.d) - 1 - c.d))


_TRACES = Log(
    name="prime-rl",
    file="`rollouts/step_N/KIND/all/traces.jsonl`",
    switch="nothing: it writes `traces.jsonl`",
    recognises=recognises_trace,
    parse=parse_trace,
    fields={
        "completion_ids": "`token_ids` of the messages, from the root of a trace to each leaf; tokens that "
        "paths share count once",
        "mask": "`mask`; users and tools are not drawn",
        "logprobs decimals": "`logprobs`, **rounded to four decimals**",
        "trainer_logprobs trainer_decimals": "`trainer_logprobs`, where the trace has them; else none",
        "sampling_params": "`calls[].sampling`, where all calls of a path have the same; else as given by "
        "`--temperature`",
        "weight_span": "`run.work.policy`: the oldest and the newest of the episode",
        "step prompt sample reward": "`run.work.step`, `group.id`, the trace's `id`, the weighted sum of "
        "`rewards`",
    },
    marks=("traces", "nodes"),
    columns=f"{SAMPLER}, four decimals",
)
_EXPORTS = Log(
    name="prime-rl-tokens",
    file="`token_exports/step_N/rank_N.jsonl`",
    switch="`trainer.enable_token_export = true`",
    recognises=having("token_ids loss_mask inference_logprobs"),
    parse=parse_export,
    fields={
        "completion_ids": "`token_ids`; the prompt ends at the first drawn token",
        "mask": "`loss_mask`, without the tokens of a frozen model: those on which `rl_weights` and "
        "`ref_kl_weights` are 0",
        "logprobs": "`inference_logprobs`, not rounded",
        "trainer_logprobs": "`trainer_logprobs`, not rounded: of the step's forward, before its update",
        "step advantage": "`step`, `advantages`",
    },
    marks=("token_ids",),
)
FRAMEWORK = Framework(
    name="prime-rl",
    title="prime-rl",
    page="prime-rl.md",
    source="verifiers 0.4.0 (`verifiers/v1/trace.py`) and prime-rl "
    "(`src/prime_rl/trainer/rl/token_export.py`)",
    logs=(_EXPORTS, _TRACES),
    gate=Gate(
        _k3,
        "mismatch_kl",
        "the mean of exp(d) - 1 - d over tokens",
        0.01,
        may_reach=True,
        source="prime-rl's integration test of reverse-text",
    ),
)
