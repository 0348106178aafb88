"""Draws logs of two columns from random distributions, sound and with faults of no file of audit/faults/.

python benchmarks/audit_cases/columns.py --root R [--only NAME]

Nothing here is of zerokl but the audit: a token's distribution is a random one of the two tokens before it.
The last column of the output is what the audit says; who reads it judges it.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

VOCAB, SCALE = 400, 3.0
Row = dict
Change = Callable[[Row], None]


def logits(first: int, second: int, weights: int) -> np.ndarray:
    """The logits [VOCAB] after two tokens. weights: another number is another model."""
    return np.random.default_rng((first + 1, second + 1, weights)).normal(0, SCALE, VOCAB)


def log_softmax(z: np.ndarray) -> np.ndarray:
    """log p of logits z [VOCAB]."""
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def kept(z: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """z [VOCAB] with -inf for what top-k, and then top-p, leave out."""
    z = z.copy()
    if top_k:
        z[z < np.sort(z)[-top_k]] = -np.inf
    if top_p < 1.0:
        order = np.argsort(-z)
        p = np.exp(log_softmax(z)[order])
        z[order[np.cumsum(p) - p >= top_p]] = -np.inf
    return z


def completion(
    rng: np.random.Generator,
    prompt: list[int],
    length: int,
    T: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    noise: float = 0.01,
    trainer_noise: float = 0.0,
    weights: int = 0,
    heavy: float = 0.0,
    trainer_T: float = 0.0,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
    greedy: bool = False,
    last_ids: int = 0,
) -> tuple[list[int], list[float], list[float]]:
    """Ids, and the columns of sampler and trainer.

    noise, trainer_noise: of the logits. weights, change: of the trainer's logits. heavy: the share of places
    with 50 times the noise. last_ids: tokens below it end a completion.
    """
    ids, sampler, trainer = list(prompt), [], []
    for _ in range(length):
        z = logits(ids[-2], ids[-1], 0)
        other = logits(ids[-2], ids[-1], weights)
        z_sampler = z + rng.normal(0, noise, VOCAB)
        if heavy and rng.random() < heavy:
            z_sampler = z_sampler + rng.normal(0, 0.5, VOCAB)
        other = other + (rng.normal(0, trainer_noise, VOCAB) if trainer_noise else 0)
        other = change(other) if change else other
        s = log_softmax(kept(z_sampler / T, top_p, top_k))
        t = log_softmax(kept(other / (trainer_T or T), top_p, top_k))
        p = np.exp(s)
        token = int(np.argmax(s)) if greedy else int(rng.choice(VOCAB, p=p / p.sum()))
        ids.append(token)
        sampler.append(float(np.float32(s[token])))
        trainer.append(float(np.float32(t[token])))
        if token < last_ids:
            break
    return ids[len(prompt) :], sampler, trainer


def log(
    rng: np.random.Generator,
    groups: int = 8,
    each: int = 4,
    most: int = 40,
    length: int = 0,
    row: Change | None = None,
    **drawn: object,
) -> list[Row]:
    """The lines of a log. length: of every completion; 0 draws each. row: what is done to every line."""
    rows = []
    for group in range(groups):
        prompt = [int(x) for x in rng.integers(0, VOCAB, 6)]
        for sample in range(each):
            tokens = length or int(rng.integers(3, most))
            ids, sampler, trainer = completion(rng, prompt, tokens, **drawn)
            line = {"step": group // 4, "prompt": group, "sample": sample, "prompt_ids": prompt}
            line |= {"completion_ids": ids, "logprobs": sampler}
            line["trainer_logprobs"] = [x if np.isfinite(x) else "-Infinity" for x in trainer]
            line["temperature"] = 0.0 if drawn.get("greedy") else drawn.get("T", 1.0)
            line |= {name: drawn[name] for name in ("top_p", "top_k") if name in drawn}
            if row:
                row(line)
            rows.append(line)
    return rows


def each(column: str, change: Callable[[float, int], float]) -> Change:
    """A change of every number of a column; it is given the completion's length, too."""

    def row(line: Row) -> None:
        line[column] = [change(x, len(line[column])) for x in line[column]]

    return row


