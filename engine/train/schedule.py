"""The learning rate of an update.

With p from 0 at the end of the warm-up to 1 at the end of the run, its share of lr falls from 1 to
min_lr_ratio as

    linear                1 - p
    cosine                (1 + cos(pi p)) / 2                 Loshchilov & Hutter, arXiv:1608.03983
    cosine_with_restarts  the same, of the fraction of cycles * p
    wsd                   min(1, (1 - p) / decay_ratio)       Hu et al., arXiv:2404.06395, with a linear decay

No step of it depends on an earlier one, so a resumed run needs the number of updates only.
"""

import math

from ..config.training_sections import OptimizerConfig


def learning_rate(cfg: OptimizerConfig, update: int, total_updates: int) -> float:
    """Of the update with this number, from 0. total_updates: of the whole run, the warm-up included."""
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    progress = (update - cfg.warmup_steps) / max(1, total_updates - cfg.warmup_steps)
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * _shape(cfg, progress))


def _shape(cfg: OptimizerConfig, progress: float) -> float:
    """Of a schedule that falls, from 1 to 0."""
    if cfg.schedule == "linear":
        return 1.0 - progress
    if cfg.schedule == "wsd":
        return min(1.0, (1.0 - progress) / cfg.decay_ratio)
    restarts = cfg.cycles if cfg.schedule == "cosine_with_restarts" else 1
    return 0.5 * (1.0 + math.cos(math.pi * (restarts * progress % 1.0 if restarts > 1 else progress)))
