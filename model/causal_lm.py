"""The model as a torch module, with Hugging Face's names.

    model = CausalLM.from_pretrained(folder, torch.bfloat16)
    output = model(input_ids, attention_mask, labels)     # as transformers takes them; labels not shifted
    output.log_probs                                      # [B, L] fp32; differentiable in the Parameters

The Parameters are views of one flat tensor as long as nothing moves them one by one, and the forward is that
of the decoder (decoder.py): the trainer's. So log_probs and gradients have the trainer's bits. The gradient
of a Parameter is summed in fp32, in the order of the token blocks of one backward, and its .grad is this sum
in fp32, whatever the Parameter's dtype. .grad adds up several backwards as torch does, one after another: to
have the bits of the trainer, let one backward hold one virtual shard.

Hooks of the module and of each decoder layer fire. The modules below a layer hold Parameters, and are never
called; `hook` is shown the output of each operation instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..kernels.linear import linear
from ..kernels.low_rank import LowRankBuffers
from ..kernels.passes import Pass
from ..kernels.sampling_params import SamplingParams
from ..kernels.shared_rows import ALL_ROWS, SharedRows
from ..kernels.softcap import softcap
from ..kernels.upload import upload_tables
from .buffers import all_as_numbers, as_bytes, as_numbers
from .checkpoint import read_weights, resolve_model
from .checkpoint_writing import write_tensors
from .config import ModelConfig
from .context import Buffers, Context, Hook, PackedContext, no_hook
from .decoder import Decoder, Forward, Rotations, Stream, rotation_tables, with_padding
from .labels import LabelledBatch, pack_labels
from .numerics import COMPUTE, Numerics
from .parameters import LayerCall, ParameterWeights, keep_sums
from .routing import FREE, Routing
from .scoring import PackedBatch, Scores, ScoringInputs
from .weights import NONE_UNMERGED, Layout, UnmergedAdapters

_WHOLE = SamplingParams()  # the whole vocabulary, at temperature 1


@dataclass
class CausalLMOutput:
    """What the module returns. Without a label (-100) an entry is 0.

    log_probs, entropy: fp32 of the labels' shape. Of each label, under the distribution of the sampling
    parameters, given the tokens before it. The entropy of that distribution has no gradient.
    logits: [..., V] in the dtype of lm_head's product, after each token; 0 at padding. None unless asked for.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class DecoderLayer(nn.Module):
    """Layer i of a CausalLM. The layer computes inside its module's call, so that hooks on it fire."""

    def __init__(self, i: int):
        super().__init__()
        self.i = i

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        run: Callable[..., Stream],
        rotations: Rotations,
        context: Context,
        hook: Hook,
    ) -> Stream:
        """x, residual [T, D] -> the same; see decoder.Stream. The first layer has no x.

        run: ModuleForward.run_layer.
        """
        return run(self.i, (x, residual), rotations, context, hook)


