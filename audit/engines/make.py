"""The two engines of an audit, the device of both, and the errors of their libraries."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ...engine.rollout.vllm.installed import is_cpu_build, require_vllm
from ...kernels import tiles
from ...kernels.backend import find_device
from ...model.checkpoint import DTYPES
from ...model.config import ModelConfig
from ..config import AuditConfig
from .engine import Engine, ZeroklEngine
from .hf import HfEngine
from .vllm import VllmEngine, VllmZeroklEngine

# Engines in which a library computes.
_LIBRARIES = ("hf", "hf-eager", "vllm", "vllm-zerokl")


def make_engines(
    cfg: AuditConfig, folders: Sequence[Path], device: torch.device
) -> tuple[Engine | None, Engine]:
    """The sampler (None where it is a log) and the trainer."""
    dtype, head, *sampler_dtypes = (DTYPES[name] for name in vars(cfg.dtypes).values())
    if cfg.sampler == cfg.trainer == "vllm":
        engine = _engine("vllm", folders[0], device, dtype, head)
        return engine, engine
    sampler = (
        None
        if cfg.of_log
        else _engine(cfg.sampler, folders[0], device, *sampler_dtypes, beside_vllm=cfg.trainer == "vllm")
    )
    return sampler, _engine(cfg.trainer, folders[1], device, dtype, head)


def device_of(cfg: AuditConfig) -> torch.device:
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


@contextmanager
def library_errors(cfg: AuditConfig, doing: str) -> Iterator[None]:
    """Turn what a library raises inside this context into one line that names the engines.

    Its exit code would otherwise be that of a difference. Errors of our own engines stay what they are.
    """
    engines = [name for name in (cfg.sampler, cfg.trainer) if name in _LIBRARIES]
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # a library may raise anything
        if not engines:
            raise
        raise ValueError(
            f"audit: {' and '.join(engines)} could not {doing} with {cfg.model} "
            f"({type(error).__name__}: {error})"
        ) from error
