"""zerokl: exact reinforcement learning of language models.

The log-probabilities that the trainer computes are bit for bit those that the sampler drew with.

    policy = zerokl.load_policy("models/add")            # a Hugging Face folder or hub name
    rollouts = policy.sample(["12+7="], n=4)             # token ids, and the logprobs they were drawn with
    scores = policy.score([r.pair for r in rollouts])    # the trainer's logprobs: the same bits
    model = policy.module                                # a torch module over the same weights
    summary = zerokl.train(zerokl.load_config(None, "demo", {}), "runs/demo")
    run = zerokl.load_run("runs/demo")                   # metrics, rollouts and ledger of a run's folder
    zerokl.write_report(["runs/demo"])                   # the page of `zerokl report`
    checks = zerokl.check_law("models/add")              # the checks of the law on this machine
"""

from importlib import import_module
from typing import Any

from .files.installed import INSTALL_ZEROKL, has_trainer

_NAMES = {
    "CausalLM": "model.causal_lm",
    "Config": "engine.config.run_config",
    "load_config": "engine.config.config_file",
    "Policy": "engine.rollout.policy",
    "load_policy": "engine.rollout.policy",
    "Rollout": "engine.rollout.types",
    "NativeSampler": "engine.rollout.native",
    "train": "engine.runs.run",
    "resume": "engine.runs.run",
    "load_run": "engine.runs.loaded",
    "LoadedRun": "engine.runs.loaded",
    "write_report": "engine.runs.report.page",
    "initialise": "engine.runs.init",
    "check_law": "engine.runs.checks.verify",
    "mismatch_metrics": "verify.mismatch",
    "MismatchError": "engine.train.monitor",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `zerokl --help` does not wait for torch."""
    if name not in _NAMES:
        raise AttributeError(f"module 'zerokl' has no attribute {name!r}")
    if not has_trainer() and name != "mismatch_metrics":
        raise ImportError(f"zerokl.{name}: zerokl-audit, installed here, does not have it; {INSTALL_ZEROKL}")
    return getattr(import_module(f".{_NAMES[name]}", __name__), name)
