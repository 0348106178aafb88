"""vLLM with zerokl's decoder inside, over the copy of the Parameters that an ExactModel has."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import PreTrainedModel

from ..engine.config.vllm_section import VllmConfig
from ..engine.rollout.vllm.sampler import VllmZeroklSampler
from .transformers import ExactModel


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """vLLM seeds torch, NumPy and random when it starts. TRL shuffles the samples with torch's numbers."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def open_vllm(model: PreTrainedModel, policy: ExactModel, cfg: VllmConfig) -> VllmZeroklSampler:
    """The sampler `vllm-zerokl` in this process, which computes with the memory of `policy`.

    model: the one that `policy` was made of. vLLM reads its configuration, and no checkpoint. Raises
    ValueError where vLLM is not installed, does not start, or refuses a setting.
    """
    if cfg.multiprocess:
        raise ValueError(
            "exact_trl: vllm.multiprocess (True) is refused: vLLM reads the trainer's own memory"
        )
    settings = json.loads(model.config.to_json_string(use_diff=False))
    settings["architectures"] = [type(model).__name__]
    decoder = policy.decoder
    with TemporaryDirectory(prefix="zerokl-vllm-") as folder, _kept_random_state():
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        return VllmZeroklSampler(
            Path(folder), decoder.config, decoder.flat.detach(), cfg, decoder.numerics, has_weights=False
        )
