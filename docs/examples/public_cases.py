"""Small logs of what five public reports describe: python public_cases.py FOLDER.

The policy is that of public_script.py beside this file. Each log is drawn from it, with the report's fault.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
from public_script import END, VOCAB, first_weights, log_softmax

WEIGHTS = first_weights()


def kept(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0) -> np.ndarray:
    """Log-probabilities at a temperature, and after a cut. [VOCAB] fp32."""
    return log_softmax(logits / np.float32(temperature), top_k)


def line(first: int, rng: np.random.Generator, tokens: int, ends: bool, drawn, sampler, trainer) -> dict:
    """A completion drawn from drawn(logits), with both columns. ends: whether the end token may be drawn."""
    ids, last = [], first
    columns = {"logprobs": [], "trainer_logprobs": []}
    while len(ids) < tokens and (not ids or last != END):
        logits = WEIGHTS[last].copy()
        logits[END] = logits[END] + 1.0 if ends else -math.inf
        last = int(np.argmax(drawn(logits) + rng.gumbel(size=VOCAB)))
        ids.append(last)
        for column, score in zip(columns.values(), (sampler, trainer), strict=True):
            column.append(float(score(logits)[last]))
    return {"prompt_ids": [first], "completion_ids": ids} | columns


def log(
    prompts: int = 16,
    samples: int = 4,
    tokens: int = 24,
    ends: bool = True,
    one_stream: bool = False,
    drawn=kept,
    sampler=None,
    trainer=None,
    **params: float,
) -> list[dict]:
    """Groups of completions. one_stream: all of a group have one seed. params: what the log declares."""
    rows = []
    for prompt in range(prompts):
        for sample in range(samples):
            rng = np.random.default_rng((prompt, 0 if one_stream else sample))
            row = line(1 + prompt, rng, tokens, ends, drawn, sampler or drawn, trainer or drawn)
            row["trainer_logprobs"] = [x + 1e-7 * rng.normal() for x in row["trainer_logprobs"]]  # rounding
            declared = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} | params
            rows.append(row | declared | {"step": 0, "prompt": prompt, "sample": sample})
    return rows


def with_signal(rows: list[dict], rewards: list[float | None]) -> list[dict]:
    """The rows with rewards and their groups' advantages, which are all NaN where one reward is missing."""
    numbers = [math.nan if x is None else x for x in rewards]
    for i, row in enumerate(rows):
        group = numbers[i // 4 * 4 : i // 4 * 4 + 4]
        advantage = math.nan if None in rewards else numbers[i] - sum(group) / 4
        row |= {"reward": rewards[i], "advantage": advantage}
    return rows


def cases() -> dict[str, list[dict]]:
    """The log of each case."""
    sure = partial(kept, temperature=0.37)  # 20 tokens then hold as much as in the report
    late = log(tokens=64, ends=False)
    for row in late:
        row["finish_reason"] = "length"
    odd = [float(i % 3 == 0) for i in range(64)]
    return {
        "top-k": log(drawn=partial(sure, top_k=20), trainer=sure, top_k=20),
        "temperature": log(drawn=partial(kept, temperature=0.6), sampler=kept, temperature=0.6),
        "all-cut": with_signal(late, [0.0] * 64),
        "no-reward": with_signal(log(), [None if i == 37 else x for i, x in enumerate(odd)]),
        "clones": with_signal(log(one_stream=True), [odd[i // 4] for i in range(64)]),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in cases().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
