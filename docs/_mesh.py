"""What goes with which form of ranks, by the rules of the settings; and what a step is predicted to take."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from zerokl.benchmarks.predict_step import training
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.init import preset_config
from zerokl.engine.train.parallel.expert import check_shared_experts
from zerokl.model.families import MODEL_TYPES
from zerokl.model.operation import Work
from zerokl.model.shared_context import check_shared_rows
from zerokl.model.weights import Layout
from zerokl.pages.markdown import table

from ._refusals import refusal
from ._wire import JOINS, MODELS, NVLINK, sent_by_a_join, sent_by_a_layer

_FSDP = {"parallel.engine": "fsdp"}
_TENSOR = {"parallel.tensor": 2, "precision.leaves": 2}
_CONTEXT = {"parallel.context": 2}
# Ranks in a form, by its name.
FORMS: dict[str, dict[str, Any]] = {
    "fsdp": _FSDP,
    "tensor": _TENSOR,
    "context": _CONTEXT,
    "tensor, context": _TENSOR | _CONTEXT,
    "fsdp, tensor": _FSDP | _TENSOR,
    "fsdp, context": _FSDP | _CONTEXT,
    "fsdp, tensor, context": _FSDP | _TENSOR | _CONTEXT,
    "expert": {"parallel.expert": 2},
}
# What a run may have, by its name.
SETTINGS: dict[str, dict[str, Any]] = {
    "a reference": {"loss.kl_coef": 0.1},
    "a critic": {"loss.preset": "ppo"},
    "frozen weights": {"frozen": ("*.norm.*",)},
    "Muon": {"optimizer.name": "muon"},
    "LoRA": {"lora.rank": 4},
    "LoRA that is not merged": {"lora.rank": 4, "lora.merge": False},
    "quantised weights": {"precision.weights": "int8/row"},
    "moments in 8 bits": {"optimizer.moments": "int8"},
    "a hybrid's prompts read once": {"precision.state_prompts": "once"},
    "state on the disk": {"memory.offload": "disk"},
    "older weights": {"max_staleness": 1},
    "several shards in a pass": {"shards_in_flight": 2},
    "another dtype in the sampler": {"precision.sampler_dtype": "bfloat16", "exact": False},
    "a gradient audit": {"monitor.gradient": 1, "exact": False},
    "several workers": {"workers": 2},
    "actors": {"pool.engine": "ray"},
    "vllm-zerokl": {"sampler": "vllm-zerokl"},
    "a GPU": {"device": "cuda"},
}
# A family of each kind.
KINDS = {
    "dense models": "qwen3",
    "norms over all heads": "olmo2",
    "experts": "qwen3_moe",
    "gated delta nets": "qwen3_5_text",
    "gated delta nets, with experts": "qwen3_next",
    "latent attention, with experts": "deepseek_v3",
    "attention sinks, with experts": "gpt_oss",
}
_SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


def refusal_of_settings(settings: Mapping[str, Any], form: str) -> str | None:
    """Why a run with these settings is refused in a form; None where it is not."""

    def check() -> None:
        config = load_config(None, "demo", FORMS[form] | settings)
        check_settings(config, settings.get("device", "cpu"), ranks=8)

    return refusal(check)


def refusal_of_kind(kind: str, form: str) -> str | None:
    """The same of a kind of model."""
    name = KINDS[kind]
    c = preset_config(name, 64, _SIZES | dict(MODEL_TYPES[name].small))

    def check() -> None:
        c.check_leaves(FORMS[form].get("precision.leaves", 1))
        if "parallel.context" in FORMS[form]:
            check_shared_rows(c, Layout(c).trained, 2)
        if "parallel.expert" in FORMS[form]:
            check_shared_experts(c, 2)

    return refusal(check)


def refused() -> str:
    """A row for each kind of model and each setting, a column for each form."""
    rows = [[kind, *(refusal_of_kind(kind, form) for form in FORMS)] for kind in KINDS]
    rows += [[name, *(refusal_of_settings(x, form) for form in FORMS)] for name, x in SETTINGS.items()]
    return table(["", *FORMS], [[name, *("no" if x else "yes" for x in cells)] for name, *cells in rows])


class Mesh(NamedTuple):
    """The sizes of a mesh's dimensions."""

    dp: int
    cp: int
    tp: int
    fsdp: bool = False

    @property
    def size(self) -> int:
        """All ranks."""
        return self.dp * self.cp * self.tp


