"""vLLM as it comes names the experts of every row: those that its own routers choose."""

from pathlib import Path

import pytest

from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm

# It runs in a process of its own, because vLLM keeps its threads and settings for good.
CODE = """
if __name__ == "__main__":
    import sys
    from pathlib import Path

    import numpy as np
    import torch
    from zerokl.engine.rollout.types import GenerationParams
    from zerokl.engine.rollout.vllm.generator import VllmGenerator
    from zerokl.kernels.sampling_params import SamplingParams
    from zerokl.model.checkpoint import load_decoder
    from zerokl.model.context import PackedContext
    from zerokl.model.routing import RecordedRouting

    folder = Path(sys.argv[1])
    decoder = load_decoder(folder, torch.float32)
    config = decoder.config
    engine = VllmGenerator(folder, torch.float32, 256, experts=config.experts)
    prompts = [[5, 6, 7], [5, 6, 7], [9, 8] * 40, list(range(5, 50))]
    params = GenerationParams(SamplingParams(), 1, 12, frozenset({1}), experts=True)
    rollouts = [r for seed in range(2) for r in engine.generate(prompts, params, seed)]
    rows = differ = shifted = 0
    for r in rollouts:
        routing, ids = RecordedRouting(config.experts), r.ids[:-1]
        with torch.no_grad():
            decoder.hidden(torch.tensor(ids), PackedContext([len(ids)], config, routing=routing))
        ours, named = (np.sort(x[: len(ids)], 2) for x in (routing.taken().numpy(), r.experts))
        assert named.shape == (len(ids), 1, 2) and named.dtype == np.uint8, (named.shape, named.dtype)
        rows += len(ids)
        differ += int((ours != named).any(2).sum())
        shifted += int((ours[:-1] != named[1:]).any(2).sum())
    print("RESULT", rows, differ, shifted)
"""


def test_every_row_has_the_experts_of_its_router(moe: Path, tmp_path: Path):
    """Two engines in fp32 differ by rounding, which changes hardly any choice."""
    (tmp_path / "named.py").write_text(CODE)
    process = run_python(str(tmp_path / "named.py"), str(moe))
    assert process.returncode == 0, process.stderr[-3000:]
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("RESULT")]
    rows, differ, shifted = map(int, line.split()[1:])
    assert rows > 300
    assert differ <= 1
    assert shifted > 20, "control: the rows before"
