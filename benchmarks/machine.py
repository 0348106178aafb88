"""Where the benchmarks of device.py run, how big they are, and one row of their table."""

import statistics
import time
from collections.abc import Callable

import torch
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

Row = dict[str, object]
# Seconds after which the table is printed, whatever is left to do (device.sh ends the process at 480).
END_S = 460
# Clock cycles for which the GPU waits before a timed run, about a millisecond: the launches are in its queue
# by then, so that Python is not timed. And what is written before it, to have nothing of the run's inputs in
# the L2 cache.
_WAIT_CYCLES, _FLUSH_BYTES = 2_000_000, 256 << 20
# hidden, intermediate, layers, query heads, key-value heads, head width
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128),
    "1.7B": (2048, 6144, 28, 16, 8, 128),
    "8B": (4096, 12288, 36, 32, 8, 128),
}
TOY = {"toy": (64, 96, 2, 4, 2, 32)}


class Machine:
    """Where things run, and how big they are."""

    def __init__(self, dry: bool):
        self.dry, self.device = dry, torch.device("cpu" if dry else "cuda")
        self.shapes = TOY if dry else SHAPES
        self.vocab, self.tokens, self.length = (128, 64, 32) if dry else (151936, 4096, 512)
        self.repeats = 1 if dry else 10
        self._began = time.perf_counter()
        self._flush = None if dry else torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def elapsed_s(self) -> float:
        """Seconds since the start; at END_S the table is printed."""
        return time.perf_counter() - self._began

    def randn(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def time_ms(self, run: Callable[[], object]) -> float:
        """Median of `repeats` runs after two that warm up.

        On a GPU: of the GPU's own time, from a cold L2 cache.
        """
        times = []
        for i in range(self.repeats + 2):
            if self.dry:
                began = time.perf_counter()
                run()
                times.append(1e3 * (time.perf_counter() - began))
            else:
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flush.zero_()
                torch.cuda._sleep(_WAIT_CYCLES)
                a.record()
                run()
                b.record()
                b.synchronize()
                times.append(a.elapsed_time(b))
            if i == 1:
                times = []
        return statistics.median(times)

    def decoder(self, name: str, layers: int, vocab: int, dtype: torch.dtype) -> Decoder:
        D, inner, _, heads, kv_heads, head_dim = self.shapes[name]
        config = ModelConfig.from_dict(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": vocab,
                "hidden_size": D,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": head_dim,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
                "attention_bias": False,
            }
        )
        layout = Layout(config)
        torch.manual_seed(0)
        flat = torch.randn(layout.numel, device=self.device) * D**-0.5
        for view in layout.views(flat).values():
            if view.dim() == 1:
                view.fill_(1.0)
        return Decoder(config, flat.to(dtype), layout)


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def row(
    m: Machine, what: str, amount: float, unit: str, ours: Callable[[], object], plain: Callable[[], object]
) -> Row:
    """amount: floating-point operations (TFLOP/s) or bytes (GB/s) of one run."""
    a, b = m.time_ms(ours), m.time_ms(plain)
    scale = {"TFLOP/s": 1e9, "GB/s": 1e6}[unit]
    return {
        "what": what,
        "ours_ms": a,
        "plain_ms": b,
        "rate": amount / scale / a,
        "unit": unit,
        "plain_over_ours": b / a,
    }
