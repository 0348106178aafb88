"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

ARCHITECTURE = "ZeroklForCausalLM"
# Weight transfer engines (weights.py): our model in memory that two processes map, or in this process's;
# vLLM's own model in this process.
SHARED, OWN, STOCK = "zerokl", "zerokl-own", "zerokl-stock"
_ENGINES = {SHARED: "SharedWeightsEngine", OWN: "OwnWeightsEngine", STOCK: "StockWeightsEngine"}

_registered = False


def register() -> None:
    """Make our model and our weight transfer known by name.

    Importing them is left to the moment they are used.
    """
    global _registered
    if _registered:
        return
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    ModelRegistry.register_model(ARCHITECTURE, "zerokl.engine.rollout.vllm.model:ZeroklForCausalLM")
    for name, engine in _ENGINES.items():
        WeightTransferEngineFactory.register_engine(name, "zerokl.engine.rollout.vllm.weights", engine)
    _registered = True
