"""transformers as an engine of an audit: its own model with eager or sdpa attention, and its own generate.

Nothing of transformers is patched. Forward hooks read the outputs of modules. No module returns the queries
and keys after rotary embedding, so a TorchFunctionMode reads them as inputs of the attention product.

Shapes: C completion tokens, T tokens of one sequence, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...engine.rollout.hf import HfGenerator
from ...kernels.sampling_params import SamplingParams
from ...kernels.truncation import scaled_logits
from ...model.operation import Operation, Shown, Site
from ...model.operations import in_order, sites
from ...verify.operation_outputs import Trace
from .audited_model import known_config
from .engine import DISTRIBUTIONS, TOGETHER, Pair
from .engine_settings import Settings, hf_settings
from .module_trace import module_outputs
from .modules import module_at, output


def cache_argument(model: torch.nn.Module, cache: Any) -> dict[str, Any]:
    """A cache of transformers as an argument of a model's forward, which 5.24 gave another name."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


class HfEngine(HfGenerator):
    """AutoModelForCausalLM in one dtype; its logits are in `head` where that is given.

    attention: "eager" or "sdpa". by_modules: trace modules by transformers' names, also of a known family.
    """

    traced_outside = False

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        attention: str = "sdpa",
        head: torch.dtype | None = None,
        device: torch.device | None = None,
        by_modules: bool = False,
    ):
        super().__init__(folder, dtype, attention, device)
        self.name = "hf-eager" if attention == "eager" else "hf"
        self._config = None if by_modules else known_config(folder)
        if head not in (None, dtype):
            lm_head = self.model.get_output_embeddings()
            self.model.set_output_embeddings(_WideLmHead(lm_head, head))

    @torch.no_grad()
    def score(
        self, pairs: Sequence[Pair], sampling_params: SamplingParams, together: bool = True
    ) -> list[np.ndarray]:
        """Sequences are padded on the right."""
        scores, size = [], TOGETHER if together else 1
        for start in range(0, len(pairs), size):
            batch = pairs[start : start + size]
            inputs = [[*prompt, *completion[:-1]] for prompt, completion in batch]
            longest = max(map(len, inputs))
            ids = self.tensor([x + [0] * (longest - len(x)) for x in inputs])
            mask = self.tensor([[1] * len(x) + [0] * (longest - len(x)) for x in inputs])
            logits = self.model(ids, attention_mask=mask, use_cache=False).logits
            for z, x, (prompt, completion) in zip(logits, inputs, batch, strict=True):
                scores.append(_logprobs(z[len(prompt) - 1 : len(x)], completion, sampling_params).numpy())
        return scores

    @torch.no_grad()
    def decode(self, pairs: Sequence[Pair], sampling_params: SamplingParams) -> list[np.ndarray] | None:
        """It returns None for a model that hands back no cache."""
        scores = []
        for prompt, completion in pairs:
            out = self.model(self.tensor([list(prompt)]), use_cache=True)
            rows = [out.logits[0, -1:]]
            for token in completion[:-1]:
                if not (memory := _cache_of(self.model, out)):
                    return None
                out = self.model(self.tensor([[token]]), use_cache=True, **memory)
                rows.append(out.logits[0])
            scores.append(_logprobs(torch.cat(rows), completion, sampling_params).numpy())
        return scores

    @torch.no_grad()
    def distributions(self, pair: Pair, sampling_params: SamplingParams) -> Iterator[torch.Tensor]:
        prompt, completion = pair
        logits = self.model(self.tensor([[*prompt, *completion[:-1]]]), use_cache=False).logits[0]
        for z in logits[len(prompt) - 1 :].split(DISTRIBUTIONS):
            yield _log_softmax(z, sampling_params).cpu()

    def settings(self) -> Settings:
        return hf_settings(self.model)

    @torch.no_grad()
    def trace(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        prompt, completion = pair
        if self._config is None:
            return self._trace_modules(pair, sampling_params)
        trace: Trace = {}
        layers, config = len(self.model.model.layers), self._config
        with _Hooks(trace) as hooks, _AttentionInputs(trace, self.model.config) as attention:
            for name, row, site in sites("transformers", layers, config):
                module = module_at(self.model, row, site)
                if module is None:
                    continue
                if site.shown is Shown.OUTPUT:
                    hooks.output(name, row, site, module)
                elif site.shown is Shown.INPUT:
                    hooks.input(name, module)
                else:
                    hooks.handles.append(module.register_forward_pre_hook(attention.enter(site.shown, name)))
            logits = self.model(self.tensor([[*prompt, *completion[:-1]]]), use_cache=False).logits[0]
        trace["logprob"] = _logprobs(logits[len(prompt) - 1 :], completion, sampling_params).unsqueeze(1)
        return in_order(trace, layers, config)

    def _trace_modules(self, pair: Pair, sampling_params: SamplingParams) -> Trace:
        """The trace of a family whose operations have no names here: its modules, logits and logprob."""
        prompt, completion = pair
        with module_outputs(self.model) as trace:
            logits = self.model(self.tensor([[*prompt, *completion[:-1]]]), use_cache=False).logits[0]
        trace["logits"] = logits.to("cpu", copy=True)
        trace["logprob"] = _logprobs(logits[len(prompt) - 1 :], completion, sampling_params).unsqueeze(1)
        return trace

    def drop_caches(self) -> bool:
        return False


def _cache_of(model: torch.nn.Module, out: Any) -> dict[str, Any]:
    """The cache of a forward as an argument of the next one; empty where there is none."""
    caches = (getattr(out, name, None) for name in ("cache", "past_key_values", "cache_params"))
    cache = next((x for x in caches if x is not None), None)
    return {} if cache is None else cache_argument(model, cache)


class _WideLmHead(torch.nn.Module):
    """lm_head [V, D] in a dtype of its own. An embedding that shared its weight keeps the old dtype."""

    def __init__(self, lm_head: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        bias = getattr(lm_head, "bias", None)
        self.weight = torch.nn.Parameter(lm_head.weight.detach().to(dtype), requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], sampling_params: SamplingParams) -> torch.Tensor:
    """logits [C, V], tokens [C] -> logp [C] fp32 on the CPU.

    By log_softmax, as trainers on transformers do.
    """
    drawn = torch.tensor(list(tokens), device=logits.device)
    return _log_softmax(logits, sampling_params).gather(1, drawn.unsqueeze(1)).squeeze(1).cpu()


def _log_softmax(logits: torch.Tensor, sampling_params: SamplingParams) -> torch.Tensor:
    """logits [C, V] -> logp of every token [C, V] fp32."""
    return torch.log_softmax(scaled_logits(logits, sampling_params).float(), dim=-1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [1, T, ...], or [T, width] of experts -> a copy on the CPU, [T, width]."""
    x = x[0] if x.dim() > 2 else x
    return x.reshape(len(x), -1).to("cpu", copy=True)


class _Hooks:
    """Forward hooks that write into `trace` and are removed at the end."""

    def __init__(self, trace: Trace):
        self.trace, self.handles = trace, []
        self._shown: dict[Site, int] = {}  # elements of a row that the operations before showed

    def __enter__(self) -> "_Hooks":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def output(self, name: str, row: Operation, site: Site, module: torch.nn.Module) -> None:
        """Record what the module returns, or one element of it; or the operation's part, side by side."""
        start = self._shown.get(site, 0)
        self._shown[site] = start + row.width

        def hook(_module: torch.nn.Module, _inputs: Any, out: Any) -> None:
            x = output(out, site.element)
            rows = _rows(x.transpose(1, 2) if site.heads_first else x)
            is_part = self._shown[site] == rows.shape[1] > row.width
            self.trace[name] = rows[:, start : start + row.width] if is_part else rows

        self.handles.append(module.register_forward_hook(hook))

    def input(self, name: str, module: torch.nn.Module) -> None:
        """Record what the module is given."""

        def hook(_module: torch.nn.Module, inputs: Any) -> None:
            self.trace[name] = _rows(inputs[0])

        self.handles.append(module.register_forward_pre_hook(hook))


class _AttentionInputs(TorchFunctionMode):
    """Records the queries and keys that each layer first multiplies."""

    def __init__(self, trace: Trace, config: Any):
        super().__init__()
        self._trace, self._kv_heads = trace, config.num_key_value_heads
        self._next: dict[Shown, str] = {}  # names of what the next attention product multiplies

    def enter(self, shown: Shown, name: str) -> Callable[..., None]:
        """A pre-hook of a layer's attention. The next attention product is the one of this layer."""

        def hook(*_: Any) -> None:
            self._next[shown] = name

        return hook

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        sdpa = function is torch.nn.functional.scaled_dot_product_attention
        product = function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        if self._next and (sdpa or product) and args[0].dim() == 4:
            query, key = args[0], args[1] if sdpa else args[1].transpose(2, 3)
            key = key[:, :: key.shape[1] // self._kv_heads]  # heads may have been repeated
            for shown, x in ((Shown.QUERY, query), (Shown.KEY, key)):
                self._trace[self._next.pop(shown)] = _rows(x.transpose(1, 2))
        return function(*args, **(kwargs or {}))
