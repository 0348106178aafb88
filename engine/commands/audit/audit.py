"""The audit: draw or read rollouts, score them again, compare, trace one sequence through both engines, and
say what was found.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....kernels import tiles
from ....kernels.backend import find_device
from ....kernels.sampling_params import SamplingParams
from ....model.checkpoint import DTYPES, resolve_model
from ....model.config import ModelConfig
from ....verify.trace import OpDifference, compare_traces, first_divergence
from ...rollout.engine import Engine, Pair, ZeroklEngine
from ...rollout.hf import HfEngine
from ...rollout.types import GenerationParams, Rollout
from ...rollout.vllm.installed import is_cpu_build, require_vllm
from ...rollout.vllm_stock import VllmEngine, VllmZeroklEngine
from ...tasks.tokenizer import Tokenizer
from .logs import read_log
from .measure import measure, worst_tokens

SAMPLERS = ("native", "hf", "hf-eager", "vllm", "vllm-zerokl")
TRAINERS = ("zerokl", "hf", "hf-eager", "vllm")
Rollouts = Sequence[tuple[Rollout, SamplingParams]]
# Sequences that each engine's own invariance is measured on: they are scored one by one and token by token.
_OWN = 8


@dataclass(frozen=True)
class AuditConfig:
    """What to compare.

    `sampler` is one of SAMPLERS or the path of a log (logs.py); `trainer` one of TRAINERS.
    """

    model: str
    sampler: str = "native"
    trainer: str = "zerokl"
    dtype: str = "bfloat16"
    sampler_dtype: str = ""  # of the sampler, where it is another
    head_dtype: str = ""  # of the logits, where it is another
    sampler_head_dtype: str = ""  # of the sampler's logits, where it is another than head_dtype
    prompts: str = ""  # a text file, one prompt a line
    n: int = 64
    max_tokens: int = 256
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    weight_version: int | None = None  # of a log's rollouts: those of the model
    device: str = "auto"  # of every engine: "cpu", "cuda", or "auto": a GPU where there is one and vLLM, if asked for, can use it

    def dtypes(self) -> dict[str, str]:
        """Compute dtype and dtype of the logits of the trainer, then of the sampler."""
        sampler = self.sampler_dtype or self.dtype
        return {
            "dtype": self.dtype,
            "head_dtype": self.head_dtype or self.dtype,
            "sampler_dtype": sampler,
            "sampler_head_dtype": self.sampler_head_dtype or self.head_dtype or sampler,
        }


@dataclass(frozen=True)
class Audit:
    """What was found. `report` is what audit.json holds."""

    report: dict[str, Any]

    @property
    def equal(self) -> bool:
        """Every token's logprob has the same bits on both sides."""
        return self.report["frac_equal"] == 1.0

    def within(self, max_k3: float | None, max_abs: float | None) -> bool:
        """Equal, or inside the tolerances given."""
        if max_k3 is None and max_abs is None:
            return self.equal
        r = self.report
        return (max_k3 is None or abs(r["k3"]["value"]) <= max_k3) and (
            max_abs is None or r["max_abs"] <= max_abs
        )


def audit(cfg: AuditConfig) -> Audit:
    """Run an audit. Raises ValueError for bad input."""
    folder = resolve_model(cfg.model)
    model = ModelConfig.from_file(folder)
    tokenizer = Tokenizer(folder, model.vocab_size)
    _check(cfg)
    device = _device(cfg)
    sampler, trainer = _engines(cfg, folder, device)
    logged, redraw = None, None
    if sampler is None:
        rollouts = read_log(Path(cfg.sampler), model.vocab_size, model.max_positions, cfg.weight_version)
        logged, rollouts = len(rollouts), rollouts[: cfg.n]
    else:
        redraw = partial(_draw, cfg, sampler, tokenizer, model)
        rollouts = redraw()
    report = {
        "model": str(folder),
        "sampler": sampler.name if sampler else cfg.sampler,
        "trainer": trainer.name,
        **cfg.dtypes(),
        "weight_version": rollouts[0][0].weight_version,
        "torch": torch.__version__,
        "device": device.type,
        "logged": logged,
    }
    return Audit(report | compare(trainer, rollouts, tokenizer, sampler, redraw))


