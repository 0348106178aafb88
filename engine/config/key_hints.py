"""What was meant by a key that zerokl does not know: a key spelt similarly, or one with another name."""

import difflib
from collections.abc import Sequence

# Our key -> what TRL, transformers, verl, OpenRLHF, NeMo-RL, prime-rl, slime and SkyRL call it. The last word
# of a name is looked up. A key with dashes is an option of `zerokl train`, and no key.
_NAMES = {
    "model": "model_name_or_path model_name model_path pretrain hf_checkpoint",
    "dtype": "bf16 fp16 torch_dtype mixed_precision compute_dtype",
    "steps": "max_steps total_training_steps num_train_steps num_rollout",
    "prompts": "batch_size train_batch_size rollout_batch_size num_prompts_per_step prompts_per_step",
    "num_generations": "n group_size num_samples samples n_samples_per_prompt num_generations_per_prompt",
    "micro_batch": "micro_batch_size per_device_train_batch_size ppo_micro_batch_size_per_gpu "
    "micro_train_batch_size gradient_accumulation_steps",
    "updates_per_rollout": "num_iterations ppo_epochs num_inner_updates",
    "recompute": "gradient_checkpointing activation_checkpointing",
    "sampler": "use_vllm vllm_mode rollout_engine inference_backend",
    "max_staleness": "max_off_policy_steps async_level max_async_level",
    "tracking": "report_to logger log_with use_wandb",
    "task.reward": "reward_funcs reward_fn reward_function custom_rm_path",
    "task.options": "dataset dataset_name train_files prompt_data data",
    "sampling.max_tokens": "max_completion_length max_new_tokens max_response_length response_length "
    "generate_max_len rollout_max_response_len",
    "loss.preset": "loss_type adv_estimator advantage_estimator algorithm",
    "loss.advantage": "scale_rewards norm_adv_by_std_in_grpo",
    "loss.clip_high": "epsilon clip_ratio cliprange eps_clip epsilon_high clip_ratio_high eps_clip_high",
    "loss.clip_low": "clip_ratio_low",
    "loss.kl_coef": "kl_loss_coef init_kl_coef kl_coeff kl_penalty_coef",
    "loss.kl": "kl_loss_type kl_estimator kl_penalty",
    "loss.ref_model": "ref_model_path reference_model ref_load",
    "loss.correction": "vllm_importance_sampling_correction rollout_is",
    "loss.correction_high": "vllm_importance_sampling_cap rollout_is_threshold",
    "optimizer.lr": "learning_rate actor_learning_rate max_lr",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style",
    "optimizer.warmup_steps": "warmup_ratio lr_warmup_steps num_warmup_steps",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.max_grad_norm": "max_norm grad_clip clip_grad gradient_clipping",
    "checkpoint.every": "save_steps save_freq save_interval",
    "checkpoint.keep": "save_total_limit max_ckpt_num",
    "evaluation.every": "eval_steps test_freq eval_interval val_period",
    "--run_dir": "output_dir save_dir default_local_dir ckpt_path out",
    "--resume": "resume_from_checkpoint resume_from",
}
OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}
# difflib's ratio from which two spellings count as similar.
_SIMILAR = 0.6


def hint(key: str, known: Sequence[str], options: Sequence[str] = ()) -> str:
    """The end of a message about an unknown key: "; did you mean X?", or the keys that there are.

    known: dotted keys. options: the command's options that are no keys, without dashes. X is the key that was
    taken for a section; else the key with the same last word; else what another framework's name stands for;
    else what is spelt most similarly.
    """
    last_word, section = _last_word(key), key.rpartition(".")[0]
    if section in known and not any(k.startswith(f"{section}.") for k in known):
        return f"; {section} is a value, no section; did you mean {section}?"
    by_last_word = {_last_word(k): k for k in reversed(known)}
    meant = by_last_word.get(last_word) or OTHER_NAMES.get(last_word) or _similar(key, known, options)
    if meant is None:
        return f"; keys are {', '.join(k for k in known if '.' not in k)}"
    return f"; did you mean {meant}?"


def _last_word(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _similar(key: str, known: Sequence[str], options: Sequence[str]) -> str | None:
    """What is spelt most similarly to a key or to its last word; the first of several. None: nothing is."""
    last_word = _last_word(key)
    # (what was typed, a spelling, what this spelling stands for)
    candidates = [(key, option, f"--{option}") for option in options]
    candidates += [(key, k, k) for k in known]
    candidates += [(last_word, name, meant) for name, meant in OTHER_NAMES.items()]
    candidates += [(last_word, _last_word(k), k) for k in known]
    matcher = difflib.SequenceMatcher
    ratio, meant = max(
        ((matcher(None, typed, spelling).ratio(), meant) for typed, spelling, meant in candidates),
        key=lambda candidate: candidate[0],
    )
    return meant if ratio >= _SIMILAR else None
