"""The head of a run's ledger: the settings that decide bits, the data, and the first weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...files.reading import shown
from ...files.writing import hash_json
from ...kernels.cpp import library
from ...model.adapters import AdapterLayout, adapted_layout
from ...model.config import ModelConfig
from ...model.freezing import frozen_weights
from ...model.lora import Lora
from ...model.weights import FlatLayout, Layout
from ...verify.environment import PACKAGE_ROOT, environment
from ...verify.ledger import Head, LedgerFile, digest, digest_ids
from ..config.lora_section import LoraConfig
from ..config.loss_presets import DEFAULTS
from ..config.run_config import FREE_SECTIONS, Config
from ..tasks.pairs import Pair
from ..tasks.problem import Problem
from ..train.state import TrainState

# The head holds the hash of the frozen reference's weights under this key.
REFERENCE = "loss.ref_model"
# The head holds the hash of each frozen weight under this prefix and the weight's name.
_FROZEN = "frozen."
# Keys of the configuration that decide no bit of the training, and why. They are not chained, and a resumed
# run may change them.
FREE = {
    "micro_batch": "how many sequences one pass takes; by the law this decides no bit",
    "shards_in_flight": "how many shards one pass takes; by the law this decides no bit",
    "parallel": "how the work is spread; by the law this decides no bit",
    "recompute": "what is kept for the backward; the same operations compute it again",
    "threads": "how the work is spread; by the law this decides no bit",
    "workers": "how the work is spread; by the law this decides no bit",
    "native": "limits of the sampler; by the law they decide no bit",
    "pool": "who draws the rollouts, and where; by the law this decides no bit",
    "vllm": "limits of the sampler; by the law they decide no bit",
    "sampler": "native and vllm-zerokl draw the same tokens (is_free: others do not)",
    "exact": "decides whether a run stops, not what it computes",
    "evaluation": "only reads the weights, with random numbers of its own",
    "monitor": "only measures, with random numbers of its own",
    "tracking": "decides only where the metrics are written as well",
    "checkpoint": "decides only what is kept",
    "ledger.detail": "decides only what is written down; the roots are the same",
    "loss.preset": "a name for the choices of the loss; each choice is chained instead",
    "task.reward_processes": "how the rewards are computed; a reward is a function of its arguments",
    "task.reward_timeout_s": "decides whether a run stops, not what it computes",
    "task.reward_memory_bytes": "decides whether a run stops, not what it computes",
    "environment.processes": "how environments are played; one is a function of its problem, key and turns",
    "environment.timeout_s": "decides which trajectories end in time; the ledger chains how each ended",
    "environment.memory_bytes": "as environment.timeout_s",
    "task.directory": "a place; the problems found there are chained instead",
    "init": "how a base model is made; the weights and the problems found there are chained instead",
    "model": "a place; the architecture and the weights found there are chained instead",
    "frozen": "patterns; the names and the bits of the weights that they freeze are chained instead",
    "lora.adapter": "a place; the first adapters found there are chained instead",
    REFERENCE: "a place; the weights found there are chained instead",
}
# Settings that most runs do not have: keys, and sections with their dot. They are chained where they are not
# the default.
CHAINED_WHERE_SET = (
    "environment.",
    "lora.",
    "loss.k",
    "loss.beta",
    "loss.semantic_entropy",
    "loss.router_aux_coef",
    "loss.gamma",
    "loss.gae_lambda",
    "loss.whiten",
    "loss.value_coef",
    "loss.value_clip",
    "loss.budgets",
    "loss.budget_weights",
    "loss.answers",
    "optimizer.critic_lr_ratio",
    "perturb.kv",
    "perturb.min_p",
    "perturb.routing",
    "perturb.top_k",
    "perturb.top_p",
    "perturb.weights",
    "perturb.weights_of",
    "precision.kv",
    "precision.weights",
    "precision.router_dtype",
    "precision.sampler_router_dtype",
    "staleness_schedule",
    "task.equivalence",
    "task.answer_prefix",
    "sampling.answer_max_tokens",
    "sampling.min_p",
    "sampling.logit_bias",
    "sampling.allowed_token_ids",
)
# The scale of the loss changes no bit unless a gradient overflows or underflows, and then the hash of the
# gradient shows it. So these settings are not chained either. But a resumed run keeps them and its scale.
_SCALE = (
    "precision.scaling",
    "precision.scale",
    "precision.growth_interval",
    "precision.backoff",
    "precision.minimum",
    "precision.maximum",
)


def flat_settings(config: Config) -> dict[str, Any]:
    """Every key of the configuration with its value."""
    flat: dict[str, Any] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping) and f"{prefix}{name}" not in FREE_SECTIONS:
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value

    walk(config.model_dump(mode="json"), "")
    return flat


def is_free(key: str, config: Config) -> bool:
    """Whether a key of this configuration decides no bit."""
    section = key[: key.find(".") + 1]
    if (key in CHAINED_WHERE_SET or section in CHAINED_WHERE_SET) and _is_default(key, config):
        return True
    if key == "steps":  # it decides bits only through the schedule of the learning rate
        return config.optimizer.schedule == "constant"
    if key == "sampler":
        return config.sampler in ("native", "vllm-zerokl")
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _is_default(key: str, config: Config) -> bool:
    section, _, name = key.partition(".")
    if section == "loss":
        return getattr(config.loss, name) == DEFAULTS[name]
    values, name = (getattr(config, section), name) if name else (config, section)
    return getattr(values, name) == type(values).model_fields[name].get_default(call_default_factory=True)


def binding(config: Config) -> dict[str, Any]:
    """The settings that decide bits, which the ledger chains."""
    settings = flat_settings(config)
    return {key: value for key, value in settings.items() if not is_free(key, config) and key not in _SCALE}


def run_head(state: TrainState, process: Mapping[str, Any]) -> Head:
    """The head of the ledger of a run that has not taken a step yet.

    process: how this process is set up; the environment records it.
    """
    config = state.config
    settings = binding(config)
    settings |= {f"model.{name}": value for name, value in architecture(state.policy.config).items()}
    free = {key: value for key, value in flat_settings(config).items() if key not in settings}
    tree = state.optimizer.hash_weights()
    problems = [[p.id, p.prompt, repr(p.answer), *_rejected(p)] for p in state.problems]
    data = hash_json([digest_ids(state.prompt_ids), problems])
    cpp = state.policy.flat.device.type == "cpu" and library() is not None
    process = {**process, "threads": torch.get_num_threads(), "cpp": cpp}
    recorded = environment(PACKAGE_ROOT, state.policy.flat.device, process)
    recorded |= {f"process.{key}": value for key, value in free.items()}
    optimizer = state.optimizer
    names = [name for entry in optimizer.layout.trained for name, _ in entry.parts]
    settings |= {REFERENCE: _ref_weights(state)} | _frozen_settings(optimizer.frozen_views())
    return Head(settings, config.seed, data, tree.root, names, tree.leaves, recorded)


def _rejected(problem: Problem) -> list[str]:
    """The rejected completion of a pair; nothing for another problem."""
    return [problem.rejected] if isinstance(problem, Pair) else []


def _frozen_settings(frozen: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The settings of the head that bind the frozen weights; none where all weights are trained.

    frozen: the name and the fp32 values of each.
    """
    return {f"{_FROZEN}{name}": f"sha256:{digest(weight)}" for name, weight in frozen}


