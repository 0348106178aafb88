"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

ARCHITECTURE = "ZeroklForCausalLM"
WEIGHT_TRANSFER = "zerokl"

_registered = False


def register() -> None:
    """Make our model and our weight transfer known by name. Importing them is left to the moment they are used."""
    global _registered
    if _registered:
        return
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    ModelRegistry.register_model(ARCHITECTURE, "zerokl.engine.vllm.model:ZeroklForCausalLM")
    WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, "zerokl.engine.vllm.weights", "SharedWeightsEngine")
    _registered = True