def compare(
    trainer: Engine,
    rollouts: Rollouts,
    tokenizer: Tokenizer,
    sampler: Engine | None = None,
    redraw: Callable[[], Rollouts] | None = None,
) -> dict[str, Any]:
    """What the trainer says of rollouts, beside what their sampler said. With the sampler at hand, both are
    traced.

    `redraw` draws the rollouts again, from the same seeds, with the sampler's caches dropped: other bits say
    that a cache was stale.
    """
    scored, drawn = _score(trainer, rollouts), [r.logprobs for r, _ in rollouts]
    report = {
        **measure(scored, drawn),
        "worst": [_with_text(w, rollouts, tokenizer) for w in worst_tokens(scored, drawn)],
        "own_invariance": {
            name: _own_invariance(engine, rollouts, drawn=engine is sampler)
            for name, engine in _by_name(sampler, trainer).items()
        },
    }
    if sampler is None:
        return report
    differences = _traced(sampler, trainer, rollouts)
    first = first_divergence(differences)
    report |= {
        "operations": [asdict(d) for d in differences],
        "first_divergence": asdict(first) if first else None,
    }
    report["traced_outside"] = sampler.traced_outside
    if report["frac_equal"] < 1.0 and redraw is not None and sampler.drop_caches():
        again = redraw()
        report["frac_equal_without_caches"] = measure(_score(trainer, again), [r.logprobs for r, _ in again])[
            "frac_equal"
        ]
        report["stale_cache"] = any(
            a.completion_ids != b.completion_ids or a.logprobs.tobytes() != b.logprobs.tobytes()
            for (a, _), (b, _) in zip(rollouts, again, strict=True)
        )
    return report


def _by_name(sampler: Engine | None, trainer: Engine) -> dict[str, Engine]:
    """The engines, told apart by side where they have one name."""
    if sampler in (None, trainer):
        return {trainer.name: trainer}
    sides = {"sampler": sampler, "trainer": trainer}
    return {e.name if sampler.name != trainer.name else f"{e.name} ({side})": e for side, e in sides.items()}


def _check(cfg: AuditConfig) -> None:
    """Raise ValueError for a pair that cannot be compared."""
    if cfg.sampler not in SAMPLERS and not Path(cfg.sampler).is_file():
        raise ValueError(
            f"audit: sampler {cfg.sampler} is no file; choose {', '.join(SAMPLERS)}, or name a log of rollouts"
        )
    if cfg.trainer not in TRAINERS:
        raise ValueError(f"audit: trainer {cfg.trainer} is not known; choose {', '.join(TRAINERS)}")
    if cfg.n < 1:
        raise ValueError(f"audit: n ({cfg.n}) must be at least 1")
    if cfg.weight_version is not None and cfg.sampler in SAMPLERS:
        raise ValueError(
            "audit: --weight-version chooses among the rollouts of a log; an engine draws with the model's weights"
        )
    dtype, head, *sampler = map(_dtype, cfg.dtypes().values())
    if cfg.sampler == cfg.trainer == "vllm" and sampler != [dtype, head]:
        raise ValueError(
            "audit: vLLM in two dtypes would be two engines in one process; audit each of them against zerokl"
        )


def _engines(cfg: AuditConfig, folder: Path, device: torch.device) -> tuple[Engine | None, Engine]:
    """Sampler, None where it is a log, and trainer."""
    dtype, head, *sampler = map(_dtype, cfg.dtypes().values())
    if cfg.sampler == cfg.trainer == "vllm":
        engine = _engine("vllm", folder, device, dtype, head)
        return engine, engine
    drawn = (
        _engine(cfg.sampler, folder, device, *sampler, beside_vllm=cfg.trainer == "vllm")
        if cfg.sampler in SAMPLERS
        else None
    )
    return drawn, _engine(cfg.trainer, folder, device, dtype, head)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"audit: dtype {name} is not known; choose {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(cfg: AuditConfig) -> torch.device:
    vllm = {cfg.sampler, cfg.trainer} & {"vllm", "vllm-zerokl"}
    if not vllm:
        return find_device(cfg.device)
    tiles.fix_table(require_vllm())
    device = find_device("cpu" if cfg.device == "auto" and is_cpu_build() else cfg.device)
    if is_cpu_build() and device.type == "cuda":
        raise ValueError("audit: the vLLM installed here computes on a CPU; set --device cpu")
    if not is_cpu_build() and device.type == "cpu":
        raise ValueError(
            f"audit: the vLLM installed here needs a GPU, and {'audits there' if cfg.device == 'cpu' else 'torch finds none'}"
        )
    if vllm == {"vllm", "vllm-zerokl"} and device.type == "cuda":
        raise ValueError(
            "audit: on a GPU vllm and vllm-zerokl would be two engines in one process; audit each of them against zerokl"
        )
    return device