class ModuleForward(Forward):
    """The decoder's forward over the Parameters of a CausalLM, layer by layer through its modules."""

    def __init__(
        self,
        module: "CausalLM",
        layout: Layout,
        numerics: Numerics,
        recompute: bool,
        adapters: Mapping[str, LowRankBuffers],
        unmerged: UnmergedAdapters,
    ):
        super().__init__(layout.config, numerics, recompute)
        self.weights, self._adapters = ParameterWeights(module, layout, dict(unmerged)), dict(adapters)
        self._layers = module.model.layers
        self._tables: dict[tuple[torch.dtype, torch.device], Rotations] = {}

    @property
    def _rope(self) -> Rotations:
        norm = self.weights.norm
        key = norm.dtype, norm.device
        if key not in self._tables:
            self._tables = {key: rotation_tables(self.config, norm)}
        return self._tables[key]

    @property
    def value_head(self) -> torch.Tensor | None:
        return self.weights.value_head

    def logits_weight(self) -> torch.Tensor:
        """As in Forward, but the gradient of a converted weight is not rounded."""
        lm_head, dtype = self.lm_head, self.numerics.lm_head
        return lm_head if dtype in (None, lm_head.dtype) else _Widened.apply(lm_head, dtype)

    def _run_layer(self, i: int, stream: Stream, *args: Any) -> Stream:
        return self._layers[i](*stream, self.run_layer, *args)

    def run_layer(self, i: int, stream: Stream, rotations: Rotations, context: Context, hook: Hook) -> Stream:
        """What the module of layer i computes."""
        if not torch.is_grad_enabled():
            return self._layer(i, stream, rotations, context, hook)
        parts = self.weights.parts(i)
        keep_sums([p for tensors in parts.values() for p in tensors])
        adapters = {
            name: self._adapters[key] for name in parts if (key := f"layers.{i}.{name}") in self._adapters
        }
        in_pass, dtypes = context.in_pass, self.config.dtypes(i, self.numerics, self.dtype)
        call = LayerCall(parts, in_pass.buffers, dtypes, adapters, in_pass.shared)
        args = i, self.weights.adapted(i, call.tensors), call.begin(*stream), rotations, context, hook
        if self.recompute:
            stream = checkpoint(self._compute_layer, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            stream = self._compute_layer(*args)
        return call.end(*stream)


class _Widened(torch.autograd.Function):
    """A weight in another dtype, whose gradient goes back as it is."""

    @staticmethod
    def forward(ctx, w, dtype):
        return w.to(dtype)

    @staticmethod
    def backward(ctx, dw):
        return dw, None


class CausalLM(nn.Module):
    """A causal language model of a family that zerokl knows, computed by zerokl's kernels.

    decoder: the forward over the Parameters (model/decoder.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        numerics: Numerics = COMPUTE,
        recompute: bool = False,
        flat: torch.Tensor | None = None,
        layout: Layout | None = None,
        adapters: Mapping[str, LowRankBuffers] = MappingProxyType({}),
        unmerged: UnmergedAdapters = NONE_UNMERGED,
    ):
        """Weights of zeros, or those of `flat` [layout.numel], whose memory the Parameters share.

        device: "meta" makes Parameters without memory. recompute: see Forward. layout: of this config; its
        frozen weights have no gradient. adapters: of weights of layers, by name, that LoRA's adapters
        belong to: where the gradients of A and B are summed. Nothing else then has a gradient. unmerged:
        these adapters, where they are not merged into the weights.
        """
        super().__init__()
        self.config, self._layout = config, layout or Layout(config)
        self.companions: Path | None = None  # the folder that from_pretrained has read
        if flat is None:
            flat = torch.zeros(self._layout.numel, dtype=dtype, device=device)
        self._add_parameters(flat)
        if adapters:
            self.requires_grad_(False)
        self.decoder = ModuleForward(self, self._layout, numerics, recompute, adapters, unmerged)
        self.register_load_state_dict_post_hook(lambda module, _: module._tie())
        self.register_state_dict_post_hook(CausalLM._give_numbers)
        self.register_load_state_dict_pre_hook(CausalLM._take_numbers)

    @classmethod
    def over(cls, decoder: Decoder) -> Self:
        """The module over the memory of a decoder's weights: a change of either is a change of both."""
        d = decoder
        return cls(
            d.config, numerics=d.numerics, recompute=d.recompute, flat=d.flat.detach(), layout=d.layout
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        numerics: Numerics = COMPUTE,
        recompute: bool = False,
    ) -> Self:
        """The model of a folder or a hub name, its weights rounded once to `dtype`.

        Raises ValueError (see resolve_model, ModelConfig.from_file, read_weights).
        """
        folder = resolve_model(str(model))
        config = ModelConfig.from_file(folder)
        flat = read_weights(folder, Layout(config)).to(device, dtype)
        loaded = cls(config, numerics=numerics, recompute=recompute, flat=flat)
        loaded.companions = folder
        return loaded

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that from_pretrained, transformers and vLLM read, with the tokenizer's files.

        Raises OSError; FileExistsError where `folder` exists.
        """
        beside = self._layout.beside_checkpoint(torch.empty(self._layout.numel, device="meta"))
        tensors = {name: p.detach() for name, p in self.named_parameters() if name not in beside}
        tensors = dict(all_as_numbers(tensors.items(), self._layout.buffers))
        write_tensors(Path(folder), self._layout.config, tensors, self.companions)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        cu_seqlens: Sequence[int] | torch.Tensor | None = None,
        sampling_params: SamplingParams = _WHOLE,
        logits: bool = False,
        hook: Hook = no_hook,
    ) -> CausalLMOutput:
        """Log-probabilities of labels, logits, or both.

        input_ids: [B, L], padded where attention_mask [B, L] is 0, on any side; or [T], packed sequences that
            begin at cu_seqlens[:-1] and end at cu_seqlens[1:]. Padding and packing decide no bit.
        labels: as input_ids, not shifted; -100 where nothing is scored. logits: whether they are wanted.

        Raises ValueError for a label that is padding or has nothing before it, for a sequence that is longer
        than the context, for an id outside the vocabulary, and where nothing is asked for.
        """
        batch = LabelledBatch.of(input_ids, attention_mask, labels, cu_seqlens)
        if labels is None and not logits:
            raise ValueError("CausalLM: neither labels are given nor logits asked for; nothing to compute")
        output = CausalLMOutput()
        if labels is not None:
            packed, places = pack_labels(batch)
            scores = self.score(packed, sampling_params, hook=hook) if len(packed.lengths) else None
            for name in ("log_probs", "entropy"):
                zeros = torch.zeros(batch.input_ids.numel(), device=self.decoder.device)
                if scores is not None:
                    values = scores.logp if name == "log_probs" else scores.entropy
                    zeros = zeros.index_put((places.to(values.device),), values)
                setattr(output, name, zeros.view(input_ids.shape))
        if logits:
            output.logits = self._logits(batch, hook).view(*input_ids.shape, -1)
        return output

    def score(
        self,
        batch: PackedBatch,
        sampling_params: SamplingParams = _WHOLE,
        prompts: Sequence[Sequence[int]] | None = None,
        hook: Hook = no_hook,
    ) -> Scores:
        """The scores of the drawn tokens of a packed batch (scoring.pack).

        prompts [S]: the prompt of each sequence, for a batch that was packed with `after`. Equal prompts lie
        side by side, and are read once, in the same forward (one_pass.py).
        """
        return self.score_inputs(self.inputs(batch, sampling_params, prompts), hook)

    def inputs(
        self,
        batch: PackedBatch,
        sampling_params: SamplingParams = _WHOLE,
        prompts: Sequence[Sequence[int]] | None = None,
        routing: Routing = FREE,
        shared_rows: SharedRows = ALL_ROWS,
    ) -> ScoringInputs:
        """What the forward of `score` reads beside the weights. routing: see OnePassContext.

        shared_rows: see ScoringInputs. The gradient of a Parameter is then this rank's part, among zeros.
        """
        how = {"buffers": {}, "routing": routing, "shared": prompts, "shared_rows": shared_rows}
        return ScoringInputs(self.decoder, batch, sampling_params, **how)

    def score_inputs(self, inputs: ScoringInputs, hook: Hook = no_hook) -> Scores:
        """The scores of the drawn tokens, from what `inputs` gives."""
        forward = self._prepared()
        with torch.autocast(forward.device.type, enabled=False):
            upload_tables(forward.device, inputs.tables)
            return inputs.forward(forward, hook)

    def _logits(self, batch: LabelledBatch, hook: Hook) -> torch.Tensor:
        """[B L, V], 0 at padding."""
        forward = self._prepared()
        lengths = [len(sequence.ids) for sequence in batch.sequences if len(sequence.ids)]
        ids, padding = with_padding(torch.cat([s.ids for s in batch.sequences]), forward)
        buffers: Buffers = {}
        context = PackedContext(lengths, forward.config, padding, buffers=buffers)
        places = torch.cat([s.places for s in batch.sequences])
        with torch.autocast(forward.device.type, enabled=False):
            h, lm_head = forward.hidden(ids, context, hook), forward.logits_weight()
            rows, in_pass = h[: sum(lengths)].to(lm_head.dtype), Pass(context.in_pass.blocks, buffers)
            cut = forward.numerics.leaves.outputs(len(lm_head))
            y = linear(rows, lm_head, None, in_pass, forward.numerics.tiles, cut)
            y = softcap(y, forward.config.head.cap)
        zeros = y.new_zeros(batch.input_ids.numel(), y.shape[1])
        return zeros.index_put((places.to(y.device),), y)

    def _prepared(self) -> ModuleForward:
        if torch.is_grad_enabled():
            keep_sums(self.decoder.weights.outside())
        return self.decoder

    def _add_parameters(self, flat: torch.Tensor) -> None:
        """Make the modules, and in them the Parameters over `flat` [layout.numel]."""
        self.model = nn.Module()
        self.model.embed_tokens = nn.Module()
        self.model.layers = nn.ModuleList(DecoderLayer(i) for i in range(self.config.layers))
        frozen = {part for name in self._layout.frozen for part, _ in self._layout.entries[name].parts}
        for name, view in self._views(flat).items():
            *path, attribute = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]
            module.register_parameter(attribute, nn.Parameter(view, requires_grad=name not in frozen))
        if self.config.tied:
            self.lm_head = nn.Module()
            self._tie()

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` [layout.numel] for each Parameter, by its name."""
        return self._layout.checkpoint_views(flat) | self._layout.beside_checkpoint(flat)

    def _tie(self) -> None:
        """Let tied embeddings be one Parameter: torch makes two of it where it replaces Parameters."""
        if self._layout.config.tied:
            self.lm_head.register_parameter("weight", self.model.embed_tokens.weight)

    def _give_numbers(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
        """In a state dict a buffer is its numbers, as in a checkpoint, and not their bytes."""
        for name in self._layout.buffers:
            state_dict[prefix + name] = as_numbers(state_dict[prefix + name].detach())

    def _take_numbers(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
        for name in self._layout.buffers & {key.removeprefix(prefix) for key in state_dict}:
            state_dict[prefix + name] = as_bytes(state_dict[prefix + name])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """nn.Module's .to, .cuda, .bfloat16 and so on. The Parameters then lie in one memory again."""
        super()._apply(fn, recurse)
        self._tie()
        if self._can_lie_flat():
            parameters = dict(self.named_parameters())
            like = next(iter(parameters.values()))
            flat = torch.zeros(self._layout.numel, dtype=like.dtype, device=like.device)
            for name, view in self._views(flat).items():
                view.copy_(parameters[name].data)
                parameters[name].data = view
        return self

    def _can_lie_flat(self) -> bool:
        """Whether all Parameters are plain tensors of one kind, with memory."""
        kinds = {(type(p.data), p.dtype, p.device.type) for p in self.parameters()}
        return (
            len(kinds) == 1 and next(iter(kinds))[0] is torch.Tensor and not next(self.parameters()).is_meta
        )
