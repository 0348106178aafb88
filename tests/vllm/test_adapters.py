"""vLLM's own LoRA reads the adapters that zerokl writes."""

from pathlib import Path

import pytest

from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm

# It runs in a process of its own, because vLLM keeps its threads and settings for good.
CODE = """
if __name__ == "__main__":
    import sys
    from pathlib import Path

    import torch
    from zerokl.engine.rollout.vllm.sampler import prepare_vllm
    from zerokl.kernels.sampling_params import SamplingParams
    from zerokl.model.adapters import AdapterLayout, Adapters, adapted_layout, first_adapters
    from zerokl.model.checkpoint import load_decoder
    from zerokl.model.decoder import Decoder
    from zerokl.model.lora import Lora
    from zerokl.model.peft import write_adapter
    from zerokl.model.scoring import logprobs, pack

    model, folder = map(Path, sys.argv[1:])
    base, lora = load_decoder(model, torch.float32), Lora(8, 16.0)
    layout = AdapterLayout(adapted_layout(base.config, lora), lora)
    flat = first_adapters(layout, 0)
    for i, (name, view) in enumerate(layout.views(flat).items()):
        if "lora_B" in name:
            view.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(i))
    write_adapter(folder, layout, flat, str(model))
    weights = torch.zeros(layout.model.numel)
    whole = base.layout.checkpoint_views(base.flat.detach())
    for name, view in layout.model.checkpoint_views(weights).items():
        view.copy_(whole[name])
    merged = Decoder(base.config, weights.clone(), layout.model)
    Adapters(layout, flat, weights, merged, torch.float32)
    ids = [5 + 7 * i % 50 for i in range(40)]

    prepare_vllm(multiprocess=False)
    from vllm import LLM
    from vllm import SamplingParams as VllmParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(model),
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
    )
    params = VllmParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
    for request in (LoRARequest("trained", 1, str(folder)), None):
        (out,) = llm.generate([{"prompt_token_ids": ids}], params, lora_request=request, use_tqdm=False)
        by_vllm = torch.tensor([row[t].logprob for row, t in zip(out.prompt_logprobs[1:], ids[1:])])
        with torch.no_grad():
            packed = pack([(ids[:1], ids[1:])])
            ours = [logprobs(decoder, packed, SamplingParams())[0] for decoder in (merged, base)]
        print("RESULT", *(float((by_vllm - x).abs().max()) for x in ours))
"""


def test_vllm_computes_with_the_adapters_of_a_checkpoint(model: Path, tmp_path: Path):
    """Beside the merged weights and the base. vLLM adds the adapter's product to that of the base."""
    (tmp_path / "adapters.py").write_text(CODE)
    process = run_python(str(tmp_path / "adapters.py"), str(model), str(tmp_path / "adapter"))
    assert process.returncode == 0, process.stderr[-3000:]
    lines = [line.split()[1:] for line in process.stdout.splitlines() if line.startswith("RESULT")]
    (with_adapter, other), (also_other, without) = (map(float, line) for line in lines)
    assert with_adapter < 1e-3 < 1e-2 < other
    assert without < 1e-3 < 1e-2 < also_other, "control: without the adapter"
