"""vLLM as an engine of an audit: stock (its own model, attention and sampler), and with zerokl inside.

Of stock vLLM nothing is patched: a score is its prompt logprobs, and operations are read by forward hooks on
its in-process model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...model.config import ModelConfig
from ...model.decoder import Hook, no_hook
from ...model.op_names import in_order, output
from ...verify.trace import Trace
from ..config import VllmConfig
from ..shared_tensor import SharedTensor
from .engine import Pair, ZeroklEngine, trace_decoder
from .types import GenerationParams, RngKey, Rollout
from .vllm.installed import is_cpu_build
from .vllm.sampler import ON_A_GPU, VllmSampler, prepare_vllm
from .vllm.stock import refuse_after_exact

_CONTEXT, _CACHE_BYTES = 4096, 1 << 30
Record = Callable[[str, torch.Tensor], None]


class VllmZeroklEngine(ZeroklEngine):
    """Draws with vLLM that runs our decoder, and is traced there; scores with the same weights outside of it.
    On a GPU both are in this process. In a process of its own (multiprocess) vLLM's model is out of reach,
    and the trace is of a forward outside of it.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        head: torch.dtype | None = None,
        device: torch.device | None = None,
        multiprocess: bool = False,
    ):
        super().__init__(folder, dtype, head, device, "vllm-zerokl")
        self.traced_outside = multiprocess
        weights = self.decoder.flat.detach()
        if self.decoder.device.type == "cpu":
            weights = SharedTensor(self.decoder.layout.numel, dtype)
            self.decoder.move_to(weights.tensor)
        cfg = VllmConfig(context=_CONTEXT, cache_bytes=_CACHE_BYTES, multiprocess=multiprocess)
        self.sampler = VllmSampler(folder, self.decoder.config, weights, cfg, self.decoder.numerics)

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        """See Engine."""
        return self.sampler.generate(prompts, generation_params, RngKey(seed, 0))

    @torch.no_grad()
    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        """See Engine."""
        return trace_decoder(
            self.decoder, pair, sampling_params, None if self.traced_outside else self._forward
        )

    def _forward(self, ids: torch.Tensor, hook: Hook) -> torch.Tensor:
        """vLLM's forward over one prompt, of which it draws one token."""
        passes: list[torch.Tensor] = []

        def heard(name: str, x: torch.Tensor) -> None:
            hook(name, x)
            if name == "norm":
                passes.append(x.clone())

        self.drop_caches()
        self.sampler.llm.apply_model(lambda model: setattr(model, "hook", heard))
        try:
            self.sampler.generate(
                [ids.tolist()], GenerationParams(SamplingParams(), 1, 1, frozenset()), RngKey(0, 0)
            )
        finally:
            self.sampler.llm.apply_model(lambda model: setattr(model, "hook", no_hook))
        return torch.cat(passes)

    def drop_caches(self) -> bool:
        """See Engine."""
        return self.sampler.llm.reset_prefix_cache()


