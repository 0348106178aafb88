"""The machine that the benchmarks of device.sh run on, their sizes, and one row of their table."""

import statistics
import time
from collections.abc import Callable
from functools import cached_property

import torch
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import COMPUTE, Decoder, Numerics
from zerokl.model.weights import Layout

Row = dict[str, object]
# Seconds after which a part's table is printed, whatever is left to do. device.sh ends its process at 240.
END_S = 225
# Clock cycles for which the GPU waits before a timed run, about a millisecond. The launches are in its queue
# by then, so that Python is not timed.
_WAIT_CYCLES = 2_000_000
# Bytes that are written before a timed run, so that none of its inputs is in the L2 cache.
_FLUSH_BYTES = 256 << 20
# Name -> hidden width, MLP width, layers, query heads, key-value heads, head width.
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128),
    "1.7B": (2048, 6144, 28, 16, 8, 128),
    "8B": (4096, 12288, 36, 32, 8, 128),
}
TOY = {"toy": (64, 96, 2, 4, 2, 32)}


class Machine:
    """The device, and the sizes of everything that runs on it.

    small: toy sizes, which measure nothing. end_s: seconds from now until the results are due.
    """

    def __init__(self, device: str, small: bool, end_s: float = END_S):
        self.device, self.small, self._end_s = torch.device(device), small, end_s
        self.on_gpu = self.device.type == "cuda"
        self.shapes = TOY if small else SHAPES
        self.vocab, self.tokens, self.length = (128, 64, 32) if small else (151936, 4096, 512)
        self.repeats = 1 if small else 10
        self._began = time.perf_counter()

    @property
    def first_shape(self) -> str:
        """The name of the smallest model."""
        return next(iter(self.shapes))

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def left_s(self) -> float:
        """Seconds until the table is due."""
        return max(0.0, self._end_s - self.elapsed_s())

    @cached_property
    def _flush(self) -> torch.Tensor:
        return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def randn(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def time_ms(self, run: Callable[[], object]) -> float:
        """The median time of `repeats` runs, after two runs to warm up.

        On a GPU it is the GPU's own time, from a cold L2 cache.
        """
        times = []
        for i in range(self.repeats + 2):
            if not self.on_gpu:
                began = time.perf_counter()
                run()
                times.append(1e3 * (time.perf_counter() - began))
            else:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flush.zero_()
                torch.cuda._sleep(_WAIT_CYCLES)
                start.record()
                run()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            if i == 1:
                times = []
        return statistics.median(times)

    def decoder(
        self, name: str, layers: int, vocab: int, dtype: torch.dtype, numerics: Numerics = COMPUTE
    ) -> Decoder:
        """A Qwen3 with the widths of shape `name` and random weights."""
        return self.random_decoder(shape_config(self.shapes[name], vocab, layers), dtype, numerics)

    def random_decoder(
        self, config: ModelConfig, dtype: torch.dtype, numerics: Numerics = COMPUTE
    ) -> Decoder:
        """A model with random weights."""
        layout = Layout(config)
        torch.manual_seed(0)
        flat = torch.randn(layout.numel, device=self.device) * config.hidden_size**-0.5
        for view in layout.views(flat).values():
            if view.dim() == 1:
                view.fill_(1.0)
        return Decoder(config, flat.to(dtype), layout, numerics)


def shape_config(shape: tuple[int, ...], vocab: int, layers: int = 0, tied: bool = True) -> ModelConfig:
    """The configuration of a Qwen3 with the widths of a shape of SHAPES. layers: 0 is all of the shape's."""
    D, inner, all_layers, *heads = shape
    return model_config("Qwen3", D, inner, *heads, layers=layers or all_layers, vocab=vocab, tied=tied)


def model_config(
    family: str,
    D: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    layers: int,
    vocab: int,
    tied: bool = True,
    context: int = 4096,
    **fields: object,
) -> ModelConfig:
    """The configuration of a Qwen3, Qwen2 or Llama of these widths. fields: further ones of config.json."""
    return ModelConfig.from_dict(
        {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": family.lower(),
            "vocab_size": vocab,
            "hidden_size": D,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
            "attention_bias": False,
        }
        | fields
    )


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def row(
    m: Machine, what: str, amount: float, unit: str, ours: Callable[[], object], plain: Callable[[], object]
) -> Row:
    """One row of the table: the times of ours and of plain, and the rate of ours.

    amount: floating-point operations (TFLOP/s) or bytes (GB/s) of one run.
    """
    ours_ms, plain_ms = m.time_ms(ours), m.time_ms(plain)
    scale = {"TFLOP/s": 1e9, "GB/s": 1e6}[unit]
    return {
        "what": what,
        "ours_ms": ours_ms,
        "plain_ms": plain_ms,
        "rate": amount / scale / ours_ms,
        "unit": unit,
        "plain_over_ours": plain_ms / ours_ms,
    }
