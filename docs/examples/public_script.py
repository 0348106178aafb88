"""Reinforcement learning as a short public script does it: python public_script.py RUN [RESUMED_FROM].

The policy is a table: the logits of the next token for each last one. It learns to draw even ids. Three
habits of such scripts are kept, and --mended drops them:

    it draws from the 50 most likely tokens, and scores what it drew with the whole softmax
    a prompt's seed is Python's hash() of a text, which is another one in each process
    a checkpoint holds the weights and leaves the optimizer's moments out

RUN gets rollouts.jsonl, metrics.jsonl and config.json. RESUMED_FROM is a run, which goes on at step 4.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

SEED, STEPS, SAVED_AT, PROMPTS, SAMPLES, MAX_TOKENS = 0, 8, 4, 8, 4, 12
VOCAB, END, TOP_K, LR = 300, 0, 50, 0.02


def first_weights() -> np.ndarray:
    """Random logits, [VOCAB, VOCAB] fp32."""
    return np.random.default_rng(SEED).normal(0.0, 1.5, (VOCAB, VOCAB)).astype(np.float32)


def log_softmax(logits: np.ndarray, top_k: int = 0) -> np.ndarray:
    """Log-probabilities of the top_k largest logits, or of all; -inf for the others. [VOCAB] fp32."""
    if top_k:
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, np.float32(-np.inf))
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def draw(weights: np.ndarray, last: int, rng: np.random.Generator) -> tuple[list[int], list[float]]:
    """A completion, and the log-probability of each token under what it was drawn from."""
    ids, logprobs = [], []
    while len(ids) < MAX_TOKENS and (not ids or last != END):
        logp = log_softmax(weights[last], TOP_K)
        last = int(np.argmax(logp + rng.gumbel(size=VOCAB)))
        ids.append(last)
        logprobs.append(float(logp[last]))
    return ids, logprobs


def seed_of(text: str, mended: bool) -> int:
    """The seed of a prompt's generator."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) if mended else hash(text) & 0x7FFFFFFF


def rollouts(weights: np.ndarray, step: int, mended: bool) -> list[dict]:
    """The lines of a step's log."""
    rows = []
    for prompt in range(PROMPTS):
        rng = np.random.default_rng(seed_of(f"{SEED}/{step}/{prompt}", mended))
        first = 1 + (step * PROMPTS + prompt) % (VOCAB - 1)
        group = [draw(weights, first, rng) for _ in range(SAMPLES)]
        rewards = [sum(i % 2 == 0 for i in ids) / len(ids) for ids, _ in group]
        for sample, (ids, logprobs) in enumerate(group):
            scores = [
                float(log_softmax(weights[last], TOP_K if mended else 0)[i])
                for last, i in zip([first, *ids], ids, strict=False)
            ]
            place = {"step": step, "prompt": prompt, "sample": sample}
            learns = {"reward": rewards[sample], "advantage": rewards[sample] - sum(rewards) / SAMPLES}
            drawn = {"prompt_ids": [first], "completion_ids": ids, "logprobs": logprobs}
            params = {"temperature": 1.0, "top_p": 1.0, "top_k": TOP_K}
            rows.append(place | drawn | {"trainer_logprobs": scores} | params | learns)
    return rows


def gradient(weights: np.ndarray, rows: list[dict], mended: bool) -> np.ndarray:
    """Of the mean over tokens of advantage times log-probability."""
    result, tokens = np.zeros_like(weights), sum(len(row["completion_ids"]) for row in rows)
    for row in rows:
        ids = row["completion_ids"]
        for last, i in zip([*row["prompt_ids"], *ids], ids, strict=False):
            slope = -np.exp(log_softmax(weights[last], TOP_K if mended else 0))
            slope[i] += 1.0
            result[last] += np.float32(row["advantage"] / tokens) * slope
    return result


def main(run: Path, resumed_from: Path | None, mended: bool) -> None:
    """Train for the steps that are left."""
    weights, start = first_weights(), 0
    moments = np.zeros((2, VOCAB, VOCAB), np.float32)
    if resumed_from:
        saved, start = np.load(resumed_from / "checkpoint.npz"), SAVED_AT
        weights = saved["weights"]
        moments = saved["moments"] if mended else moments
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"seed": SEED, "lr": LR}, indent=2))
    with open(run / "rollouts.jsonl", "w") as log, open(run / "metrics.jsonl", "w") as metrics:
        for step in range(start, STEPS):
            if step == SAVED_AT:
                np.savez(run / "checkpoint.npz", weights=weights, **({"moments": moments} if mended else {}))
            rows = rollouts(weights, step, mended)
            log.writelines(json.dumps(row) + "\n" for row in rows)
            g = gradient(weights, rows, mended)
            moments = np.stack([0.9 * moments[0] + 0.1 * g, 0.999 * moments[1] + 0.001 * g * g])
            weights = weights + np.float32(LR) * moments[0] / (np.sqrt(moments[1]) + np.float32(1e-8))
            norm, reward = float(np.sqrt((g * g).sum())), sum(row["reward"] for row in rows) / len(rows)
            metrics.write(json.dumps({"step": step, "reward": reward, "grad_norm": norm, "lr": LR}) + "\n")


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--mended"]
    main(Path(given[0]), Path(given[1]) if len(given) > 1 else None, "--mended" in sys.argv)
