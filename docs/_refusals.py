"""The table of docs/support.md that says which family is refused where, by the functions that refuse it."""

from collections.abc import Callable

from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.init import preset_config
from zerokl.engine.runs.samplers import refuse_model, refuse_uncompared
from zerokl.engine.train.parallel.expert import check_shared_experts
from zerokl.model.adapters import adapted_layout
from zerokl.model.config import ModelConfig
from zerokl.model.families import MODEL_TYPES
from zerokl.model.lora import Lora
from zerokl.model.shared_context import check_shared_rows
from zerokl.pages.markdown import table

from ._markdown import prose

_NAME = "model"  # for the architecture, in a reason


def _sampler(name: str) -> Callable[[ModelConfig], None]:
    return lambda model: refuse_model(Config(sampler=name), model)


def _vllm_exact(model: ModelConfig) -> None:
    _sampler("vllm-exact")(model)
    refuse_uncompared(model.architecture)


# The heading of each column -> what raises ValueError where the family is refused there.
WAYS: dict[str, Callable[[ModelConfig], None]] = {
    "`native`": _sampler("native"),
    "LoRA": lambda model: adapted_layout(model, Lora(2, 4.0)) and None,
    "`vllm-zerokl`": _sampler("vllm-zerokl"),
    "`vllm-exact`": _vllm_exact,
    "`parallel.tensor`": lambda model: model.check_leaves(2),
    "`parallel.context`": lambda model: check_shared_rows(model, [], 2),
    "`parallel.expert`": lambda model: check_shared_experts(model, 2),
    "a GPU": lambda model: model.refuse_on_triton(),
}


def refusal(check: Callable[[], object]) -> str | None:
    """What a check raises as ValueError; None where it passes."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


def refusals() -> str:
    """A row for each family, and the reasons below."""
    reasons: dict[str, int] = {}

    def cell(model: ModelConfig, check: Callable[[ModelConfig], None]) -> str:
        reason = refusal(lambda: check(model))
        if reason is None:
            return "yes"
        return f"no ({reasons.setdefault(reason.replace(model.architecture, _NAME), len(reasons) + 1)})"

    rows = []
    for name in sorted(MODEL_TYPES):
        model = preset_config(name, 64, {"num_attention_heads": 4, "num_key_value_heads": 4})
        rows.append([f"`{name}`", *(cell(model, check) for check in WAYS.values())])
    below = [f"{i}. {prose(reason)}" for reason, i in reasons.items()]
    return table(["family", *WAYS], rows) + "\n\n" + "\n".join(below)
