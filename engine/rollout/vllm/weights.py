"""The trainer's weights for vLLM (interface: vllm/distributed/weight_transfer/base.py).

Our model computes with the trainer's own memory, and an update copies nothing; vLLM's own model has its own,
and an update goes through vLLM's way of loading a checkpoint again. Each update carries a version, and vLLM's
outputs name the version they were drawn with.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ....kernels.order import packed
from ....model.weights import Layout
from ...shared_tensor import Handle, map_tensor


@dataclass
class SharedInit(WeightTransferInitInfo):
    """Where the weights are: a file that can be mapped."""

    path: str
    device: int
    inode: int


@dataclass
class OwnInit(WeightTransferInitInfo):
    """The weights themselves, [layout.numel] in the compute dtype: vLLM runs in the trainer's process."""

    flat: torch.Tensor


@dataclass
class StockInit(OwnInit):
    """And where in them each tensor of a checkpoint is."""

    layout: Layout


@dataclass
class Update(WeightTransferUpdateInfo):
    """The weights have changed. Which version they are now, `finish_weight_update` tells the engine."""


class SharedWeightsEngine(WeightTransferEngine[SharedInit, Update]):
    """For our model on a CPU: weights in memory that the trainer's process and vLLM's both map."""

    init_info_cls = SharedInit
    update_info_cls = Update

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._packs = ExitStack()

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Map the trainer's weights and compute with them."""
        flat = self.model.decoder.flat
        self.model.use(
            map_tensor(Handle(init_info.path, init_info.device, init_info.inode), flat.numel(), flat.dtype)
        )

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: Update) -> None:
        """Take the weights as they now are, and pack them until the next time:

        this mapping of them is read by vLLM's model alone.
        """
        self.model.weights_changed()
        self._packs.close()
        self._packs.enter_context(packed(self.model.decoder.matrices()))

    def finish_weight_update(self) -> None:
        """Nothing to finish: the caller resets the caches."""

    def shutdown(self) -> None:
        """Let go of the packed weights."""
        self._packs.close()


class OwnWeightsEngine(SharedWeightsEngine):
    """For our model in the trainer's process, on any device."""

    init_info_cls = OwnInit

    def init_transfer_engine(self, init_info: OwnInit) -> None:
        """Compute with the trainer's tensor.

        Raises ValueError for one that is not what the model computes with.
        """
        own, given = self.model.decoder.flat, init_info.flat
        if (own.shape, own.dtype, own.device) != (given.shape, given.dtype, given.device):
            raise ValueError(
                f"vllm: the trainer's weights are {tuple(given.shape)} {given.dtype} on {given.device}, vLLM's model has "
                f"{tuple(own.shape)} {own.dtype} on {own.device}; make the trainer's GPU the first that is visible (CUDA_VISIBLE_DEVICES)"
            )
        self.model.use(given)

    def receive_weights(self, update_info: Update) -> None:
        """Take the weights as they now are.

        They are not packed: the trainer reads this tensor too, between its own updates.
        """
        self.model.weights_changed()


class StockWeightsEngine(WeightTransferEngine[StockInit, Update]):
    """For vLLM's own model in the trainer's process."""

    init_info_cls = StockInit
    update_info_cls = Update

    def init_transfer_engine(self, init_info: StockInit) -> None:
        """Keep the trainer's tensor at hand."""
        self._init = init_info

    def start_weight_update(self) -> None:
        """Undo what vLLM did to the weights after it first loaded them."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        """Load the weights as they now are."""
        self.model.load_weights(iter(self._init.layout.checkpoint_views(self._init.flat.detach()).items()))

    def finish_weight_update(self) -> None:
        """Do that to the weights again; the caller resets the caches."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_head(self.model)

    def shutdown(self) -> None:
        """Nothing is held but memory."""


def pack_head(model: torch.nn.Module) -> None:
    """Repeat what vLLM does to the head after loading:

    with tied embeddings its reload leaves a CPU's packed copy as it was.
    """
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
