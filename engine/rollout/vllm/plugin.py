"""The entry point `vllm.general_plugins`. vLLM calls `register` in each of its processes."""

ARCHITECTURE = "ZeroklForCausalLM"
# Weight transfer engines (weights.py). SHARED: our model, in memory that two processes map. OWN: our model,
# in the trainer's process. EXACT: vLLM's own model, in the trainer's process.
SHARED, OWN, EXACT = "zerokl", "zerokl-own", "zerokl-exact"
# The attribute of vLLM's model configuration that names the layout's frozen weights: they decide where each
# weight lies in the trainer's memory.
FROZEN = "zerokl_frozen"
_ENGINES = {SHARED: "SharedWeightsEngine", OWN: "OwnWeightsEngine", EXACT: "ExactWeightsEngine"}

_registered = False


def register() -> None:
    """Register our model and our weight transfer engines by name.

    vLLM imports them when it uses them.
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
