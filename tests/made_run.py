"""Folders of runs that nothing was trained for: as large, as strange and as wrong as a test wants them."""

import json
import math
from pathlib import Path
from typing import Any

from zerokl.engine.config.config_file import load_config, to_toml
from zerokl.engine.tasks.tokenizer import character_tokenizer
from zerokl.files.writing import hash_json
from zerokl.verify.ledger import LEDGER, Head, Ledger, Line

# Would run, or open a window, wherever text becomes markup or code.
HOSTILE = (
    "</script><img src=x onerror=\"window.hacked=1\"><svg onload='hacked=1'>${hacked=1}\u202e\x00\x1b[31m"
)


def made_run(path: Path, *, steps: int = 4, P: int = 2, G: int = 4, **options: Any) -> Path:
    """A run folder with metrics, rollouts, ledger, tokenizer and summary.

    steps are done of `planned` (default: all). Options: settings (of the configuration), text (of completion
    `i` of all, a function), problems (that the steps draw from), k3 (of each step), fork (from this step on
    the ledger is another), tokens (of a completion), token (an added token, which every completion begins
    with).
    """
    settings, planned = options.get("settings", {}), options.get("planned", steps)
    config = load_config(None, None, {"steps": planned, "prompts": P, "num_generations": G} | settings)
    path.mkdir(parents=True)
    (path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    tokenizer = character_tokenizer()
    if token := options.get("token"):
        tokenizer.add_tokens([token])
    tokenizer.save_pretrained(path / "base")
    write_lines(
        path / "metrics.jsonl",
        [metrics_line(step, steps, P * G, options.get("k3", 0.0)) for step in range(steps)],
    )
    write_rollouts(path, range(steps), P, G, options, len(tokenizer) - 1 if token else 3)
    binding = {key: value for key, value in settings.items() if key != "exact"}
    chain = _write_ledger(path / LEDGER, steps, config.seed, binding, options.get("fork"))
    if planned == steps:
        summary = {"fingerprint": chain, "weights": "0" * 64, "steps": steps, "seconds": 12.5}
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    with open(file, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def metrics_line(step: int, steps: int, completions: int, k3: float = 0.0) -> dict[str, Any]:
    """The metrics of one of `steps` steps."""
    share = step / max(1, steps - 1)
    metrics = {
        "step": step,
        "tokens": 4 * completions,
        "reward/mean": 0.2 + 0.7 * share,
        "reward/std": 0.4,
        "entropy": 0.5 - 0.4 * share,
        "grad_norm": 1.0 + math.sin(step),
        "lr": 1e-4,
        "response_len/mean": 4.0,
        "groups/all_equal": 0,
        "completions/cut": 0,
        "mismatch/k3": k3 * (step + 1),
        "mismatch/max_abs": 3 * k3,
        "mismatch/frac_equal": 0.5 if k3 else 1.0,
        "time/sample_s": 0.5,
        "time/train_s": 1.0,
        "time/decode_s": 0.4,
        "time/forward_backward_s": 0.9,
        "perf/tokens_per_s": 4 * completions / 1.5,
        "perf/peak_memory_bytes": 3e8,
    }
    metrics |= {"eval/base_reward": 0.25} if step == 0 else {}
    return metrics | ({"eval/reward": 0.3 + 0.4 * share} if step % 2 else {})


def write_rollouts(
    path: Path, steps: range, P: int, G: int, options: dict[str, Any] | None = None, first_id: int = 3
) -> None:
    """Append the rollouts of some steps, which draw from `problems` problems (default: 3 for 2 prompts)."""
    options = options or {}
    text, k3, n = options.get("text"), options.get("k3", 0.0), options.get("tokens", 4)
    lines = []
    for i in range(steps.start * P * G, steps.stop * P * G):
        step, p, g = i // (P * G), i // G % P, i % G
        problem = (step * P + p) % options.get("problems", 3 * P // 2)
        reward = float((i * 7919) % 11 > 5)
        logprobs = [-0.01 * ((i + k) % 300) for k in range(n)]
        line = {
            "step": step,
            "prompt": p,
            "sample": g,
            "problem": problem,
            "prompt_text": f"{problem}+{problem % 89}=",
            "text": text(i) if text else f"answer {i}",
            "reward": reward,
            "advantage": reward - 0.5,
            "finish": "length" if i % 5 == 0 else "stop",
            "weight_version": step,
            "prompt_ids": [3, 4, 5],
            "completion_ids": [first_id, *((i + k) % 60 + 3 for k in range(n - 1))],
            "logprobs": logprobs,
        }
        lines.append(line | ({"trainer_logprobs": [x + k3 for x in logprobs]} if k3 else {}))
    write_lines(path / "rollouts.jsonl", lines)


def _write_ledger(file: Path, steps: int, seed: int, settings: dict[str, Any], fork: int | None) -> str:
    leaves = ["a" * 32, "b" * 32]
    names = ["embed", "norm"]
    head = Head(settings, seed, hash_json("data"), hash_json(leaves), names, leaves, {"torch": "2.13.0"})
    ledger = Ledger(file, head)
    for step in range(steps):
        other = fork is not None and step >= fork
        quantities = {name: hash_json([name, step, other]) for name in ("tokens", "gradient", "weights")}
        ledger.append(Line(step, {"seed": seed, "step": step}, quantities, updates=step + 1))
    ledger.close()
    return ledger.chain
