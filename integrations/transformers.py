"""zerokl's kernels over the Parameters of a transformers model: `exact`.

The model stays what it is. Its Parameters are trained, saved and loaded as before, and its own forward
answers every call. One more keyword asks for log-probabilities of zerokl's kernels:

    policy = exact(model)
    output = model(input_ids=ids, attention_mask=mask, labels=labels, exact=True)
    output.log_probs        # [B, L - 1] fp32; differentiable in the Parameters

policy.decoder samples with the same bits (engine/rollout/native.py).

The kernels read a copy of the Parameters in the compute dtype. A copy that is stale on both sides would show
no mismatch: sampler and scorer share it. So digests of the Parameters and of the copy are compared whenever
the copy is used.
"""

import functools
import hashlib
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..files.bitwise import equal, unequal
from ..kernels.block_digest import BLOCK, block_digests
from ..kernels.grad import GradBuffer
from ..kernels.sampling_params import SamplingParams
from ..model.config import ModelConfig
from ..model.context import NO_BUFFERS, Buffers
from ..model.decoder import Decoder
from ..model.labels import LabelledBatch, pack_labels
from ..model.scoring import PackedBatch, logprobs
from ..model.weights import Layout

_WHOLE = SamplingParams()  # the whole vocabulary, at temperature 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StaleWeightsError(RuntimeError):
    """The weights that the kernels read are not the model's Parameters, rounded to the compute dtype."""


