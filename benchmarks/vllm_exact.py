"""The sampler vllm-exact beside the trainer's forward over the same weights.

Every token's two logprobs are compared bit for bit. device/beside_vllm.py runs this file in a process of its
own, because vLLM keeps settings and memory for good. By hand, on a GPU with vLLM installed:

    python benchmarks/vllm_exact.py bfloat16 --device cuda           # a line of JSON for each version
    python benchmarks/vllm_exact.py bfloat16 --device cpu --small    # the same code on a CPU

On a CPU vLLM has other kernels, so bits differ there. On an H100 with vLLM 0.32, bf16 and fp16 had no unequal
bit. fp32 had some, since vLLM's compiled rope has other bits there.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from zerokl.benchmarks.device.processes import serve
from zerokl.benchmarks.machine import Machine, Row, name_of
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.sampling_params import SamplingParams

_MODEL = "vLLM's own model"


def compare(m: Machine, dtype_name: str) -> Iterator[Row]:
    """Draw rollouts with two versions of random weights, and score them with the trainer's forward.

    The widths are those of the 1.7B, for which vLLM has tuned tiles.
    """
    from zerokl.engine.config.vllm_section import VllmConfig
    from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
    from zerokl.engine.rollout.vllm import exact
    from zerokl.engine.rollout.vllm.installed import require_vllm
    from zerokl.kernels.tile_tables import tile_table
    from zerokl.model.checkpoint_writing import write_checkpoint
    from zerokl.model.decoder import Numerics
    from zerokl.model.scoring import logprobs, pack

    dtype, sampling_params = getattr(torch, dtype_name), SamplingParams(0.9)
    if not m.on_gpu:
        exact.ENVIRONMENT, exact.ARGUMENTS = {}, {}
    numerics = Numerics(tiles=tile_table(require_vllm()))
    decoder = m.decoder("toy" if m.small else "1.7B", 2, m.vocab, dtype, numerics)
    flat = decoder.flat.detach()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_checkpoint(model, decoder.layout, flat)
        sampler = exact.VllmExactSampler(
            model, decoder.config, decoder.layout, flat, VllmConfig(context=512, cache_bytes=1 << 28)
        )
        generator = torch.Generator().manual_seed(2)
        prompts = [torch.randint(100, (n,), generator=generator).tolist() for n in (3, 17, 33, 64, 130, 300)]
        generation_params = GenerationParams(sampling_params, 4, 8 if m.small else 96, frozenset())
        for version in (0, 1):
            if version:
                flat.mul_(0.875)
                sampler.sync_weights(version)
            rollouts = complete(sampler, prompts, generation_params, RngKey(0, version))
            with torch.no_grad():
                scored = logprobs(decoder, pack([r.pair for r in rollouts]), sampling_params)[0].cpu()
            sampled = torch.cat([torch.from_numpy(r.logprobs) for r in rollouts])
            what = f"{_MODEL} {name_of(dtype)}, weights {version}: {len(sampled)} tokens beside the trainer's"
            yield {"what": what, "unequal" if m.on_gpu else "differ": count_unequal(scored, sampled)}


if __name__ == "__main__":
    serve(compare)
