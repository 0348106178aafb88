"""`zerokl capsule make`: completions of a log, or of an engine, with all that is needed to ask again."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from ...engine.display.progress import silent
from ...files.installed import needs_torch
from ..config import SAMPLERS, TRAINERS, AuditConfig, LogFormat, check_draw
from ..formats.record import LoggedRollout
from ..formats.registry import find_format, log_files, read_rollouts
from ..settings import versions
from .capsule import Bounds, Drawn, Header, write_capsule
from .folder_hashes import MOST_TENSORS, file_hashes, hash_of_all, weight_hashes


def make_capsule(
    source: str,
    out: Path,
    cfg: AuditConfig,
    trainer: str,
    format: LogFormat,
    bounds: Bounds,
    stage: Callable[[str], None] = silent,
) -> tuple[int, int]:
    """Write a capsule of a log, or of what an engine draws. Returns its completions and its bytes.

    cfg: model, dtype, device, n, and of a draw prompts, max_tokens, temperature and seed. trainer: the engine
    that scores the completions, or "" for none: a log keeps its own column. Raises ValueError for bad input.
    """
    _check(source, out, cfg, trainer, bounds)
    settings: dict[str, str] = {}
    drawn = None
    if source in SAMPLERS:
        from .asked_engines import as_sampler, draw_again, prompts_of

        stage(f"drawing {cfg.n} completions with {source}")
        prompts, max_tokens, stop_ids = prompts_of(cfg)
        drawn = Drawn(seed=cfg.seed, max_tokens=max_tokens, stop_ids=stop_ids)
        params = cfg.sampling_params
        computed = draw_again(as_sampler(cfg, source), drawn, prompts, params)
        settings |= computed.settings
        columns = zip(prompts, computed.completions, computed.logprobs, strict=True)
        rollouts = [LoggedRollout(tuple(p), ids, logp, sampling_params=params) for p, ids, logp in columns]
    else:
        stage(f"reading {source}")
        rollouts = _of_log(Path(source), format, cfg)
    if trainer:
        from .asked_engines import score_again

        stage(f"scoring {len(rollouts)} completions with {trainer}")
        computed = score_again(cfg.model_copy(update={"trainer": trainer}), "trainer", rollouts)
        settings |= computed.settings
        columns = zip(rollouts, computed.logprobs, strict=True)
        rollouts = [r.with_trainer(logprobs) for r, logprobs in columns]
    header = Header(
        model=cfg.model,
        sampler=source if drawn else "",
        trainer=trainer,
        drawn=drawn,
        dtypes=vars(cfg.dtypes) if drawn or trainer else {},
        versions=versions(),
        settings=settings,
        bounds=bounds,
        **_model_hashes(cfg.model),
    )
    return len(rollouts), write_capsule(header, rollouts, out)


def _check(source: str, out: Path, cfg: AuditConfig, trainer: str, bounds: Bounds) -> None:
    """Raise ValueError for what cannot be made, before anything is computed."""
    if out.exists():
        raise ValueError(f"capsule: {out} exists already; choose another --out")
    if trainer and trainer not in TRAINERS:
        raise ValueError(f"capsule: trainer {trainer} is not known; choose {', '.join(TRAINERS)}")
    check_draw(cfg, "capsule")
    bounds.tolerances.check()
    check_one_vllm(source, trainer)
    computes = source in SAMPLERS or trainer
    if source not in SAMPLERS and not Path(source).exists():
        raise ValueError(f"capsule: {source} is no file and no engine ({', '.join(SAMPLERS)})")
    if computes and not cfg.model:
        raise ValueError("capsule: an engine needs a model; name its folder with --model")
    if computes:
        needs_torch(f"capsule: {source if source in SAMPLERS else f'--trainer {trainer}'}")


def check_one_vllm(sampler: str, trainer: str) -> None:
    """Raise ValueError for two vLLM engines: a process holds one."""
    if {sampler, trainer} <= {"vllm", "vllm-zerokl"}:
        raise ValueError(f"capsule: {sampler} and {trainer} are two vLLM engines in one process; ask one")


def _of_log(path: Path, format: LogFormat, cfg: AuditConfig) -> list[LoggedRollout]:
    """The first completions of a log. Raises ValueError for one without ids or logprobs, or where none is."""
    try:
        remedy = find_format(log_files(path)[0], format).remedy
        rollouts = []
        for place, rollout in islice(read_rollouts(path, format), cfg.n):
            try:
                rollout.check_scored(remedy)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            rollouts.append(rollout.drawn_with(cfg.given_params))
    except ValueError as error:
        raise ValueError(f"capsule: {error}") from None
    if not rollouts:
        raise ValueError(f"capsule: {path} holds no completion")
    return rollouts


def _model_hashes(model: str) -> dict[str, object]:
    """What a header says of a model's weights and files; nothing where no local folder is named."""
    folder = Path(model)
    if not model or not folder.is_dir():
        return {}
    hashes = weight_hashes(folder)
    listed = hashes if len(hashes) <= MOST_TENSORS else {}
    return {"weights": hash_of_all(hashes), "tensors": listed, "files": file_hashes(folder)}