@dataclass
class ExactOutput(ModelOutput):
    """What the model returns with exact=True. Entries without a label (-100) are 0.

    log_probs [B, L - 1] fp32: of each next token, under the distribution of the sampling parameters.
    entropy [B, L - 1] fp32: of that distribution, without a gradient.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def exact(
    model: PreTrainedModel,
    dtype: torch.dtype | None = None,
    sampling_params: SamplingParams = _WHOLE,
    recompute: bool = False,
) -> "ExactModel":
    """Let `model(..., labels=labels, exact=True)` score with zerokl's kernels.

    dtype: the compute dtype; None is that of the Parameters, which keep their own.
    sampling_params: the distribution that tokens are drawn from, and scored under.
    recompute: compute activations again in the backward instead of keeping them. It decides no bit.

    Raises ValueError for a model whose computation the kernels do not have: another architecture, dropout,
    quantised weights, adapters, or Parameters that are not those of its checkpoint.
    """
    policy = ExactModel(model, dtype, sampling_params, recompute)
    own_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *arguments: Any, exact: bool = False, **named: Any) -> Any:
        if not exact:
            return own_forward(*arguments, **named)
        return policy.score(named["input_ids"], named["attention_mask"], named["labels"])

    # DDP and accelerate call the module, and so its forward.
    model.forward = types.MethodType(forward, model)
    return policy


class ExactModel:
    """zerokl's decoder over a copy of a model's Parameters. Make it with `exact`."""

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None,
        sampling_params: SamplingParams,
        recompute: bool,
    ):
        _refuse_adapters(model)
        config = ModelConfig.from_dict(model.config.to_dict() | {"architectures": [type(model).__name__]})
        _refuse_dropout(model)
        self.sampling_params = sampling_params.check(config.vocab_size)
        self._parameters = dict(model.named_parameters())  # a tied lm_head is the embedding, listed once
        device, dtype = _device_and_dtype(self._parameters.values(), dtype)
        layout = Layout(config)
        if layout.buffers:
            raise ValueError(
                f"exact: {min(layout.buffers)} of a {config.architecture} is a buffer beside its Parameters, "
                "and no copy of it is kept; train this family with zerokl train"
            )
        flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.decoder = Decoder(config, flat, layout, recompute=recompute)
        self._weights = _by_parameter(layout, layout.views(self.decoder.flat), self._parameters)
        self._blocks = [_blocks(p.numel(), device) for p in self._parameters.values()]
        self._held = torch.empty(0, 2, dtype=torch.int64, device=device)  # digests of the copy
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Compute with the Parameters as they are now.

        Raises StaleWeightsError where the copy is not equal to them afterwards.
        """
        # Whether they have changed is read from their bits: a fused optimizer leaves p._version as it was.
        current = self._digests(self._parameters.values())
        if self._held.shape == current.shape and equal(self._held, current):
            return
        self._copy()
        self._held = self._digests(self._weights)
        self._compare(current, self._held)

    @torch.no_grad()
    def check_fresh(self, flat: torch.Tensor | None = None) -> str:
        """Read Parameters and copy, and compare them. Returns the SHA-256 of their digests.

        flat: the copy [layout.numel] where it is that of another engine. Raises StaleWeightsError, which
        names the first Parameter that differs.
        """
        weights, layout = self._weights, self.decoder.layout
        if flat is not None:
            weights = _by_parameter(layout, layout.views(flat), self._parameters)
        held = self._digests(weights)
        self._compare(self._digests(self._parameters.values()), held)
        return hashlib.sha256(held.cpu().numpy().tobytes()).hexdigest()

    def score(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> ExactOutput:
        """The log-probability of each label, and the entropy of its distribution.

        input_ids, attention_mask, labels [B, L]: labels are not shifted, and -100 where nothing is scored.
        Padding, where the mask is 0, decides no bit, wherever it stands.

        Raises ValueError for a label that is padding or has nothing before it, and for a sequence that is
        longer than the context.
        """
        self.sync()
        batch, places = pack_labels(LabelledBatch.of(input_ids, attention_mask, labels))
        logp, entropy = self._score(batch)
        zeros, index = torch.zeros(input_ids.numel(), device=input_ids.device), (places.to(input_ids.device),)
        whole = (zeros.index_put(index, x).view(input_ids.shape)[:, 1:] for x in (logp, entropy))
        return ExactOutput(*whole)

    def _score(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """logp and entropy, [C] each. logp is differentiable in the Parameters if torch records gradients."""
        wanted = torch.is_grad_enabled()
        buffers = {w: GradBuffer.like(w) for w in self._differentiated()} if wanted else NO_BUFFERS
        with torch.autocast(self.decoder.device.type, enabled=False):
            if len(batch.lengths):
                logp, entropy = logprobs(self.decoder, batch, self.sampling_params, buffers=buffers)
            else:
                logp = entropy = torch.empty(0, device=self.decoder.device)
        if wanted:
            # Also without a token: under DDP every rank's Parameters need a gradient, zero or not.
            logp = _Score.apply(_Graph(self, logp, buffers), *self._parameters.values())
        return logp, entropy

    def gradients(self, buffers: Buffers) -> list[torch.Tensor]:
        """The gradient of each Parameter, from the sums in `buffers`, rounded once to its dtype."""
        decoder = self.decoder
        sums = {name: buffers[w].zeroed([0])[0] for name, w in decoder.w.items()}
        if decoder.config.tied:
            sums["embed"] = sums["embed"] + buffers[decoder.lm_head].zeroed([0])[0]
        parts = _by_parameter(decoder.layout, sums, self._parameters)
        return [part.to(p.dtype) for part, p in zip(parts, self._parameters.values(), strict=True)]

    def _differentiated(self) -> list[torch.Tensor]:
        return [*self.decoder.w.values(), *([self.decoder.lm_head] if self.decoder.config.tied else [])]

    def _copy(self) -> None:
        for weight, parameter in zip(self._weights, self._parameters.values(), strict=True):
            weight.copy_(parameter)

    def _digests(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Digests of the tensors in the compute dtype, [blocks, 2] int64."""
        lines = (t.detach().to(self.decoder.dtype).reshape(-1) for t in tensors)
        return torch.cat([block_digests(x, blocks) for x, blocks in zip(lines, self._blocks, strict=True)])

    def _compare(self, parameter_digests: torch.Tensor, copy_digests: torch.Tensor) -> None:
        differs = unequal(parameter_digests, copy_digests).any(dim=1)
        if not differs.any():
            return
        counts = [len(blocks) for blocks in self._blocks]
        names = [name for name, n in zip(self._parameters, counts, strict=True) for _ in range(n)]
        wrong = [name for name, bad in zip(names, differs.tolist(), strict=True) if bad]
        raise StaleWeightsError(
            f"exact: the kernels' copy of {wrong[0]} is not the Parameter, rounded to {self.decoder.dtype}; "
            f"{len(set(wrong))} of {len(counts)} Parameters differ"
        )


@dataclass
class _Graph:
    """A forward of the kernels, with its graph: logp [C], and the buffers that its backward adds to."""

    policy: ExactModel
    logp: torch.Tensor
    buffers: Buffers


class _Score(torch.autograd.Function):
    """logp as a function of the Parameters, one node. The kernels' own graph lies behind it.

    So whatever watches gradients of Parameters (DDP, clipping, a scaler) sees them as those of any model.
    """

    @staticmethod
    def forward(ctx, graph: _Graph, *parameters):
        ctx.graph = graph
        return graph.logp.detach()

    @staticmethod
    def backward(ctx, dlogp):
        policy, logp = ctx.graph.policy, ctx.graph.logp
        if logp.requires_grad:
            with torch.enable_grad(), torch.autocast(policy.decoder.device.type, enabled=False):
                logp.backward(dlogp)
        gradients, wanted = policy.gradients(ctx.graph.buffers), ctx.needs_input_grad[1:]
        return None, *(g if w else None for g, w in zip(gradients, wanted, strict=True))


def _refuse_adapters(model: PreTrainedModel) -> None:
    """Raise ValueError for adapters and quantised weights."""
    name = type(model).__name__
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"exact: {name} has PEFT adapters, which are not supported; merge them, or train all"
        )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"exact: {name} is quantised, which is not supported; load it in fp32, bf16 or fp16")


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Raise ValueError for a module of dropout. That of attention is a field of the config (ModelConfig)."""
    dropout = next((m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0.0), None)
    if dropout is not None:
        raise ValueError(
            f"exact: {type(model).__name__} has dropout ({dropout}), which is not supported: the policy that "
            "is trained must be the policy that was sampled; set it to 0"
        )


def _device_and_dtype(
    parameters: Iterable[torch.Tensor], dtype: torch.dtype | None
) -> tuple[torch.device, torch.dtype]:
    """The device and the compute dtype. Raises ValueError for several devices or dtypes, and for another."""
    devices, dtypes = ({getattr(p, name) for p in parameters} for name in ("device", "dtype"))
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise ValueError(
            f"exact: Parameters lie on {sorted(map(str, devices))}; they need one CPU or one GPU"
        )
    if dtype is None and len(dtypes) > 1:
        raise ValueError(f"exact: Parameters have {sorted(map(str, dtypes))}; name one compute dtype")
    dtype = dtype or next(iter(dtypes))
    if dtype not in _DTYPES:
        raise ValueError(f"exact: dtype ({dtype}) must be float32, bfloat16 or float16")
    return next(iter(devices)), dtype


def _by_parameter(
    layout: Layout, weights: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The part of a layout's weights that each Parameter is, in the order of the Parameters.

    weights: of the shapes of the layout, by its names. Raises ValueError for Parameters that are not those of
    the layout.
    """
    parts: dict[str, torch.Tensor] = {}
    for entry in layout.entries.values():
        rows = weights[entry.name].split([n for _, n in entry.parts])
        parts |= zip((name for name, _ in entry.parts), rows, strict=True)
    for name, (weight, shape) in layout.fused.items():
        if name in parameters:  # transformers 5 has the experts of a layer in two tensors
            parts[name] = weights[weight].view(shape)
            for part, _ in layout.entries[weight].parts:
                del parts[part]
    different = sorted(parts.keys() ^ parameters.keys())
    different += [
        name for name in parts.keys() & parameters.keys() if parts[name].shape != parameters[name].shape
    ]
    if different:
        raise ValueError(
            f"exact: {different[0]} is not the same in the model and in its architecture's checkpoints; "
            f"{len(different)} Parameters differ"
        )
    return [parts[name] for name in parameters]


def _blocks(numel: int, device: torch.device) -> torch.Tensor:
    """The blocks of a tensor of `numel` elements, [n, 2]."""
    starts = torch.arange(0, numel, BLOCK)
    return torch.stack([starts, (starts + BLOCK).clamp(max=numel)], dim=1).to(device)
