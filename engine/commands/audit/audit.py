"""The audit: how the log-probabilities of a sampler and of a trainer differ.

The rollouts are drawn or read from a log, and the trainer scores them. Then one sequence is traced through
both engines. The result is one report (audit.json).
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
# Sequences on which each engine's own invariance is measured: they are scored one by one and token by token.
_INVARIANCE_SEQUENCES = 8


@dataclass(frozen=True)
class AuditConfig:
    """What to compare. A dtype that is empty is the dtype named in its comment."""

    model: str
    sampler: str = "native"  # one of SAMPLERS, or the path of a log (logs.py)
    trainer: str = "zerokl"  # one of TRAINERS
    dtype: str = "bfloat16"
    sampler_dtype: str = ""  # of the sampler, where it differs from dtype
    head_dtype: str = ""  # of the logits, where it differs from the compute dtype
    sampler_head_dtype: str = ""  # of the sampler's logits, where it differs from head_dtype
    prompts: str = ""  # a text file with one prompt a line
    n: int = 64
    max_tokens: int = 256
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    weight_version: int | None = None  # takes only those rollouts of a log that have this version
    # Of every engine: "cpu", "cuda" or "auto". "auto" is a GPU where there is one, and where vLLM, if it is
    # asked for, can use it.
    device: str = "auto"

    def dtypes(self) -> dict[str, str]:
        """Compute dtype and dtype of the logits: of the trainer, then of the sampler."""
        sampler = self.sampler_dtype or self.dtype
        return {
            "dtype": self.dtype,
            "head_dtype": self.head_dtype or self.dtype,
            "sampler_dtype": sampler,
            "sampler_head_dtype": self.sampler_head_dtype or self.head_dtype or sampler,
        }


@dataclass(frozen=True)
class Audit:
    """The result of an audit. `report` is what audit.json holds."""

    report: dict[str, Any]

    @property
    def equal(self) -> bool:
        """Every token's logprob has the same bits on both sides."""
        return self.report["frac_equal"] == 1.0

    def within(self, max_k3: float | None, max_abs: float | None) -> bool:
        """Equal to the bit, or inside the tolerances where any is given."""
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
    """The report on the trainer's logprobs of rollouts, beside the logprobs of their sampler.

    sampler: the engine that drew them, where it is at hand; then both engines are traced. redraw: draws the
    rollouts again from the same seeds, after the sampler has dropped its caches. Other bits then show that a
    cache was stale.
    """
    trainer_logprobs, sampling_logprobs = _score(trainer, rollouts), [r.logprobs for r, _ in rollouts]
    report = {
        **measure(trainer_logprobs, sampling_logprobs),
        "worst": [
            _with_text(w, rollouts, tokenizer) for w in worst_tokens(trainer_logprobs, sampling_logprobs)
        ],
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
    """The engines by name. Two engines of one name get their side as well."""
    if sampler in (None, trainer):
        return {trainer.name: trainer}
    sides = {"sampler": sampler, "trainer": trainer}
    return {e.name if sampler.name != trainer.name else f"{e.name} ({side})": e for side, e in sides.items()}


def _check(cfg: AuditConfig) -> None:
    """Raise ValueError for a pair that cannot be compared."""
    if cfg.sampler not in SAMPLERS and not Path(cfg.sampler).is_file():
        raise ValueError(
            f"audit: sampler {cfg.sampler} is no file; "
            f"choose {', '.join(SAMPLERS)}, or name a log of rollouts"
        )
    if cfg.trainer not in TRAINERS:
        raise ValueError(f"audit: trainer {cfg.trainer} is not known; choose {', '.join(TRAINERS)}")
    if cfg.n < 1:
        raise ValueError(f"audit: n ({cfg.n}) must be at least 1")
    if cfg.weight_version is not None and cfg.sampler in SAMPLERS:
        raise ValueError(
            "audit: --weight_version chooses among the rollouts of a log; "
            "an engine draws with the model's weights"
        )
    dtype, head, *sampler_dtypes = map(_dtype, cfg.dtypes().values())
    if cfg.sampler == cfg.trainer == "vllm" and sampler_dtypes != [dtype, head]:
        raise ValueError(
            "audit: vLLM in two dtypes would be two engines in one process; audit each of them against zerokl"
        )


def _engines(cfg: AuditConfig, folder: Path, device: torch.device) -> tuple[Engine | None, Engine]:
    """The sampler (None where it is a log) and the trainer."""
    dtype, head, *sampler_dtypes = map(_dtype, cfg.dtypes().values())
    if cfg.sampler == cfg.trainer == "vllm":
        engine = _engine("vllm", folder, device, dtype, head)
        return engine, engine
    sampler = (
        _engine(cfg.sampler, folder, device, *sampler_dtypes, beside_vllm=cfg.trainer == "vllm")
        if cfg.sampler in SAMPLERS
        else None
    )
    return sampler, _engine(cfg.trainer, folder, device, dtype, head)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"audit: dtype {name} is not known; choose {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(cfg: AuditConfig) -> torch.device:
    """The device of all engines. Raises ValueError where an engine cannot compute on it."""
    vllm = {cfg.sampler, cfg.trainer} & {"vllm", "vllm-zerokl"}
    if not vllm:
        return find_device(cfg.device)
    tiles.fix_table(require_vllm())
    device = find_device("cpu" if cfg.device == "auto" and is_cpu_build() else cfg.device)
    if is_cpu_build() and device.type == "cuda":
        raise ValueError("audit: the vLLM installed here computes on a CPU; set --device cpu")
    if not is_cpu_build() and device.type == "cpu":
        obstacle = "audits there" if cfg.device == "cpu" else "torch finds none"
        raise ValueError(f"audit: the vLLM installed here needs a GPU, and {obstacle}")
    if vllm == {"vllm", "vllm-zerokl"} and device.type == "cuda":
        raise ValueError(
            "audit: on a GPU vllm and vllm-zerokl would be two engines in one process; "
            "audit each of them against zerokl"
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
        # A process holds one vLLM engine.
        return VllmZeroklEngine(folder, dtype, head, device, multiprocess=beside_vllm)
    return HfEngine(folder, dtype, "eager" if name == "hf-eager" else "sdpa", head, device)


def _draw(cfg: AuditConfig, sampler: Engine, tokenizer: Tokenizer, model: ModelConfig) -> Rollouts:
    prompts = [tokenizer.encode(p, chat=False) for p in _prompt_texts(cfg)]
    room = model.max_positions - max(map(len, prompts))
    if room < 1:
        raise ValueError(
            f"audit: a prompt of {model.max_positions - room} tokens leaves no room "
            f"in the context ({model.max_positions})"
        )
    generation_params = GenerationParams(
        cfg.sampling_params.check(), 1, min(cfg.max_tokens, room), tokenizer.stop_ids
    )
    repeated = [prompts[i % len(prompts)] for i in range(cfg.n)]
    return [(r, cfg.sampling_params) for r in sampler.generate(repeated, generation_params, cfg.seed)]


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
    """The engine's logprobs of each rollout. Rollouts with equal sampling parameters are scored together."""
    scored: dict[int, np.ndarray] = {}
    for sampling_params in dict.fromkeys(params for _, params in rollouts):
        indices = [i for i, (_, params) in enumerate(rollouts) if params == sampling_params]
        pairs = [rollouts[i][0].pair for i in indices]
        scored |= zip(indices, engine.score(pairs, sampling_params), strict=True)
    return [scored[i] for i in range(len(rollouts))]


def _own_invariance(engine: Engine, rollouts: Rollouts, drawn: bool) -> dict[str, Any]:
    """How an engine's logprobs of the first sequences depend on how it computes them.

    The ways are: scored alone or in a batch, and read token by token. drawn: the engine drew the rollouts, so
    its logprobs of then are compared with those that it computes now, too.
    """
    sampling_params = rollouts[0][1]
    first = [r for r, params in rollouts if params == sampling_params][:_INVARIANCE_SEQUENCES]
    pairs: list[Pair] = [r.pair for r in first]
    together = np.concatenate(engine.score(pairs, sampling_params))
    ways = {"drawn against scored": [r.logprobs for r in first]} if drawn else {}
    if not isinstance(engine, VllmEngine) or engine.scores_together(sampling_params):
        ways["solo against batched"] = engine.score(pairs, sampling_params, together=False)
    if (decoded := engine.decode(pairs, sampling_params)) is not None:
        ways["decode against prefill"] = decoded
    return {
        way: {
            "tokens": len(together),
            "unequal": int((together.view(np.int32) != np.concatenate(logprobs).view(np.int32)).sum()),
            "max_abs": float(np.abs(together.astype(np.float64) - np.concatenate(logprobs)).max()),
        }
        for way, logprobs in ways.items()
    }


def _traced(sampler: Engine, trainer: Engine, rollouts: Rollouts) -> list[OpDifference]:
    """The operations of both engines, compared on the first rollout; each computes it in one forward."""
    rollout, sampling_params = rollouts[0]
    return compare_traces(
        sampler.trace(rollout.pair, sampling_params), trainer.trace(rollout.pair, sampling_params)
    )


def _with_text(worst: dict[str, Any], rollouts: Rollouts, tokenizer: Tokenizer) -> dict[str, Any]:
    """One of the worst tokens, with its id, its text, and the end of the text before it."""
    r, position = rollouts[worst["sequence"]][0], worst["position"]
    before = tokenizer.decode([*r.prompt_ids, *r.completion_ids[:position]])[-60:]
    return worst | {
        "token": r.completion_ids[position],
        "text": tokenizer.decode(r.completion_ids[position : position + 1]),
        "before": before,
    }
