"""GRPO and RLOO of TRL, exactly on-policy: zerokl's kernels draw and score, the rest is TRL's.

    from zerokl.integrations.exact_trl import ExactGRPOTrainer as GRPOTrainer

The model is the transformers model that TRL trains. Its Parameters, the optimizer, the losses, data, logging
and checkpoints are TRL's. In place of transformers' generate, the native sampler draws; with `use_vllm=True`,
vLLM with zerokl's decoder inside. In place of the model's forward, the same kernels score what was drawn,
under the distribution that it was drawn from. So TRL's metric sampling/sampling_logp_difference/max is 0.0 at
every generation. A run stops where it is not.

| dtype of the kernels | where |
| --- | --- |
| bf16, fp16 | `bf16=True`, `fp16=True`; the Parameters keep their dtype |
| that of the Parameters | otherwise |
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import trl
from transformers import ProcessorMixin
from trl import GRPOTrainer, RLOOTrainer

from ..engine.config.vllm_section import VllmConfig
from ..engine.rollout.native import NativeSampler
from ..engine.rollout.types import DrawParams, Request, RngKey, Rollout
from ..engine.rollout.vllm.sampler import VllmZeroklSampler
from ..engine.train.monitor import Monitor
from ..kernels.philox import Stream
from ..kernels.sampling_params import WHY_NO_PENALTY, SamplingParams
from .exact_vllm import open_vllm
from .transformers import exact

SUPPORTED = ("1.14.2", "1.15.0", "1.16.0")

# Settings of TRL that would change what is drawn or scored, each with the values that ask for nothing, and
# the reason. A setting that a release does not have is off.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_transformers_continuous_batching": ((False,), "zerokl's sampler draws"),
    "cast_lm_head_to_fp32": ((False,), "the kernels compute the logits in the compute dtype"),
    "use_liger_kernel": ((False,), "zerokl's kernels score"),
    "repetition_penalty": ((None, 1.0), WHY_NO_PENALTY),
    "generation_kwargs": ((None, {}), "the native sampler does not know transformers' arguments"),
    "cache_implementation": ((None,), "the native sampler has a cache of its own"),
    "entropy_coef": ((0.0,), "the kernels' entropy has no gradient"),
    "use_adaptive_entropy": ((False,), "the kernels' entropy has no gradient"),
    "torch_compile": ((False,), "a compiled forward is not the kernels'"),
    "deepspeed": ((None,), "the kernels read whole Parameters; one process or DDP has them"),
    "fsdp": ((None, "", [], False), "the kernels read whole Parameters; one process or DDP has them"),
}
# With use_vllm=True, likewise.
_REFUSED_WITH_VLLM: dict[str, tuple[tuple[Any, ...], str]] = {
    "vllm_mode": (("colocate",), "vLLM must be in the trainer's process, whose weights it reads"),
    "vllm_tensor_parallel_size": (
        (1,),
        "it cuts the sums of a product in parts, which are added in another order than the trainer's; each "
        "rank has a vLLM of its own",
    ),
    "vllm_model_impl": (("vllm",), "zerokl's decoder is the model"),
    "vllm_enable_sleep_mode": ((False,), "vLLM reads the trainer's own copy of the weights"),
    "vllm_structured_outputs_regex": ((None,), "the trainer does not score under a grammar"),
}
# Arguments of a trainer, likewise.
_REFUSED_ARGUMENTS = {
    "peft_config": "PEFT adapters are not supported; zerokl's own trainer has LoRA (lora.rank)",
    "tools": "conversations of several turns are not supported; zerokl's own trainer has environments",
    "rollout_func": "the native sampler draws",
    "environment_factory": "conversations of several turns are not supported",
    "quantization_config": "quantised models are not supported; load the model in fp32, bf16 or fp16",
}
# Losses that multiply by the logprob itself.
_LOGPROB_LOSSES = ("cispo", "vespo")


class _ExactTrainer:
    """What both trainers share. It stands before TRL's trainer in the order of methods.

    vllm: limits of vLLM, where use_vllm=True. policy: see ExactModel. weights_drawn_with: the SHA-256 of the
    weights of the last generation.
    """

    def __init__(self, *arguments: Any, vllm: VllmConfig | None = None, **named: Any):
        if trl.__version__ not in SUPPORTED:
            raise ValueError(
                f"exact_trl: TRL {trl.__version__} is not supported; supported are {', '.join(SUPPORTED)}"
            )
        for name, reason in _REFUSED_ARGUMENTS.items():
            if named.get(name):
                raise ValueError(f"exact_trl: {name} is refused: {reason}")
        config = named.get("args") or next((a for a in arguments if hasattr(a, "num_generations")), None)
        use_vllm = bool(config is not None and config.use_vllm)
        if config is not None:  # TRL acts on some settings while it is made
            _refuse_settings(config)
        if use_vllm:  # TRL would start its own
            without = copy.copy(config)
            without.use_vllm = False
            arguments = tuple(without if a is config else a for a in arguments)
            named = {name: without if a is config else a for name, a in named.items()}
        super().__init__(*arguments, **named)
        _refuse_settings(self.args)
        _refuse_trainer(self)
        sampling_params = _sampling_params(self)
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        # transformers 5 renames the setting, and warns where the old name is read.
        renamed = hasattr(self.args, "activation_checkpointing")
        recompute = getattr(self.args, "activation_checkpointing" if renamed else "gradient_checkpointing")
        self.policy = exact(self.model, dtype, sampling_params, recompute)
        if self.ref_model is not None:
            exact(self.accelerator.unwrap_model(self.ref_model), dtype, sampling_params)
        self.sampler: NativeSampler | VllmZeroklSampler = NativeSampler(self.policy.decoder)
        if use_vllm:
            vllm = vllm or VllmConfig(context=self.args.vllm_max_model_length or 0)
            self.sampler = open_vllm(self.accelerator.unwrap_model(self.model), self.policy, vllm)
            weakref.finalize(self, self.sampler.close)
        self.weights_drawn_with = ""
        # The step of a stream's last generation, and the prompts that it has drawn for in that step.
        self._prompts_drawn = {Stream.SAMPLE: (0, 0), Stream.EVALUATE: (0, 0)}
        self._drawn: list[Rollout] = []  # that no forward has scored yet

    def _draw(self, prompt_ids: Sequence[Sequence[int]], num_generations: int) -> list[Rollout]:
        """A completion of each prompt; the prompts of a group stand side by side, over all ranks."""
        step = self.state.global_step
        self.policy.sync()
        self.sampler.sync_weights(step)
        draw_params = DrawParams(self.policy.sampling_params, frozenset(self.eos_token_ids))
        requests = [
            Request(tuple(ids), key, draw_params, self.max_completion_length)
            for ids, key in zip(prompt_ids, self._keys(len(prompt_ids), num_generations), strict=True)
        ]
        completions = self.sampler.generate(requests)
        # After the draw: the copy that is hashed is the one that drew.
        in_vllm = self.sampler.weights() if isinstance(self.sampler, VllmZeroklSampler) else None
        self.weights_drawn_with = self.policy.check_fresh(in_vllm)
        self._drawn = [
            Rollout.of_one_turn(
                r.rng_key.prompt, r.rng_key.sample, r.ids, c.ids, c.logprobs, c.finish, c.weight_version
            )
            for r, c in zip(requests, completions, strict=True)
        ]
        return self._drawn

    def _keys(self, rows: int, num_generations: int) -> list[RngKey]:
        """The keys of this rank's rows. They depend on the place in the whole batch, not on the ranks."""
        step, ranks = self.state.global_step, self.accelerator.num_processes
        stream = Stream.SAMPLE if self.model.training else Stream.EVALUATE
        last, prompts = self._prompts_drawn[stream]
        first = prompts if last == step else 0
        self._prompts_drawn[stream] = step, first + -(-rows * ranks // num_generations)
        start = self.accelerator.process_index * rows
        places = (divmod(i, num_generations) for i in range(start, start + rows))
        return [RngKey(self.args.seed, step, stream, first + prompt, sample) for prompt, sample in places]

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's method of this name, [B, logits_to_keep] each, by zerokl's kernels.

        Under top-k, top-p and min-p too, a logprob is that of the distribution which was drawn from. TRL's
        own is of the whole vocabulary.
        """
        given = [name for name, value in others.items() if value is not None and value is not False]
        if given:
            raise ValueError(
                f"exact_trl: {given[0]} is refused: only text is scored, without auxiliary losses"
            )
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        rows = batch_size or len(input_ids)
        outputs = [
            model(
                input_ids=input_ids[i : i + rows],
                attention_mask=attention_mask[i : i + rows],
                labels=labels[i : i + rows],
                exact=True,
            )
            for i in range(0, len(input_ids), rows)
        ]
        logps = torch.cat([output.log_probs[:, -logits_to_keep:] for output in outputs])
        if self._drawn and model is self.model:  # the first forward over what was drawn
            self._compare(logps, labels[:, -logits_to_keep:] != -100)
        entropies = torch.cat([output.entropy[:, -logits_to_keep:] for output in outputs])
        return logps, entropies if compute_entropy else None, None

    def _compare(self, logps: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        """Compare with the sampler's logprobs, bit for bit. Returns all differences, [tokens].

        logps, scored [B, C]. What TRL masks, as truncated completions, is not scored and not compared. Raises
        MismatchError.
        """
        drawn, self._drawn = self._drawn, []
        counts = scored.sum(dim=1).tolist()
        rows = [i for i, n in enumerate(counts) if n]
        rollouts = [drawn[i] for i in rows]
        logp = torch.cat([logps[i, : counts[i]] for i in rows]) if rows else logps.new_empty(0)
        if rows:
            step = self.state.global_step
            Monitor(step, exact=True, version=step).compare(logp, rollouts)
        sampling = np.concatenate([r.logprobs for r in rollouts]) if rows else np.empty(0, np.float32)
        return (logp - torch.from_numpy(sampling).to(logp.device)).abs()


class ExactGRPOTrainer(_ExactTrainer, GRPOTrainer):
    """TRL's GRPOTrainer, exactly on-policy. Its arguments are TRL's.

    Raises ValueError for a release of TRL that is not supported, and for each setting that cannot be exact,
    by name. While it trains it raises MismatchError (engine/train/monitor.py) and StaleWeightsError.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        # TRL scores before the first update, compares and logs only where vLLM has drawn, or it believes so.
        self.use_vllm, self.vllm_mode, self.vllm_importance_sampling_correction = True, "zerokl", True

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        rollouts = self._draw(prompt_ids, num_generations)
        return [list(r.completion_ids) for r in rollouts], [r.logprobs.tolist() for r in rollouts]


class ExactRLOOTrainer(_ExactTrainer, RLOOTrainer):
    """TRL's RLOOTrainer, exactly on-policy. See ExactGRPOTrainer.

    TRL's RLOO has no metric of the mismatch. Those of GRPO are logged: sampling/sampling_logp_difference/max
    and mean.
    """

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any
    ) -> list[list[int]]:
        training = self.model.training
        rollouts = self._draw(prompt_ids, self.num_generations if training else self.num_generations_eval)
        return [list(r.completion_ids) for r in rollouts]

    def _compare(self, logps: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        differences = super()._compare(logps, scored)
        known = differences if len(differences) else differences.new_zeros(1)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in (("mean", known.mean()), ("max", known.max())):
            gathered = self.accelerator.gather(value)
            whole = gathered.mean() if name == "mean" else gathered.max()
            metrics[f"sampling/sampling_logp_difference/{name}"].append(whole.item())
        return differences


def _refuse_settings(config: Any) -> None:
    """Raise ValueError for a setting that changes what is drawn or scored."""
    refused = _REFUSED | (_REFUSED_WITH_VLLM if config.use_vllm else {})
    for name, (off, reason) in refused.items():
        value = getattr(config, name, off[0])
        if value not in off:
            raise ValueError(f"exact_trl: {name} ({value!r}) is refused: {reason}")
    if config.temperature == 0.0:
        raise ValueError("exact_trl: temperature (0.0) is refused: TRL trains on draws; set it above 0")
    truncates = _truncation(config)
    if truncates and config.beta != 0.0:
        raise ValueError(
            f"exact_trl: beta ({config.beta}) with {truncates} is refused: the KL is infinite where the "
            "reference leaves out a token that was drawn; set beta = 0, or draw from the whole vocabulary"
        )
    if truncates and getattr(config, "loss_type", "") in _LOGPROB_LOSSES:
        raise ValueError(
            f"exact_trl: loss_type ({config.loss_type!r}) with {truncates} is refused: it multiplies by a "
            "logprob, which is -inf where an update has left the token out"
        )


def _truncation(config: Any) -> str:
    """The first setting that leaves tokens out; empty where none does."""
    on = {
        "top_k": (config.top_k or 0) > 0,
        "top_p": config.top_p < 1.0,
        "min_p": (config.min_p or 0.0) > 0.0,
    }
    return next((name for name, is_on in on.items() if is_on), "")


def _refuse_trainer(trainer: Any) -> None:
    """Raise ValueError for a model or a processor that TRL has made of the arguments."""
    if isinstance(trainer.processing_class, ProcessorMixin):
        raise ValueError("exact_trl: a vision model is refused: the kernels read text only")
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(
            "exact_trl: router_aux_loss_coef is refused: the kernels have no auxiliary loss; set it to 0.0"
        )


def _sampling_params(trainer: Any) -> SamplingParams:
    """The distribution that TRL asks for."""
    args = trainer.args
    return SamplingParams(args.temperature, max(0, args.top_k or 0), args.top_p, args.min_p or 0.0)
