"""The head of a run's ledger: the settings that decide bits, the data, and the first weights."""

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
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
from ...verify.ledger import Head, LedgerFile, digest, digest_ids
from ...verify.run_environment import PACKAGE_ROOT, environment
from ..config.lora_section import LoraConfig
from ..config.run_config import Config
from ..config.section import settings_of
from ..tasks.pairs import Pair
from ..tasks.problem import Problem
from ..train.state import TrainState

# The head holds the hash of the frozen reference's weights under this key.
REFERENCE = "loss.ref_model"
# The head holds the hash of each frozen weight under this prefix and the weight's name.
_FROZEN = "frozen."


def flat_settings(config: Config) -> dict[str, Any]:
    """Every key of the configuration with its value."""
    values = config.model_dump(mode="json")
    return {key: reduce(getitem, key.split("."), values) for key in settings_of(type(config))}


def is_free(key: str, config: Config) -> bool:
    """Whether a key of this configuration decides no bit."""
    setting = settings_of(type(config))[key]
    return setting.head.is_free(config) or (setting.head.where_set and not setting.is_set(config))


def binding(config: Config) -> dict[str, Any]:
    """The settings that decide bits, which the ledger chains."""
    values, settings = flat_settings(config), settings_of(type(config))
    return {key: values[key] for key in values if not is_free(key, config) and not settings[key].head.kept}


def run_head(state: TrainState, process: Mapping[str, Any]) -> Head:
    """The head of the ledger of a run that has not taken a step yet.

    process: how this process is set up; the environment records it.
    """
    config = state.config
    settings = binding(config)
    settings |= {f"model.{name}": value for name, value in architecture(state.policy.config).items()}
    free = {key: value for key, value in flat_settings(config).items() if key not in settings}
    tree = state.optimizer.weights.hash()
    problems = [[p.id, p.prompt, repr(p.answer), *_rejected(p)] for p in state.problems]
    data = hash_json([digest_ids(state.prompt_ids), problems])
    cpp = state.policy.flat.device.type == "cpu" and library() is not None
    process = {**process, "threads": torch.get_num_threads(), "cpp": cpp}
    recorded = environment(PACKAGE_ROOT, state.policy.flat.device, process)
    recorded |= {f"process.{key}": value for key, value in free.items()}
    optimizer = state.optimizer
    names = [name for entry in optimizer.layout.trained for name, _ in entry.parts]
    settings |= {REFERENCE: _ref_weights(state)} | _frozen_settings(optimizer.weights.frozen_views())
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
    reference = architecture(state.ref_policy.decoder.config)
    return f"sha256:{hash_json([reference, state.ref_policy.fingerprint()])}"
