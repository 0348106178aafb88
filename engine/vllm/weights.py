"""The trainer's weights for vLLM, through memory that both map (interface: vllm/distributed/weight_transfer/base.py).

On a CPU vLLM's model computes with the trainer's own memory, and an update copies nothing; on another device it copies them once.
Either way an update carries a version, and vLLM's outputs name the version they were drawn with.
"""

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from ..shared import Handle, map_tensor


@dataclass
class SharedInit(WeightTransferInitInfo):
    """Where the weights are: a file that can be mapped."""

    path: str
    device: int
    inode: int


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """The weights have changed. Which version they are now, `finish_weight_update` tells the engine."""


class SharedWeightsEngine(WeightTransferEngine[SharedInit, SharedUpdate]):
    """Weights in shared memory, one flat tensor in the compute dtype."""

    init_info_cls = SharedInit
    update_info_cls = SharedUpdate

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Map the trainer's weights and compute with them."""
        flat = self.model.decoder.flat
        self._shared = map_tensor(Handle(init_info.path, init_info.device, init_info.inode), flat.numel(), flat.dtype)
        if self.device.type == "cpu":
            self.model.use(self._shared)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: SharedUpdate) -> None:
        """Take the weights as they now are."""
        if self.device.type != "cpu":
            self.model.decoder.flat.copy_(self._shared)
        self.model.weights_changed()

    def finish_weight_update(self) -> None:
        """Nothing to finish: the caller resets the caches."""

    def shutdown(self) -> None:
        """The mapping ends with the process."""
