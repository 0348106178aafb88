"""Draws many small sound logs of many kinds, audits them, and counts the alarms. None may be a fault.

python benchmarks/audit_cases/sound_logs.py --root R --logs 200 --with-model 20

Each log has a family, two dtypes, a temperature, a filter, lengths, decimals, turns and versions of its own,
all drawn from its number. Every log is audited by its two columns alone, and the first ones beside the model
as well. An alarm is a fault that is named; a log without an all-clear is unsure, or untried where numbers at
operations were wanted and not fitted.
"""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import world
from run import FAMILIES, SOUND_KINDS, audit_of, cause_text, write_log
from zerokl.audit.faults.planting.sampling import Line, Settings, draw, load, row, scored, with_trainer
from zerokl.audit.faults.planting.world import World, as_lines

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# How often each dtype of a sampler and of a trainer is drawn.
_SAMPLERS, _TRAINERS = (0.25, 0.55, 0.2), (0.7, 0.3, 0.0)


class Kind:
    """What one log is like; all of it is drawn from its number."""

    def __init__(self, number: int):
        rng = np.random.default_rng((7, number))
        self.number, self.family = number, FAMILIES[number % len(FAMILIES)]
        self.sampler = str(rng.choice(list(DTYPES), p=_SAMPLERS))
        self.trainer = str(rng.choice(list(DTYPES), p=_TRAINERS))
        self.settings = self._settings(rng)
        self.each, self.most = int(rng.integers(1, 4)), int(rng.integers(6, 50))
        self.prompts = int(rng.integers(1, 7))
        self.decimals = int(rng.choice([0, 0, 0, 4, 6]))
        # Two turns, or tokens of two weight versions, in some of them.
        self.shape = str(rng.choice(["plain", "turns", "versions"], p=[0.7, 0.15, 0.15]))

    @staticmethod
    def _settings(rng: np.random.Generator) -> Settings:
        temperature = float(rng.choice([1.0, 1.0, 0.6, 0.8, 1.2]))
        filters: list[dict[str, Any]] = [{}, {}, {}, {"top_k": int(rng.integers(5, 60))}]
        filters += [{"top_p": float(np.round(rng.uniform(0.8, 0.98), 2))}]
        filters += [{"min_p": 0.05}, {"bias": ((int(rng.integers(60, 200)), 2.0),)}]
        return (
            Settings(temperature=temperature)
            if rng.random() < 0.4
            else replace(Settings(temperature=temperature), **filters[int(rng.integers(len(filters)))])
        )

    def __str__(self) -> str:
        s = {k: v for k, v in vars(self.settings).items() if v != getattr(Settings(), k)}
        return (
            f"{self.family} {self.sampler} beside {self.trainer}, {s}, {self.prompts} x {self.each} of "
            f"{self.most}, {self.shape}, decimals {self.decimals or 'all'}"
        )


class Models:
    """The worlds and their models, each loaded once."""

    def __init__(self, root: Path):
        self._root, self._worlds, self._models = root, {}, {}

    def world(self, family: str, seed: int) -> World:
        """The world of a family with a seed."""
        key = family, seed % 5
        if key not in self._worlds:
            self._worlds[key] = world(family, 100 + seed % 5, self._root / "models")
        return self._worlds[key]

    def model(self, folder: Path, dtype: str):
        """A model in a dtype."""
        if (folder, dtype) not in self._models:
            self._models[folder, dtype] = load(folder, DTYPES[dtype])
        return self._models[folder, dtype]


def rows_of(kind: Kind, models: Models) -> list[dict]:
    """The lines of a log."""
    w = models.world(kind.family, kind.number)
    if kind.shape == "turns":
        w = replace(w, _drawn={})
        # turns() draws with the world's own two models, at its usual temperature.
        kind.settings, kind.sampler, kind.trainer = Settings(temperature=0.8), "bfloat16", "float32"
        lines = as_lines(w.turns(lambda p, c, q: [*p, *c, *w.newline, *q])[: 2 + kind.prompts])
        return [_turns(row(x, kind.settings)) for x in lines]
    lines = _both(w.folder, w, kind, models, kind.number)
    if kind.shape == "versions":
        old = _both(w.old, w, kind, models, kind.number + 1)
        lines = [
            replace(x, extra={"weight_version": version})
            for version, part in ((4, old), (5, lines))
            for x in part
        ]
    if kind.decimals:
        extra = {"decimals": kind.decimals}
        lines = [replace(x, sampler=np.round(x.sampler, kind.decimals), extra=x.extra | extra) for x in lines]
    return [row(x, kind.settings) for x in lines]


def _both(folder: Path, w: World, kind: Kind, models: Models, seed: int) -> list[Line]:
    prompts = w.prompts[: kind.prompts]
    model = models.model(folder, kind.sampler)
    lines = draw(model, prompts, kind.each, kind.settings, 1000 + seed, kind.most)
    return with_trainer(lines, scored(models.model(folder, kind.trainer), lines, kind.settings))


def _turns(line: dict) -> dict:
    return {k: v for k, v in line.items() if k not in ("prompt_ids", "completion_ids", "logprobs")}


def alarm(report: dict, cut: bool, two_dtypes: bool) -> str:
    """What a report wrongly says of a sound log; empty where it says nothing.

    cut: it keeps few decimals. two_dtypes: sampler and trainer compute in two.
    """
    named = {"rounded log-probabilities": cut, "another dtype": two_dtypes}
    true = (*SOUND_KINDS, "unknown", *(name for name, is_so in named.items() if is_so))
    faults = [name for name in report["outcome"]["faults"] if name not in SOUND_KINDS]
    kind = report["cause"]["kind"]
    if faults or kind not in true:
        return f"{kind} {faults}: {cause_text(report)[:200]}"
    return ""


def untried(report: dict) -> list[str]:
    """Why no number at an operation was fitted to a column, where that was wanted: no log is clear so."""
    columns = [report["hypotheses"], report.get("trainer_column") or {}]
    return [x["untried"] for x in columns if x.get("untried")]


def run(root: Path, logs: Sequence[int], with_model: int) -> None:
    """Draw, audit, and print each alarm, then the counts."""
    models, counts, folder = Models(root), Counter(), root / "sound"
    start = time.perf_counter()
    for number in logs:
        kind, path = Kind(number), folder / f"{number}.jsonl"
        write_log(path, rows_of(kind, models))
        audits: dict[str, dict[str, str]] = {"columns": {}}
        if number < with_model and kind.shape != "versions":
            model = str(models.world(kind.family, number).folder)
            audits["with the model"] = {"model": model, "dtype": kind.trainer}
        for how, settings in audits.items():
            report = audit_of(path, **settings)
            wrong = alarm(report, kind.decimals > 0, kind.sampler != kind.trainer)
            sure = report["outcome"]["passed"]
            others = "clear" if sure else "untried" if untried(report) else "unsure"
            counts[how, "alarm" if wrong else others] += 1
            if wrong or not sure:
                print(f"{number} {how}: {kind}\n    {wrong or report['cause']['text'][:200]}", flush=True)
    for (how, word), n in sorted(counts.items()):
        print(f"{how}: {n} {word}")
    print(f"{time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("runs/audit-cases"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--logs", type=int, default=200)
    parser.add_argument("--with-model", type=int, default=0, help="of the first logs")
    words = parser.parse_args()
    torch.set_num_threads(1)
    run(words.root, range(words.first, words.first + words.logs), words.with_model)


if __name__ == "__main__":
    main()
