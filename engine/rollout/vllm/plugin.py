"""The entry point `vllm.general_plugins`. vLLM calls `register` in each of its processes."""

ARCHITECTURE = "ZeroklForCausalLM"
# The key in the model's configuration under which our model finds the version of its tile table.
TILES_OVERRIDE = "zerokl_tiles"
# The key under which it finds how keys and values are quantised (Numerics.kv).
KV = "zerokl_kv"
# The key under which it finds the order of attention (Numerics.attention).
ATTENTION = "zerokl_attention"
# Weight transfer engines (weight_transfer.py). SHARED: our model, in memory that two processes map. OWN: our
# model, in the trainer's process. EXACT: vLLM's own model, in the trainer's process.
SHARED, OWN, EXACT = "zerokl", "zerokl-own", "zerokl-exact"
# The attribute of vLLM's model configuration that names the layout's frozen weights: they decide where each
# weight lies in the trainer's memory.
FROZEN = "zerokl_frozen"
# The attribute that says whether a critic's head lies among the trainer's weights.
HAS_VALUE_HEAD = "zerokl_value_head"
# The attribute with the shape of LoRA's adapters that are not merged into the weights (model/lora.py::Lora).
LORA = "zerokl_lora"
_ENGINES = {SHARED: "SharedWeightsEngine", OWN: "OwnWeightsEngine", EXACT: "ExactWeightsEngine"}


def register() -> None:
    """Register our model and our weight transfer engines by name, once in a process.

    vLLM imports them when it uses them.
    """
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    for name, engine in _ENGINES.items():
        WeightTransferEngineFactory.register_engine(
            name, "zerokl.engine.rollout.vllm.weight_transfer", engine
        )
    ModelRegistry.register_model(ARCHITECTURE, "zerokl.engine.rollout.vllm.model:ZeroklForCausalLM")
