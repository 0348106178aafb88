"""One rank of a run whose vLLM has a fault in rank 1. Not a test: a script of test_ranks.py.

    torchrun ... ranks_process.py FAULT WORDS

WORDS are of `zerokl train`. FAULT is stale (the weights that vLLM computes with are a copy of the first ones)
or seed (tokens are drawn with another seed).
"""

import os
import sys
from dataclasses import replace
from typing import Any

from zerokl.cli import main
from zerokl.engine.processes.shared_tensor import Handle, map_tensor
from zerokl.engine.rollout.types import Request
from zerokl.engine.rollout.vllm.sampler import prepare_vllm


def copies_once(self, info: Any) -> None:
    """In place of SharedWeightsEngine.init_transfer_engine."""
    flat = self.model.decoder.flat
    shared = map_tensor(Handle(info.path, info.device, info.inode), flat.numel(), flat.dtype)
    self.model.use(shared.clone())


def plant_seed() -> None:
    """Draw with another seed."""
    from zerokl.engine.rollout.vllm import draw

    request_arguments = draw.request_arguments

    def with_another_seed(request: Request, number: int) -> dict[str, Any]:
        key = replace(request.rng_key, seed=request.rng_key.seed + 1)
        return request_arguments(replace(request, rng_key=key), number)

    draw.request_arguments = with_another_seed


def plant_stale() -> None:
    """Compute with the first weights."""
    from zerokl.engine.rollout.vllm.weight_transfer import SharedWeightsEngine

    SharedWeightsEngine.init_transfer_engine = copies_once


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        prepare_vllm(multiprocess=False)  # before anything imports vLLM
        {"seed": plant_seed, "stale": plant_stale}[sys.argv[1]]()
    sys.exit(main(["train", *sys.argv[2:]]))
