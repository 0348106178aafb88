"""The two engines of an audit, the device of both, and the errors of their libraries."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ...engine.rollout.vllm.installed import is_cpu_build, require_vllm
from ...kernels.backend import find_device
from ...kernels.tile_tables import DEFAULT_TABLE, TileTable, tile_table
from ...model.checkpoint import DTYPES, check_values
from ..config import AuditConfig
from .audited_model import audited_model, known_config
from .engine import Engine, ZeroklEngine
from .hf import HfEngine
from .vllm import VllmEngine, VllmZeroklEngine

# Engines in which a library computes.
_LIBRARIES = ("hf", "hf-eager", "vllm", "vllm-zerokl")


def make_engines(
    cfg: AuditConfig, folders: Sequence[Path], device: torch.device
) -> tuple[Engine | None, Engine]:
    """The sampler (None where it is a log) and the trainer.

    Where zerokl has no decoder of one folder, both sides are traced by their modules.
    """
    dtype, head, *sampler_dtypes = (DTYPES[name] for name in vars(cfg.dtypes).values())
    tiles = tiles_of(cfg)
    by_modules = any(known_config(x) is None for x in folders)
    if cfg.sampler == cfg.trainer == "vllm":
        engine = _engine("vllm", folders[0], device, tiles, dtype, head, by_modules=by_modules)
        return engine, engine
    sampler = None
    if not cfg.reads_log:
        beside_vllm = cfg.trainer == "vllm"
        sampler = _engine(cfg.sampler, folders[0], device, tiles, *sampler_dtypes, beside_vllm, by_modules)
    return sampler, _engine(cfg.trainer, folders[1], device, tiles, dtype, head, by_modules=by_modules)


def tiles_of(cfg: AuditConfig) -> TileTable:
    """The tiles of our products: those of the installed vLLM, where it is one of the engines.

    Raises ValueError for a vLLM that is missing or not supported.
    """
    return tile_table(require_vllm()) if _of_vllm(cfg) else DEFAULT_TABLE


def _of_vllm(cfg: AuditConfig) -> set[str]:
    return {cfg.sampler, cfg.trainer} & {"vllm", "vllm-zerokl"}


def device_of(cfg: AuditConfig) -> torch.device:
    """The device of all engines. Raises ValueError where an engine cannot compute on it."""
    vllm = _of_vllm(cfg)
    if not vllm:
        return find_device(cfg.device)
    require_vllm()
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
    tiles: TileTable,
    dtype: torch.dtype,
    head: torch.dtype,
    beside_vllm: bool = False,
    by_modules: bool = False,
) -> Engine:
    if name in ("native", "zerokl"):
        return ZeroklEngine(folder, dtype, head, device, name, tiles)
    # Ours looks at the numbers as it reads them. A library may hide one: vLLM's router takes a NaN as p = 0.
    check_values(folder)
    if name == "vllm":
        return VllmEngine(folder, dtype, audited_model(folder, ()).max_positions, head, by_modules)
    if name == "vllm-zerokl":
        # A process holds one vLLM engine.
        return VllmZeroklEngine(folder, dtype, head, device, beside_vllm, tiles)
    return HfEngine(folder, dtype, "eager" if name == "hf-eager" else "sdpa", head, device, by_modules)


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
