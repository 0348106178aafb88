"""vLLM as an engine of an audit: `vllm`, as it comes, and `vllm-zerokl`, with zerokl inside.

Nothing of `vllm` is patched. Its prompt logprobs are the score, and forward hooks on its in-process model
read the operations.

Shapes: C completion tokens, T tokens of one sequence, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...engine.config.vllm_section import VllmConfig
from ...engine.processes.shared_tensor import SharedTensor
from ...engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from ...engine.rollout.vllm.generator import CACHE_BYTES, CONTEXT, VllmGenerator, request_params
from ...engine.rollout.vllm.installed import is_cpu_build
from ...engine.rollout.vllm.sampler import VllmZeroklSampler
from ...kernels.sampling_params import SamplingParams
from ...kernels.tile_tables import DEFAULT_TABLE, TileTable
from ...model.config import ModelConfig
from ...model.context import Hook, no_hook
from ...model.operation import Site
from ...model.operations import in_order, sites
from ...verify.operation_outputs import Trace
from .audited_model import known_config
from .engine import DISTRIBUTIONS, Pair, ZeroklEngine, trace_decoder
from .engine_settings import Settings, vllm_settings
from .module_trace import first_tensor
from .modules import module_at, output

Record = Callable[[str, torch.Tensor], None]
# The module of vLLM's causal models that makes logits (vllm/model_executor/layers/logits_processor.py).
_LOGITS = "logits_processor"


class VllmZeroklEngine(ZeroklEngine):
    """Draws with a vLLM that runs our decoder, and traces that decoder. Scores outside vLLM.

    Both compute with the same weights. On a GPU both are in this process. With `multiprocess`, vLLM runs in a
    process of its own. Its model is then out of reach, so the trace is of a forward outside vLLM.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        head: torch.dtype | None = None,
        device: torch.device | None = None,
        multiprocess: bool = False,
        tiles: TileTable = DEFAULT_TABLE,
    ):
        super().__init__(folder, dtype, head, device, "vllm-zerokl", tiles)
        self.traced_outside = multiprocess
        weights = self.decoder.flat.detach()
        if self.decoder.device.type == "cpu":
            weights = SharedTensor(self.decoder.layout.numel, dtype)
            self.decoder.move_to(weights.tensor)
        cfg = VllmConfig(context=CONTEXT, cache_bytes=CACHE_BYTES, multiprocess=multiprocess)
        self.sampler = VllmZeroklSampler(folder, self.decoder.config, weights, cfg, self.decoder.numerics)

    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]:
        return complete(self.sampler, prompts, generation_params, RngKey(seed, 0))

    @torch.no_grad()
    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        return trace_decoder(
            self.decoder, pair, sampling_params, None if self.traced_outside else self._forward
        )

    def _forward(self, ids: torch.Tensor, hook: Hook) -> torch.Tensor:
        """vLLM's forward over one prompt, after which it draws one token: hidden states [T, D]."""
        hidden_of_passes: list[torch.Tensor] = []

        def hook_and_keep(name: str, x: torch.Tensor) -> None:
            hook(name, x)
            if name == "norm":
                hidden_of_passes.append(x.clone())

        self.drop_caches()
        self.sampler.llm.apply_model(lambda model: setattr(model, "hook", hook_and_keep))
        try:
            one_token = GenerationParams(SamplingParams(), 1, 1, frozenset())
            complete(self.sampler, [ids.tolist()], one_token, RngKey(0, 0))
        finally:
            self.sampler.llm.apply_model(lambda model: setattr(model, "hook", no_hook))
        return torch.cat(hidden_of_passes)

    def settings(self) -> Settings:
        """Of a vLLM in another process, only our decoder's settings are known."""
        return super().settings() if self.traced_outside else vllm_settings(self.sampler.llm)

    def drop_caches(self) -> bool:
        return self.sampler.llm.reset_prefix_cache()


