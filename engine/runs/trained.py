"""What a run trains: the model's weights, or LoRA adapters in place of them."""

from pathlib import Path

import torch

from ...model.adapters import AdapterLayout, Adapters, adapted_layout, first_adapters
from ...model.checkpoint import stored_dtype
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.freezing import frozen_weights
from ...model.peft import read_adapter
from ...model.weights import Layout
from ..config.run_config import Config
from ..train.master_weights import AdapterWeights, SlicedWeights
from ..train.parallel.zero import Slices


def model_layout(config: Config, model_config: ModelConfig) -> Layout:
    """The layout of the model's weights. Those that are trained, or have adapters, come first.

    Raises ValueError (see frozen_weights).
    """
    if lora := config.lora.shape:
        return adapted_layout(model_config, lora)
    return Layout(model_config, frozen_weights(model_config, config.frozen), config.loss.has_critic)


def adapter_layout(config: Config, layout: Layout, model: Path) -> tuple[AdapterLayout | None, torch.dtype]:
    """The layout of the adapters, None without LoRA; and the dtype in which their base is kept.

    layout: see model_layout. model: its folder. Raises ValueError (see stored_dtype).
    """
    lora = config.lora.shape
    return (AdapterLayout(layout, lora), stored_dtype(model)) if lora else (None, torch.float32)


def merge_first(
    config: Config, layout: AdapterLayout | None, weights: torch.Tensor, policy: Decoder, base: torch.dtype
) -> Adapters | None:
    """The adapters that a run begins with, brought to the policy; None without LoRA.

    layout, base: see adapter_layout. weights: the base, [policy.layout.numel] fp32. Raises ValueError for a
    folder that holds no adapter of this shape.
    """
    if layout is None:
        return None
    return Adapters(layout, adapters_before(config, layout), weights, policy, base)


def adapters_before(config: Config, layout: AdapterLayout) -> torch.Tensor:
    """The adapters that a run begins with, [layout.numel] fp32.

    Raises ValueError for a folder that holds no adapter of this shape.
    """
    folder = config.lora.adapter
    return read_adapter(Path(folder), layout) if folder else first_adapters(layout, config.seed)


def whole_weights(
    config: Config, adapters: Adapters | None, policy: Decoder, weights: torch.Tensor, slices: Slices
) -> SlicedWeights:
    """What the optimizer changes, of a policy that is whole in every rank: the adapters, or the weights.

    slices: of what is trained, over the run's ranks.
    """
    if adapters is not None:
        return AdapterWeights(adapters, slices)
    return SlicedWeights(policy, weights, slices, config.precision.quantisation)