def _engine(
    name: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    head: torch.dtype,
    beside_vllm: bool = False,
) -> Engine:
    if name in ("native", "zerokl"):
        return ZeroklEngine(folder, dtype, head, device, name)
    if name == "vllm":
        return VllmEngine(folder, dtype, ModelConfig.from_file(folder).max_positions, head)
    if name == "vllm-zerokl":
        return VllmZeroklEngine(
            folder, dtype, head, device, multiprocess=beside_vllm
        )  # a process holds one vLLM engine
    return HfEngine(folder, dtype, "eager" if name == "hf-eager" else "sdpa", head, device)


def _draw(cfg: AuditConfig, sampler: Engine, tokenizer: Tokenizer, model: ModelConfig) -> Rollouts:
    prompts = [tokenizer.encode(p, chat=False) for p in _prompt_texts(cfg)]
    room = model.max_positions - max(map(len, prompts))
    if room < 1:
        raise ValueError(
            f"audit: a prompt of {model.max_positions - room} tokens leaves no room in the context ({model.max_positions})"
        )
    generation_params = GenerationParams(
        cfg.sampling_params.check(), 1, min(cfg.max_tokens, room), tokenizer.stop_ids
    )
    return [
        (r, cfg.sampling_params)
        for r in sampler.generate(
            [prompts[i % len(prompts)] for i in range(cfg.n)], generation_params, cfg.seed
        )
    ]


def _prompt_texts(cfg: AuditConfig) -> list[str]:
    if not cfg.prompts:
        return [f"{a}+{b}=" for a in range(1, 9) for b in range(11, 19)]
    try:
        texts = [
            line for line in Path(cfg.prompts).read_text(encoding="utf-8-sig").split("\n") if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"audit: {cfg.prompts} cannot be read ({error})") from None
    if not texts:
        raise ValueError(f"audit: {cfg.prompts} holds no prompt")
    return texts


def _score(engine: Engine, rollouts: Rollouts) -> list[np.ndarray]:
    """The engine's logprobs of each rollout; those of one distribution are scored together."""
    scored: dict[int, np.ndarray] = {}
    for sampling_params in dict.fromkeys(d for _, d in rollouts):
        at = [i for i, (_, d) in enumerate(rollouts) if d == sampling_params]
        scored |= zip(at, engine.score([rollouts[i][0].pair for i in at], sampling_params), strict=True)
    return [scored[i] for i in range(len(rollouts))]


def _own_invariance(engine: Engine, rollouts: Rollouts, drawn: bool) -> dict[str, Any]:
    """How an engine's logprobs of the first sequences depend on what they are scored with, and on reading
    them token by token.

    drawn: it drew them, so that what it said then is compared with what it scores.
    """
    sampling_params = rollouts[0][1]
    some = [r for r, d in rollouts if d == sampling_params][:_OWN]
    pairs: list[Pair] = [r.pair for r in some]
    together = np.concatenate(engine.score(pairs, sampling_params))
    others = {"drawn against scored": [r.logprobs for r in some]} if drawn else {}
    if not isinstance(engine, VllmEngine) or engine.scores_together(sampling_params):
        others["solo against batched"] = engine.score(pairs, sampling_params, together=False)
    if (decoded := engine.decode(pairs, sampling_params)) is not None:
        others["decode against prefill"] = decoded
    return {
        way: {
            "tokens": len(together),
            "unequal": int((together.view(np.int32) != np.concatenate(x).view(np.int32)).sum()),
            "max_abs": float(np.abs(together.astype(np.float64) - np.concatenate(x)).max()),
        }
        for way, x in others.items()
    }


def _traced(sampler: Engine, trainer: Engine, rollouts: Rollouts) -> list[OpDifference]:
    """Both engines' operations on the sequence whose logprobs both compute in one forward."""
    rollout, sampling_params = rollouts[0]
    return compare_traces(
        sampler.trace(rollout.pair, sampling_params), trainer.trace(rollout.pair, sampling_params)
    )


def _with_text(worst: dict[str, Any], rollouts: Rollouts, tokenizer: Tokenizer) -> dict[str, Any]:
    r, position = rollouts[worst["sequence"]][0], worst["position"]
    before = tokenizer.decode([*r.prompt_ids, *r.completion_ids[:position]])[-60:]
    return worst | {
        "token": r.completion_ids[position],
        "text": tokenizer.decode(r.completion_ids[position : position + 1]),
        "before": before,
    }
