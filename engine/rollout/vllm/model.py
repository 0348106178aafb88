"""Our decoder as a vLLM model (interface: vllm/model_executor/models/interfaces_base.py)."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from ....kernels.attention_rule import WALK, AttentionRule
from ....kernels.logprob import head_logits
from ....kernels.matmul import UNPACKED, PackedWeights
from ....kernels.passes import Pass
from ....kernels.tile_tables import DEFAULT_TABLE, tile_table
from ....model.adapters import AdapterLayout, low_rank_by_weight
from ....model.buffers import as_bytes
from ....model.checkpoint import is_passed_over
from ....model.config import ModelConfig
from ....model.context import no_hook
from ....model.decoder import Decoder, Numerics
from ....model.lora import Lora
from ....model.operation import Equation
from ....model.quantisation import KvQuantisation
from ....model.sizes import Experts
from ....model.weights import Layout
from .attention import ZeroklAttentionBackend
from .plugin import ATTENTION, FROZEN, HAS_VALUE_HEAD, KV, LORA, TILES_OVERRIDE
from .proposer import Proposer


class _VllmContext:
    """The tokens of one vLLM forward (see decoder.Context).

    vLLM's attention layers hold the cache and know the requests.
    """

    tables = ()  # vLLM has its positions on the device

    def __init__(
        self,
        positions: torch.Tensor,
        layers: torch.nn.ModuleList,
        packed: PackedWeights,
        routers: "_Routers",
    ):
        self.positions, self._layers, self.in_pass = positions, layers, Pass(packed=packed)
        self.routing = routers

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`scale`, `rule` and `sinks` are those that vLLM's layers already have."""
        return self._layers[layer](q, k, v).view(q.shape)


class _Router(torch.nn.Module):
    """A source of experts, for whoever binds a capturer to the model (vLLM's RoutedExpertsCaptureSource)."""

    def __init__(self, layer: int):
        super().__init__()
        self.layer_id, self.capture_fn = layer, None


class _Routers(torch.nn.ModuleList):
    """The router's choice of each layer with experts, which is shown to its source (see routing.Routing)."""

    tables = ()

    def __init__(self, experts: Experts | None):
        layers = sorted(experts.layers) if experts else []
        super().__init__(_Router(layer) for layer in layers)
        self._place = {layer: i for i, layer in enumerate(layers)}

    def experts(self, layer: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        capture = self[self._place[layer]].capture_fn
        if capture is not None:
            capture(ids)
        return ids


class ZeroklForCausalLM(torch.nn.Module):
    """Our decoder. It reads the trainer's checkpoints; `use` replaces its weights by the trainer's memory.

    adapters: LoRA's, that are not merged into the weights, flat in fp32; None where there are none.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        model_config = vllm_config.model_config
        self.zerokl_config = ModelConfig.from_file(Path(model_config.model))
        hf_config = model_config.hf_config
        # Nothing here reads a critic's head, but it lies among the weights of the trainer's memory.
        has_head = getattr(hf_config, HAS_VALUE_HEAD, False)
        layout = Layout(self.zerokl_config, getattr(hf_config, FROZEN, ()), has_head)
        version = getattr(hf_config, TILES_OVERRIDE, DEFAULT_TABLE.vllm)
        kv = getattr(hf_config, KV, None)
        self.numerics = Numerics(
            lm_head=model_config.head_dtype,
            tiles=tile_table(version),
            kv=None if kv is None else KvQuantisation(*kv),
            attention=AttentionRule(*getattr(hf_config, ATTENTION, WALK)),
        )
        self.decoder = Decoder(
            self.zerokl_config, torch.zeros(layout.numel, dtype=model_config.dtype), layout, self.numerics
        )
        lora, self.adapters = getattr(hf_config, LORA, None), None
        self._adapter_layout = lora and AdapterLayout(layout, Lora(*lora))
        if lora:
            self._adapt(torch.zeros(self._adapter_layout.numel, dtype=torch.float32))
        c = self.zerokl_config
        self.attention = torch.nn.ModuleList(
            Attention(
                c.heads,
                c.head_dim,
                row.factor,
                num_kv_heads=c.kv_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}layers.{i}.attention",
                attn_backend=ZeroklAttentionBackend,
                rule=self.numerics.attention._replace(window=row.window, cap=row.cap),
                current_sinks=partial(self._sinks, i) if row.sinks else None,
            )
            for i, rows in enumerate(c.layer_operations)
            for row in rows
            if row.equation is Equation.ATTENTION
        )
        self.routers = _Routers(c.experts)
        for layer in self.attention:
            # An indirect call is an opaque operation for the compiler, and the compiler is off.
            layer.use_direct_call = True
        self.hook = no_hook  # an audit listens here
        self.proposer: Proposer | None = None  # where tokens are guessed, who draws
        self.weights_changed()

    def _sinks(self, i: int) -> torch.Tensor:
        return self.decoder.w[f"layers.{i}.sinks"]

    def use(self, flat: torch.Tensor, adapters: torch.Tensor | None) -> None:
        """Compute with the weights `flat` [layout.numel] and these adapters from now on, without a copy."""
        self.decoder = Decoder(self.zerokl_config, flat, self.decoder.layout, self.numerics)
        if adapters is not None:
            self._adapt(adapters)
        self.weights_changed()

    def _adapt(self, adapters: torch.Tensor) -> None:
        self.adapters = adapters
        self.decoder.adapt(low_rank_by_weight(self._adapter_layout, adapters))

    def weights_changed(self) -> None:
        """Must be called after every change of the weights.

        Where lm_head has another dtype than the weights, it is converted here and not at every token. Packed
        copies are of the weights before, and are dropped.
        """
        self.packed: PackedWeights = UNPACKED
        self._lm_head = self.decoder.logits_weight()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] -> [T, D]."""
        return self.zerokl_config.embedding.forward(self.decoder.w["embed"], input_ids.long(), Pass())

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """input_ids, positions [T] -> hidden states [T, D]."""
        if self.proposer is not None:
            # vLLM gives a request that it (re)starts guesses of the id -1, which nobody draws, to have a row
            # for each guess that there could be (v1/core/sched/scheduler.py).
            input_ids = input_ids.clamp(min=0)
        context = _VllmContext(positions.long(), self.attention, self.packed, self.routers)
        return self.decoder.hidden(input_ids.long(), context, self.hook)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [n, D] -> logits [n, V]; where tokens are guessed, what the draw has left of them."""
        hidden_states = hidden_states.to(self._lm_head.dtype)
        packed, tiles = self.packed.get(self._lm_head), self.numerics.tiles
        logits = head_logits(hidden_states, self._lm_head, self.zerokl_config.head.cap, packed, tiles)
        return logits if self.proposer is None else self.proposer.draw(logits.float())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy a checkpoint's tensors into place. Returns their names.

        Raises ValueError for a tensor that the model does not have, or where a tensor is missing.
        """
        views, loaded = self.decoder.layout.checkpoint_views(self.decoder.flat), set()
        for name, tensor in weights:
            is_tied_head = name == "lm_head.weight" and self.zerokl_config.tied
            if is_tied_head or is_passed_over(name, self.zerokl_config):
                continue
            if name not in views:
                raise ValueError(f"model: {name} is not a weight of {self.zerokl_config.architecture}")
            is_buffer = name in self.decoder.layout.buffers
            views[name].copy_(as_bytes(tensor) if is_buffer else tensor)
            loaded.add(name)
        if missing := sorted(set(views) - loaded):
            raise ValueError(
                f"model: the checkpoint has no {missing[0]}, and {len(missing) - 1} others are missing"
            )
        self.weights_changed()
        return loaded