def bf16(x: float) -> float:
    """x, rounded to bfloat16 (half away from zero)."""
    bits = np.float32(x).view(np.uint32) + np.uint32(0x8000)
    return float((bits & np.uint32(0xFFFF0000)).view(np.float32))


def _ended(line: Row) -> None:
    line["finish_reason"] = "stop" if len(line["completion_ids"]) < 15 else "length"


def _rewarded(line: Row) -> None:
    line |= {"reward": line["sample"] % 2, "advantage": 0.5 if line["sample"] % 2 else -0.5}


SOUND = {
    "heavy tails, as of experts": dict(heavy=0.02),
    "temperature 0.3": dict(T=0.3),
    "temperature 1.5": dict(T=1.5),
    "greedy": dict(greedy=True, each=1, groups=24),
    "a coarse sampler": dict(noise=0.06),
    "answers of one token": dict(length=1, groups=40),
    "all cut by their caps": dict(row=lambda line: line.update(finish_reason="length")),
    "caps and ends": dict(length=15, last_ids=30, row=_ended),
    "one completion a prompt": dict(groups=32, each=1),
    "one prompt alone": dict(groups=1, each=32),
    "top-p on both sides": dict(top_p=0.95, noise=0.003),
    "top-k on both sides": dict(top_k=20, noise=0.003),
    "noise on both sides": dict(trainer_noise=0.01),
    "little noise": dict(noise=1e-6),
    "equal rewards": dict(row=lambda line: line.update(reward=1.0, advantage=0.0)),
    "rewards of a group": dict(row=_rewarded),
    "long completions": dict(groups=3, each=2, length=600),
    "few tokens": dict(groups=2, each=2, length=12),
}
FAULTS = {
    "trainer clipped at -2": dict(row=each("trainer_logprobs", lambda x, n: max(x, -2.0))),
    "trainer with smoothed labels": dict(
        row=each("trainer_logprobs", lambda x, n: float(np.log(0.9 * np.exp(x) + 0.1 / VOCAB)))
    ),
    "trainer over the length": dict(row=each("trainer_logprobs", lambda x, n: x / n)),
    "sampler's probabilities in bf16": dict(
        row=each("logprobs", lambda x, n: float(np.log(bf16(np.exp(x)))))
    ),
    "trainer's logits capped at 4": dict(change=lambda z: 4 * np.tanh(z / 4)),
    "trainer with dropout": dict(trainer_noise=0.3),
    "trainer's last number 0": dict(row=lambda line: line["trainer_logprobs"].__setitem__(-1, 0.0)),
    "sampler's numbers from back to front": dict(row=lambda line: line["logprobs"].reverse()),
    "trainer with the temperature twice": dict(T=0.7, trainer_T=0.49),
    "trainer without the last 8 tokens": dict(
        change=lambda z: np.where(np.arange(VOCAB) < VOCAB - 8, z, -1e9)
    ),
    "trainer of other weights": dict(weights=1),
    "sampler less log 2": dict(row=each("logprobs", lambda x, n: x - 0.6931)),
}


def main() -> None:
    from zerokl.audit.as_json import as_json
    from zerokl.audit.columns import audit_columns

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("runs/audit-cases"))
    parser.add_argument("--only", default="", help="a part of a name")
    words = parser.parse_args()
    folder = words.root / "columns"
    folder.mkdir(parents=True, exist_ok=True)
    for kind, table in (("sound", SOUND), ("fault", FAULTS)):
        for i, (name, settings) in enumerate(table.items()):
            if words.only not in name:
                continue
            path = folder / f"{kind}-{i}.jsonl"
            rows = log(np.random.default_rng((3, i, kind == "fault")), **settings)
            path.write_text("".join(json.dumps(x) + "\n" for x in rows))
            report = as_json(audit_columns(path))
            text = " ".join(report["cause"]["text"].split())
            print(f"{kind}  {name}: {report['outcome']['words']}; {text[:160]}", flush=True)


if __name__ == "__main__":
    main()
