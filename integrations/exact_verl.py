"""The actor of verl over zerokl's kernels, and a rollout that draws with them (verl 0.9.1, FSDP2).

    VERL_USE_EXTERNAL_MODULES=zerokl.integrations.exact_verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.rollout.name=zerokl ...

verl imports this module in each of its processes. It registers an engine for language models, in the place of
verl's own for FSDP, and the rollout `zerokl` (exact_verl_rollout.py). Data, rewards, advantages, losses, the
optimizer and the trainer stay verl's. Actor and reference score with the kernels that draw, so verl's metric
training/rollout_probs_diff_max is 0.0.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import verl
from tensordict import TensorDict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout import base as rollouts
from verl.workers.rollout.replica import RolloutReplicaRegistry

from ..engine.train.parallel.fsdp import apply_fsdp, read_pieces
from ..kernels.sampling_params import SamplingParams
from ..model.causal_lm import CausalLM
from ..model.config import ModelConfig
from ..model.labels import UNLABELLED
from ..model.weights import Layout

SUPPORTED = ("0.9.1",)
_GROWTH_INTERVAL = 400  # steps without an overflow before the loss scale doubles; verl's


class ExactActor(CausalLM):
    """The module that verl trains and saves. Its `config` is transformers', which verl saves beside it."""

    def __init__(self, folder: Path, hf_config: Any, recompute: bool):
        """Without memory (meta). Raises ValueError for a model that zerokl does not know."""
        layout = Layout(ModelConfig.from_file(folder))
        if layout.config.experts is not None:
            raise ValueError("exact_verl: a mixture of experts is refused: its weights are not sharded")
        super().__init__(layout.config, device="meta", recompute=recompute, layout=layout)
        self.layout, self.config = layout, hf_config

    def can_generate(self) -> bool:
        """Asked by verl before it saves a generation config; it has none of this module."""
        return False

    def forward(self, use_cache: bool = False, **inputs: Any) -> dict[str, torch.Tensor]:
        """log_probs and entropy of CausalLM's forward. FSDP finds no tensors in a dataclass."""
        output = super().forward(**inputs)
        return {"log_probs": output.log_probs, "entropy": output.entropy}


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], get_device_name(), get_vendor())
class ExactEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, with ExactActor as its model.

    Raises ValueError, by name, for settings of the model or the engine that the kernels do not have.
    """

    def __init__(self, model_config: Any, engine_config: Any, *arguments: Any, **named: Any):
        if verl.__version__ not in SUPPORTED:
            raise ValueError(
                f"exact_verl: verl {verl.__version__} is not supported; supported is {', '.join(SUPPORTED)}"
            )
        for name, value, reason in _refused(model_config, engine_config):
            raise ValueError(f"exact_verl: {name} ({value!r}) is refused: {reason}")
        super().__init__(model_config, engine_config, *arguments, **named)
        size = self.device_mesh.size()
        if self.device_mesh.ndim != 1:
            raise ValueError(f"exact_verl: fsdp_size must be -1 or the number of ranks ({size})")

    def _build_module(self) -> ExactActor:
        config = self.model_config
        return ExactActor(Path(config.local_path), config.hf_config, config.enable_gradient_checkpointing)

    def _build_fsdp_module(self, module: ExactActor) -> ExactActor:
        precision = self.engine_config.mixed_precision or {}
        dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        offload = self.engine_config.offload_policy or self.engine_config.forward_only
        if offload:
            self._is_offload_param = self._is_offload_optimizer = False
            self._uses_fsdp2_cpu_offload_policy = True
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else None
        apply_fsdp(module, self.device_mesh, dtype, policy)
        module.to_empty(device="cpu" if offload else get_device_id())
        read_pieces(module, Path(self.model_config.local_path), module.layout, self.device_mesh)
        self._autocast_dtype = torch.float32  # the kernels round where their contract says; the loss is fp32
        if dtype == torch.float16:
            self.scaler = ShardedGradScaler(get_device_name(), growth_interval=_GROWTH_INTERVAL)
        return module

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Packed sequences without padding; every token after the first of a sequence is scored."""
        for name in ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared"):
            if tu.get_non_tensor_data(micro_batch, name, False):
                raise ValueError(f"exact_verl: {name} is refused: it needs logits, which are not kept")
        if extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", [])):
            raise ValueError("exact_verl: multi_modal_inputs are refused: the kernels read text only")
        ids, starts = micro_batch["input_ids"].values(), micro_batch["input_ids"].offsets()
        labels = ids.clone()
        labels[starts[:-1]] = UNLABELLED
        inputs = {
            "input_ids": ids,
            "labels": labels,
            "cu_seqlens": starts,
            "sampling_params": SamplingParams(_temperature(micro_batch["temperature"])),
        }
        return inputs, {}

    def prepare_model_outputs(
        self,
        output: dict[str, torch.Tensor],
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, torch.Tensor]:
        """Nested as input_ids. verl has the value of a token at the place before it."""
        wanted = ["log_probs"]
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            _refuse_entropy_bonus(logits_processor_func)
            wanted.append("entropy")
        starts = micro_batch["input_ids"].offsets()
        # The first token of each sequence has no label, so what rolls over an end is 0.
        return {
            name: torch.nested.nested_tensor_from_jagged(output[name].roll(-1), starts) for name in wanted
        }