def frozen_name(key: str) -> str | None:
    """The weight whose hash a setting of the head is; None for a setting that binds no frozen weight."""
    return key.removeprefix(_FROZEN) if key.startswith(_FROZEN) else None


def run_layout(config: ModelConfig, head: Head) -> FlatLayout:
    """The layout of the weights of a run with this head, or of its adapters. config: of its model.

    Raises ValueError where the head freezes what is no weight of the model.
    """
    if lora := _lora(head):
        return AdapterLayout(adapted_layout(config, lora), lora)
    names = list(filter(None, map(frozen_name, head.settings)))
    return Layout(config, frozen_weights(config, names), head.settings.get("loss.advantage") == "gae")


def _lora(head: Head) -> Lora | None:
    """The adapters of a run with this head; None where it has none."""
    defaults = LoraConfig()
    chosen = {name: head.settings.get(f"lora.{name}", getattr(defaults, name)) for name in Lora._fields}
    return Lora(**chosen | {"targets": tuple(chosen["targets"])}) if chosen["rank"] else None


def other_frozen_weight(frozen: Iterable[tuple[str, torch.Tensor]], head: Head) -> str | None:
    """The first frozen weight whose bits are not those that the head binds; None where all are.

    frozen: the name and the fp32 values of each.
    """
    settings = _frozen_settings(frozen).items()
    return next((frozen_name(key) for key, value in settings if head.settings.get(key) != value), None)


def altered_free_setting(config: Config, ledger: LedgerFile) -> str | None:
    """The first free setting that is not that of the run's last start, in words; None if none is.

    config: of the run's folder. The ledger notes the free settings of each start beside its chain, before
    config.toml is written. So until the next step the settings of the start before are right as well.
    """
    (step, environment), *before = reversed(ledger.starts)
    if before and step == len(ledger.lines) and not _altered(config, before[0][1]):
        return None
    if key := _altered(config, environment):
        values = f"{shown(flat_settings(config)[key])}, and {shown(environment[f'process.{key}'])}"
        return f"{key} is {values} in {ledger.path}: the file was altered"
    return None


def _altered(config: Config, environment: Mapping[str, Any]) -> str | None:
    """The first free setting that is another one in this environment of a start."""
    settings = flat_settings(config).items()
    return next((k for k, v in settings if environment.get(f"process.{k}", v) != v), None)


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The values of a model's config.json that decide bits. The context length is only a limit."""
    return {name: value for name, value in config.values.items() if name != "max_positions"}


def _ref_weights(state: TrainState) -> str:
    """The hash of the frozen reference; empty where the loss has none.

    Its weights are hashed in the compute dtype, because a run reads them in this dtype only.
    """
    if state.ref_policy is None:
        return ""
    of_model = architecture(state.ref_policy.decoder.config)
    return f"sha256:{hash_json([of_model, state.ref_policy.fingerprint()])}"