class VllmEngine:
    """Stock vLLM in this process, uncompiled, without a prefix cache."""

    traced_outside = False

    def __init__(self, folder: Path, dtype: torch.dtype, context: int, head: torch.dtype | None = None):
        refuse_after_exact()
        prepare_vllm(multiprocess=False)
        from vllm import LLM

        self.name, self._layers = "vllm", ModelConfig.from_file(folder).layers
        self._device = torch.device("cpu" if is_cpu_build() else "cuda")  # where vLLM's sampler computes
        self.llm = LLM(
            model=str(folder),
            dtype=_name(dtype),
            max_model_len=min(context, _CONTEXT),
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_num_batched_tokens=max(
                2048, min(context, _CONTEXT)
            ),  # a sequence is one forward, never chunks
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
            kv_cache_memory_bytes=_CACHE_BYTES,
            hf_overrides={} if head in (None, dtype) else {"head_dtype": _name(head)},
            **({} if is_cpu_build() else ON_A_GPU),
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        """See Engine."""
        d = generation_params.sampling_params
        params = [
            _params(
                temperature=d.temperature,
                top_k=d.top_k,
                top_p=d.top_p,
                max_tokens=generation_params.max_tokens,
                logprobs=0,
                seed=seed * len(prompts) + i,
                stop_token_ids=sorted(generation_params.stop_ids),
            )
            for i in range(len(prompts))
        ]
        outputs = self._run([list(p) for p in prompts], params)
        rollouts = []
        for i, out in enumerate(outputs):
            (done,) = out.outputs
            logprobs = np.array(
                [done.logprobs[n][t].logprob for n, t in enumerate(done.token_ids)], np.float32
            )
            rollouts.append(
                Rollout(i, 0, tuple(prompts[i]), tuple(done.token_ids), logprobs, done.finish_reason, 0)
            )
        return rollouts

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute with these weights (checkpoint names, any float dtype), rounded to the model's, from now
        on.
        """
        from .vllm.weights import pack_head

        # vLLM's own way, which undoes and repeats what it did to the weights after it first loaded them. In
        # process: nothing is pickled.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(list(weights.items()))})
        self.llm.apply_model(pack_head)

    def scores_together(self, sampling_params: SamplingParams) -> bool:
        """Whether `score` can put several sequences into one forward:

        for the distribution of vLLM's prompt logprobs.
        """
        return sampling_params.temperature == 0.0 or sampling_params == SamplingParams()

    def score(
        self, pairs: Sequence[Pair], sampling_params: SamplingParams, together: bool = True
    ) -> list[np.ndarray]:
        """See Engine.

        vLLM's prompt logprobs ignore temperature, top-k and top-p; with any, its logits go through its
        sampler's steps.
        """
        if not self.scores_together(sampling_params):
            return [self._logprobs(self._logits(pair), pair[1], sampling_params) for pair in pairs]
        ids = [[*p, *c] for p, c in pairs]
        params = _params(max_tokens=1, prompt_logprobs=0)
        outputs = self._run(ids, params) if together else [self._run([x], params)[0] for x in ids]
        return [_prompt_logprobs(out, len(c)) for out, (_, c) in zip(outputs, pairs, strict=True)]

    def _logits(self, pair: Pair) -> torch.Tensor:
        """vLLM's logits [T, V] of one sequence's inputs."""
        return self._hooked(pair, lambda model, record: [_logits_hook(model, record)])["logits"]

    def _logprobs(
        self, logits: torch.Tensor, completion: Sequence[int], sampling_params: SamplingParams
    ) -> np.ndarray:
        """As vllm/v1/sample/sampler.py computes them:

        temperature, top-k and top-p, log-softmax. logits [T, V] -> [C].
        """
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.sample.sampler import Sampler

        C, device = len(completion), self._device
        z = logits[-C:].to(device, torch.float32)
        if sampling_params.temperature > 0.0:
            z = Sampler.apply_temperature(
                z, torch.full((C,), sampling_params.temperature, device=device), all_random=True
            )
            k = (
                torch.full((C,), sampling_params.top_k, device=device)
                if 0 < sampling_params.top_k < z.shape[1]
                else None
            )
            p = (
                torch.full((C,), sampling_params.top_p, device=device)
                if sampling_params.top_p < 1.0
                else None
            )
            z = apply_top_k_top_p(z, k, p)
        drawn = torch.tensor([*completion], device=device).unsqueeze(1)
        return Sampler.compute_logprobs(z).gather(1, drawn).squeeze(1).cpu().numpy()

    def decode(self, pairs: Sequence[Pair], sampling_params: SamplingParams) -> None:
        """vLLM cannot be told which tokens to draw."""

    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        """See Engine."""
        found = self._hooked(pair, lambda model, record: list(_hooks(model, record)))
        found["logprob"] = torch.from_numpy(
            self._logprobs(found["logits"], pair[1], sampling_params)
        ).unsqueeze(1)
        return in_order(found, self._layers)

    def drop_caches(self) -> bool:
        """See Engine."""
        return False

    def _hooked(self, pair: Pair, attach: Callable[[torch.nn.Module, Record], list[Any]]) -> Trace:
        """What the hooks that `attach` puts on vLLM's model record of one sequence's forward. Its logits come
        in two calls: the last row, to draw from, then those before it, for the prompt's logprobs.
        """
        found: dict[str, list[torch.Tensor]] = {}

        def record(name: str, x: torch.Tensor) -> None:
            found.setdefault(name, []).append(x.reshape(x.shape[0], -1).to("cpu", copy=True))

        handles = self.llm.apply_model(lambda model: attach(model, record))[0]
        try:
            self._run([[*pair[0], *pair[1][:-1]]], _params(max_tokens=1, prompt_logprobs=0))
        finally:
            for handle in handles:
                handle.remove()
        return {name: torch.cat(parts[::-1]) for name, parts in found.items()}

    def _run(self, ids: list[list[int]], params: Any) -> list[Any]:
        return self.llm.generate([{"prompt_token_ids": x} for x in ids], params, use_tqdm=False)


def _params(**given: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(ignore_eos=True, detokenize=False, **given)


def _prompt_logprobs(out: Any, tokens: int) -> np.ndarray:
    """The logprobs of the last `tokens` tokens of a prompt."""
    rows = list(zip(out.prompt_logprobs, out.prompt_token_ids, strict=True))[-tokens:]
    return np.array([row[token].logprob for row, token in rows], np.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _logits_hook(causal: torch.nn.Module, record: Record) -> Any:
    return causal.logits_processor.register_forward_hook(lambda _m, _i, out: record("logits", out))


def _hooks(causal: torch.nn.Module, record: Record) -> Iterator[Any]:
    """Attach hooks to vLLM's Qwen and Llama models; fused projections are split, and fused residual additions
    told apart.
    """
    model = causal.model
    current = [0]  # the layer whose attention runs: all layers share one rotary module

    def after(module: torch.nn.Module, say: Callable[[Any], None]) -> Any:
        return module.register_forward_hook(lambda _m, _i, out: say(out))

    def norm(name: str, residual: str) -> Callable[[Any], None]:
        def say(out: Any) -> None:
            if isinstance(out, tuple):
                record(name, out[0])
                record(residual, out[1])
            else:
                record(name, out)

        return say

    def split(names: Sequence[str], widths: Callable[[], Sequence[int]]) -> Callable[[Any], None]:
        def say(out: Any) -> None:
            for name, part in zip(names, output(out).split(list(widths()), dim=-1), strict=True):
                record(name, part)

        return say

    yield after(model.embed_tokens, lambda out: record("embed", out))
    for i, layer in enumerate(model.layers):
        at, attn, mlp = f"layers.{i}.", layer.self_attn, layer.mlp
        yield after(layer.input_layernorm, norm(at + "input_norm", f"layers.{i - 1}.mlp_residual"))
        yield attn.register_forward_pre_hook(lambda *_, i=i: current.__setitem__(0, i))
        widths = lambda a=attn: (a.q_size, a.kv_size, a.kv_size)
        yield after(attn.qkv_proj, split([at + n for n in ("q_proj", "k_proj", "v_proj")], widths))
        for n in ("q_norm", "k_norm"):
            if hasattr(attn, n):
                yield after(getattr(attn, n), lambda out, name=at + n: record(name, output(out)))
        yield after(attn.attn, lambda out, name=at + "attention": record(name, out))
        yield after(attn.o_proj, lambda out, name=at + "o_proj": record(name, output(out)))
        yield after(layer.post_attention_layernorm, norm(at + "post_norm", at + "attention_residual"))
        half = lambda m=mlp: (m.gate_up_proj.output_size // 2,) * 2
        yield after(mlp.gate_up_proj, split([at + "gate_proj", at + "up_proj"], half))
        yield after(mlp.act_fn, lambda out, name=at + "silu_mul": record(name, out))
        yield after(mlp.down_proj, lambda out, name=at + "down_proj": record(name, output(out)))

    def rope(out: Any) -> None:
        for name, x in zip(("q_rope", "k_rope"), out, strict=True):
            record(f"layers.{current[0]}.{name}", x)

    yield after(model.layers[0].self_attn.rotary_emb, rope)
    yield after(model.norm, norm("norm", f"layers.{len(model.layers) - 1}.mlp_residual"))
    yield _logits_hook(causal, record)