def _temperature(value: float | torch.Tensor) -> float:
    """The temperature of a micro-batch. Raises ValueError where its sequences have several, or 0."""
    values = set(value.tolist()) if isinstance(value, torch.Tensor) else {float(value)}
    if len(values) > 1 or 0.0 in values:
        raise ValueError(f"exact_verl: temperature ({sorted(values)}) must be one number above 0")
    return values.pop()


def _refuse_entropy_bonus(loss_function: Any) -> None:
    """Raise ValueError where a loss takes the entropy's gradient, which the kernels do not have.

    loss_function: verl's, with its settings; None where nothing is trained.
    """
    settings = getattr(loss_function, "keywords", {}).get("config")
    if getattr(settings, "entropy_coeff", 0.0):
        raise ValueError(
            f"exact_verl: actor.entropy_coeff ({settings.entropy_coeff}) is refused: the kernels' entropy "
            "has no gradient; set it to 0"
        )


def _refused(model: Any, engine: Any) -> Iterator[tuple[str, Any, str]]:
    """The settings that are on and cannot be exact: name, value, reason."""
    tiled = model.tiled_mlp.get("enabled", False)
    qat = getattr(getattr(engine, "qat", None), "enable", False)
    settings = (
        ("actor.strategy", engine.strategy, engine.strategy != "fsdp2", "set fsdp2"),
        ("model.lora_rank", model.lora_rank, model.lora_rank > 0, "the kernels read whole weights"),
        ("model.use_liger", model.use_liger, model.use_liger, "zerokl's kernels score"),
        ("model.use_fused_kernels", True, model.use_fused_kernels, "zerokl's kernels score"),
        ("model.tiled_mlp.enabled", tiled, tiled, "zerokl's kernels score"),
        ("model.mtp.enable", True, model.mtp.enable, "the kernels have no such layers"),
        ("model.enable_activation_offload", True, model.enable_activation_offload, "it hooks verl's layers"),
        (
            "ulysses_sequence_parallel_size",
            engine.ulysses_sequence_parallel_size,
            engine.ulysses_sequence_parallel_size > 1,
            "a sequence is scored by one rank",
        ),
        ("qat.enable", qat, qat, "the kernels compute in fp32, bf16 or fp16"),
    )
    for name, value, is_on, reason in settings:
        if is_on:
            yield name, value, reason


def _exact_replica() -> type:
    """Of exact_verl_rollout. A process of Ray may import that first; then verl imports this module in it."""
    from .exact_verl_rollout import ExactReplica

    return ExactReplica


rollouts._ROLLOUT_REGISTRY["zerokl", "async"] = "zerokl.integrations.exact_verl_rollout.ExactRollout"
RolloutReplicaRegistry.register("zerokl", _exact_replica)