MESHES = [
    Mesh(1, 1, 1),
    Mesh(2, 1, 1, True),
    Mesh(1, 1, 2),
    Mesh(1, 2, 1),
    Mesh(8, 1, 1, True),
    Mesh(4, 1, 2, True),
    Mesh(1, 1, 8),
    Mesh(2, 2, 2, True),
    Mesh(8, 1, 8, True),
    Mesh(8, 2, 4, True),
    Mesh(8, 8, 1, True),
]
# Bytes a second between machines of eight GPUs, for each GPU: an assumption, as in pool_simulation.py.
NETWORK = 25e9
NODE, SHARDS, SEQUENCES, LENGTH = 8, 8, 128, 1024


def _sent(mesh: Mesh, name: str, weights: int) -> tuple[float, float]:
    """Bytes that a rank sends in a step: for the rows of a forward, and for weights and gradients."""
    w, rows = MODELS[name], SEQUENCES * LENGTH // mesh.dp
    for_rows = w.layers * JOINS * sent_by_a_join(mesh.tp, rows // mesh.cp, w.hidden) if mesh.tp > 1 else 0
    if mesh.cp > 1:  # of heads and columns a rank has its part
        part = w._replace(queries=w.queries // mesh.tp, keys=w.keys // mesh.tp)
        part = part._replace(intermediate=w.intermediate // mesh.tp)
        for_rows += w.layers * sent_by_a_layer(mesh.cp, rows, part)
    part, replicas = weights / mesh.tp, mesh.dp * mesh.cp
    others = (replicas - 1) / replicas
    if mesh.fsdp:  # each layer is gathered twice and its gradient goes to its owners, in each round
        return for_rows, (2 + 2 + 4) * part * others * SHARDS / mesh.dp
    return for_rows, (4 + 2) * part / mesh.cp * (mesh.dp - 1) / mesh.dp + 2 * part * (1 - 1 / mesh.cp)


def predicted(name: str = "8B") -> str:
    """For each mesh: GB of weights and state in a rank, what it computes and sends, and the time of both."""
    w, lines = MODELS[name], []
    sizes = {"hidden_size": w.hidden, "head_dim": w.head, "num_hidden_layers": w.layers}
    sizes |= {"num_attention_heads": w.queries // w.head, "num_key_value_heads": w.keys // w.head}
    c = preset_config("qwen3", 151936, sizes | {"intermediate_size": w.intermediate})
    weights, tokens = Layout(c).numel, SEQUENCES * LENGTH
    alone_s = training(c, Work(tokens, tokens * LENGTH // 2, tokens))
    for mesh in MESHES:
        # fp32 masters, two moments and a gradient, with fsdp; else the weights in bf16, and a whole gradient.
        state = 16 * weights / mesh.size
        if not mesh.fsdp:
            state = weights * (2 / mesh.tp + 12 / mesh.size + 4 / (mesh.tp * mesh.cp))
        rows_bytes, weights_bytes = _sent(mesh, name, weights)
        rate = NVLINK if mesh.size <= NODE else NETWORK
        seconds = alone_s / mesh.size, rows_bytes / NVLINK + weights_bytes / rate
        grid = f"{mesh.dp} x {mesh.cp} x {mesh.tp}"
        engine = "fsdp" if mesh.fsdp else "replicated"
        cells = f"{state / 1e9:,.0f}", f"{seconds[0]:.2f}", f"{(rows_bytes + weights_bytes) / 1e9:,.0f}"
        lines.append(
            [str(mesh.size), grid, engine, *cells, *(f"{x:.2f}" for x in (seconds[1], sum(seconds)))]
        )
    head = ["GPUs", "dp x cp x tp", "engine", "weights, state, GB", "computing, s", "a rank sends, GB"]
    return table([*head, "sending, s", "together, s"], lines)