class VllmEngine(VllmGenerator):
    """vLLM as it comes in this process, uncompiled, without a prefix cache.

    by_modules: trace modules by vLLM's names, also of a known family.
    """

    traced_outside = False

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        context: int,
        head: torch.dtype | None = None,
        by_modules: bool = False,
    ):
        super().__init__(folder, dtype, context, head)
        self.name, self._config = "vllm", None if by_modules else known_config(folder)
        self._device = torch.device("cpu" if is_cpu_build() else "cuda")  # where vLLM's sampler computes

    def scores_together(self, sampling_params: SamplingParams) -> bool:
        """Whether `score` can put several sequences into one forward.

        It can for the distribution that vLLM's prompt logprobs are under.
        """
        plain = sampling_params.temperature in (0.0, 1.0) and not sampling_params.truncates
        return plain and not sampling_params.changes_logits

    def score(
        self, pairs: Sequence[Pair], sampling_params: SamplingParams, together: bool = True
    ) -> list[np.ndarray]:
        """vLLM's prompt logprobs ignore temperature and filters. Where one of them is set, vLLM's logits go
        through the steps of its sampler instead.
        """
        if not self.scores_together(sampling_params):
            return [self._logprobs(self._logits(pair), pair[1], sampling_params) for pair in pairs]
        sequences = [[*prompt, *completion] for prompt, completion in pairs]
        request = request_params(max_tokens=1, prompt_logprobs=0)
        if together:
            outputs = self.run(sequences, request)
        else:
            outputs = [self.run([ids], request)[0] for ids in sequences]
        return [
            _prompt_logprobs(out, len(completion))
            for out, (_, completion) in zip(outputs, pairs, strict=True)
        ]

    def _logits(self, pair: Pair) -> torch.Tensor:
        """vLLM's logits [T, V] of one sequence's inputs."""
        name = "logits"
        return self._hooked(pair, lambda model, record: self._attach(model, record, [name]))[name]

    def _attach(self, model: torch.nn.Module, record: Record, only: Collection[str] = ()) -> list[Any]:
        if self._config is None:
            return _module_hooks(model, record, only)
        return _hooks(model, record, self._config, only)

    def _logprobs(
        self, logits: torch.Tensor, completion: Sequence[int], sampling_params: SamplingParams
    ) -> np.ndarray:
        """logits [T, V] -> logp [C] of the completion's tokens."""
        logp = self._log_softmax(logits[-len(completion) :], sampling_params)
        drawn = torch.tensor([*completion], device=logp.device).unsqueeze(1)
        return logp.gather(1, drawn).squeeze(1).cpu().numpy()

    def _log_softmax(self, logits: torch.Tensor, sampling_params: SamplingParams) -> torch.Tensor:
        """logits [C, V] -> logp of every token [C, V] fp32, in the steps of vllm/v1/sample/sampler.py.

        The steps are: allowed tokens, bias, temperature, min-p, top-k and top-p, log-softmax.
        """
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.sample.sampler import Sampler

        C, device = len(logits), self._device
        z = logits.to(device, torch.float32)
        temperature, top_k, top_p, min_p, logit_bias, allowed = sampling_params.check(z.shape[1])
        if allowed is not None:
            forbidden = torch.ones(z.shape[1], dtype=torch.bool, device=device)
            forbidden[list(allowed)] = False
            z = z.masked_fill(forbidden, float("-inf"))
        if logit_bias:
            tokens, bias = zip(*logit_bias, strict=True)
            z = z.clone()
            z[:, list(tokens)] += torch.tensor(bias, device=device)
        if temperature > 0.0:
            z = Sampler.apply_temperature(z, torch.full((C,), temperature, device=device), all_random=True)
            z = _after_min_p(z, min_p) if min_p > 0.0 else z
            k = torch.full((C,), top_k, device=device) if 0 < top_k < z.shape[1] else None
            p = torch.full((C,), top_p, device=device) if top_p < 1.0 else None
            z = apply_top_k_top_p(z, k, p)
        return Sampler.compute_logprobs(z)

    def distributions(self, pair: Pair, sampling_params: SamplingParams) -> Iterator[torch.Tensor]:
        for logits in self._logits(pair)[-len(pair[1]) :].split(DISTRIBUTIONS):
            yield self._log_softmax(logits, sampling_params).cpu()

    def settings(self) -> Settings:
        return vllm_settings(self.llm)

    def decode(self, pairs: Sequence[Pair], sampling_params: SamplingParams) -> None:
        """It returns None: vLLM cannot be told which tokens to draw."""

    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        trace = self._hooked(pair, self._attach)
        logp = self._logprobs(trace["logits"], pair[1], sampling_params)
        trace["logprob"] = torch.from_numpy(logp).unsqueeze(1)
        return in_order(trace, self._config.layers, self._config) if self._config else trace

    def drop_caches(self) -> bool:
        return False

    def _hooked(self, pair: Pair, attach: Callable[[torch.nn.Module, Record], list[Any]]) -> Trace:
        """The records of one sequence's forward, made by hooks that `attach` puts on vLLM's model.

        vLLM computes the logits in two calls: first the last row, to draw from it, then the rows before it,
        for the prompt's logprobs.
        """
        records: dict[str, list[torch.Tensor]] = {}

        def record(name: str, x: torch.Tensor) -> None:
            records.setdefault(name, []).append(x.reshape(x.shape[0], -1).to("cpu", copy=True))

        handles = self.llm.apply_model(lambda model: attach(model, record))[0]
        try:
            self.run([[*pair[0], *pair[1][:-1]]], request_params(max_tokens=1, prompt_logprobs=0))
        finally:
            for handle in handles:
                handle.remove()
        return {name: torch.cat(parts[::-1]) for name, parts in records.items()}


