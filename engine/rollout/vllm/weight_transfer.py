"""The trainer's weights for vLLM (interface: vllm/distributed/weight_transfer/base.py).

Our model computes with the trainer's own memory, so an update copies nothing; with CUDA graphs it copies
once. vLLM's own model has memory of its own, and an update loads the checkpoint again in vLLM's way. Each
update carries a version, and vLLM's outputs name the version that they were drawn with.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ....kernels.matmul import UNPACKED, pack_weights
from ....model.weights import Layout
from ...processes.shared_tensor import Handle, map_tensor


@dataclass
class SharedInit(WeightTransferInitInfo):
    """The file that holds the weights and can be mapped (shared_tensor.Handle).

    adapters: that of LoRA's adapters, where they are not merged into the weights.
    """

    path: str
    device: int
    inode: int
    adapters: list[Any] | None = None


@dataclass
class OwnInit(WeightTransferInitInfo):
    """The weights themselves, [layout.numel] in the compute dtype, for vLLM in the trainer's process.

    adapters: LoRA's, where they are not merged into the weights.
    """

    flat: torch.Tensor
    adapters: torch.Tensor | None = None
    copy: bool = False  # every update copies them, for CUDA graphs, which hold the addresses of vLLM's own


@dataclass
class ExactInit(WeightTransferInitInfo):
    """The weights, and the layout that says where each tensor of a checkpoint lies in them."""

    flat: torch.Tensor
    layout: Layout


@dataclass
class Update(WeightTransferUpdateInfo):
    """The weights have changed. `finish_weight_update` tells the engine their new version."""


class SharedWeightsEngine(WeightTransferEngine[SharedInit, Update]):
    """For our model on a CPU: weights in memory that the trainer's process and vLLM's both map."""

    init_info_cls = SharedInit
    update_info_cls = Update

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Map the trainer's weights and compute with them."""
        flat = self.model.decoder.flat
        handle = Handle(init_info.path, init_info.device, init_info.inode)
        adapters = init_info.adapters
        if adapters is not None:
            adapters = map_tensor(Handle(*adapters), self.model.adapters.numel(), torch.float32)
        self.model.use(map_tensor(handle, flat.numel(), flat.dtype), adapters)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: Update) -> None:
        """Take the weights as they are now, and pack them until the next update.

        That is safe, because only vLLM's model reads this mapping of the weights.
        """
        self.model.weights_changed()
        self.model.packed = pack_weights(self.model.decoder.packable())

    def finish_weight_update(self) -> None:
        """Nothing to finish: the caller resets the caches."""

    def shutdown(self) -> None:
        """Let go of the packed weights."""
        self.model.packed = UNPACKED


class OwnWeightsEngine(SharedWeightsEngine):
    """For our model in the trainer's process, on any device."""

    init_info_cls = OwnInit

    def init_transfer_engine(self, init_info: OwnInit) -> None:
        """Compute with the trainer's tensor, or with a copy of it.

        Raises ValueError for a tensor of another shape, dtype or device than the model's.
        """
        current, flat = self.model.decoder.flat, init_info.flat
        if (current.shape, current.dtype, current.device) != (flat.shape, flat.dtype, flat.device):
            raise ValueError(
                f"vllm: the trainer's weights are {tuple(flat.shape)} {flat.dtype} on {flat.device}, "
                f"vLLM's model has {tuple(current.shape)} {current.dtype} on {current.device}; "
                "make the trainer's GPU the first that is visible (CUDA_VISIBLE_DEVICES)"
            )
        self._source = init_info if init_info.copy else None
        if not init_info.copy:
            self.model.use(flat, init_info.adapters)

    def receive_weights(self, update_info: Update) -> None:
        """Take the weights as they are now.

        They are not packed, because the trainer reads this tensor too, between its own updates.
        """
        if self._source is not None:
            self.model.decoder.flat.copy_(self._source.flat)
            if self.model.adapters is not None:
                self.model.adapters.copy_(self._source.adapters)
        self.model.weights_changed()


class ExactWeightsEngine(WeightTransferEngine[ExactInit, Update]):
    """For vLLM's own model in the trainer's process."""

    init_info_cls = ExactInit
    update_info_cls = Update

    def init_transfer_engine(self, init_info: ExactInit) -> None:
        """Keep the trainer's tensor."""
        self._init = init_info

    def start_weight_update(self) -> None:
        """Undo what vLLM did to the weights after it first loaded them."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        """Load the weights as they are now."""
        self.model.load_weights(iter(self._init.layout.stored_tensors(self._init.flat.detach()).items()))

    def finish_weight_update(self) -> None:
        """Repeat what vLLM did to the weights after it first loaded them. The caller resets the caches."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_head(self.model)

    def shutdown(self) -> None:
        """Nothing to end: this engine holds only memory."""


def pack_head(model: torch.nn.Module) -> None:
    """Repeat what vLLM does to lm_head after loading.

    With tied embeddings, vLLM's own reload does not renew the packed copy of lm_head that it makes on a CPU.
    """
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