def _after_min_p(z: torch.Tensor, min_p: float) -> torch.Tensor:
    """z [C, V] in the step of MinPLogitsProcessor.apply (vllm/v1/sample/logits_processor/builtin.py)."""
    p = torch.softmax(z, dim=-1)
    return z.masked_fill(p < p.amax(dim=-1, keepdim=True) * min_p, float("-inf"))


def _prompt_logprobs(out: Any, tokens: int) -> np.ndarray:
    """The logprobs of the last `tokens` tokens of a prompt."""
    rows = list(zip(out.prompt_logprobs, out.prompt_token_ids, strict=True))[-tokens:]
    return np.array([row[token].logprob for row, token in rows], np.float32)


def _after(module: torch.nn.Module, take: Callable[[Any], None]) -> Any:
    """Hand every output of `module` to `take`. Returns the hook's handle."""
    return module.register_forward_hook(lambda _module, _inputs, out: take(out))


def _module_hooks(model: torch.nn.Module, record: Record, only: Collection[str] = ()) -> list[Any]:
    """Attach hooks to every module, under its own name; the one that makes logits is called that.

    only: these names; all where it is empty. A module that returns no tensor of floats is left out.
    """

    def take(name: str) -> Callable[[Any], None]:
        def hook(out: Any) -> None:
            if (x := first_tensor(out)) is not None:
                record(name, x)

        return hook

    modules = {"logits" if name == _LOGITS else name: m for name, m in model.named_modules() if name}
    return [_after(m, take(name)) for name, m in modules.items() if not only or name in only]


def _hooks(
    causal: torch.nn.Module, record: Record, config: ModelConfig, only: Collection[str] = ()
) -> list[Any]:
    """Attach hooks to vLLM's Qwen and Llama models, under the names of model/operations.py.

    vLLM fuses projections, and fuses residual additions with norms. Their outputs are recorded separately.
    only: the names of these operations; all where it is empty.
    """
    running = [0]  # the layer, as layers may share a module, such as the one of the rotary embedding
    handles = [
        layer.register_forward_pre_hook(lambda *_, i=i: running.__setitem__(0, i))
        for i, layer in enumerate(causal.model.layers)
    ]
    outputs: dict[Site, list[tuple[str, int]]] = {}
    modules = {}
    for name, row, site in sites("vllm", config.layers, config):
        module = module_at(causal, row, site)
        if module is not None and (not only or name in only):
            modules[site] = module
            outputs.setdefault(site, []).append((name, row.width))
    for site, parts in outputs.items():
        handles.append(_after(modules[site], _take(record, site, parts, running)))
    return handles


def _take(
    record: Record, site: Site, parts: Sequence[tuple[str, int]], running: Sequence[int]
) -> Callable[[Any], None]:
    """Records what a site shows. parts: names and widths of the operations in it, side by side."""
    in_layer = site.module.startswith("model.layers.")
    layer = int(site.module.split(".")[2]) if in_layer else None

    def take(out: Any) -> None:
        if layer not in (None, running[0]):
            return
        x = output(out, site.element)
        widths = [width for _, width in parts] if len(parts) > 1 else [x.shape[-1]]
        for (name, _), part in zip(parts, x.split(widths, dim=-1), strict=True):
            record(name, part)

    return take
