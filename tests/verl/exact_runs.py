"""Steps of verl's own worker with zerokl's actor and rollout; each rank is a process of torchrun.

torchrun --nproc_per_node 2 -m tests.verl.exact_runs MODEL OUT DTYPE [--stale] [OVERRIDE ...]

A step is what verl's trainer does: draw by the servers, compute_log_prob, verl's metrics, update_actor,
update_weights. Its rewards are made up. --stale leaves out the last of the updates of the weights.
"""

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VERL_PLATFORM": "testcpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform,zerokl.integrations.exact_verl",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # a server waits for nobody
    "RAY_AUTH_MODE": "disabled",  # the ranks join one cluster of this machine
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

import ray
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl import DataProto
from verl import trainer as verl_trainer
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils import tensordict_utils as tu
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

STEPS, G, TOKENS = 3, 4, 8
PROMPTS = [[5, 9, 3], [7, 7, 12, 4, 15], [1 + i for i in range(7)], [30, 2]]
TEMPERATURE = 0.8
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def settings(model: str, dtype: str, overrides: list[str]) -> DictConfig:
    """verl's own configuration of PPO, with the actor and the rollout that these runs are about."""
    ours = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=true",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={dtype}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={len(PROMPTS) * G}",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        "actor_rollout_ref.rollout.name=zerokl",
        f"actor_rollout_ref.rollout.dtype={NAMES[dtype]}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.full_determinism=true",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.prompt_length=8",
        f"actor_rollout_ref.rollout.response_length={TOKENS}",
        "trainer.n_gpus_per_node=1",
    ]
    folder = str(Path(verl_trainer.__file__).parent / "config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", ours + overrides).actor_rollout_ref


@ray.remote
class Place:
    """What verl's replicas ask for the node of a rank."""


def start_ray() -> None:
    """One node for all ranks."""
    address = [None]
    if dist.get_rank() == 0:
        context = ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
        )
        address = [context.address_info["address"]]
    dist.broadcast_object_list(address)
    if dist.get_rank() > 0:
        ray.init(address=address[0], log_to_driver=False)


def batch_of(rows: list[tuple[int, int]], outputs: list[Any], step: int) -> DataProto:
    """The completions as verl's trainer has them: prompts padded on the left, responses on the right."""
    longest = max(map(len, PROMPTS))
    tensors = {name: [] for name in ("prompts", "responses", "attention", "mask", "logprobs", "advantages")}
    for (p, _), output in zip(rows, outputs, strict=True):
        prompt, n = PROMPTS[p], len(output.token_ids)
        tensors["prompts"].append([0] * (longest - len(prompt)) + prompt)
        tensors["responses"].append(output.token_ids + [0] * (TOKENS - n))
        tensors["mask"].append([1] * n + [0] * (TOKENS - n))
        tensors["attention"].append([0] * (longest - len(prompt)) + [1] * len(prompt) + tensors["mask"][-1])
        tensors["logprobs"].append(output.log_probs + [0.0] * (TOKENS - n))
        tensors["advantages"].append([float(output.token_ids[0] % 3 - 1)] * TOKENS)
    prompts, responses = torch.tensor(tensors["prompts"]), torch.tensor(tensors["responses"])
    attention = torch.tensor(tensors["attention"])
    return DataProto.from_single_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": torch.tensor(tensors["mask"]),
            "rollout_log_probs": torch.tensor(tensors["logprobs"]),
            "advantages": torch.tensor(tensors["advantages"]),
        },
        meta_info={"temperature": TEMPERATURE},
    )


def compute_log_prob(worker: ActorRolloutRefWorker, batch: DataProto) -> torch.Tensor:
    """As RayPPOTrainer._compute_old_log_prob; [B, TOKENS]."""
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    return no_padding_2_padding(tu.get(worker.compute_log_prob(data), "log_probs"), data).float()


def update_actor(worker: ActorRolloutRefWorker, batch: DataProto) -> None:
    """As RayPPOTrainer._update_actor."""
    data = left_right_2_no_padding(batch.to_tensordict())
    size = len(PROMPTS) * G
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    worker.update_actor(data)


async def draw(server: Any, rows: list[tuple[int, int]]) -> list[Any]:
    """As verl's agent loops: one request a completion, all at once."""
    params = {
        "temperature": TEMPERATURE,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    return await asyncio.gather(
        *(
            server.generate.remote(prompt_ids=PROMPTS[p], sampling_params=params, request_id=f"det-{p}-{g}")
            for p, g in rows
        )
    )


async def run(model: str, dtype: str, stale: bool, overrides: list[str]) -> list[dict[str, Any]]:
    """The rows of this rank: verl's metrics, and digests of what was drawn."""
    config = settings(model, dtype, overrides)
    worker = ActorRolloutRefWorker(config, role="actor_rollout")
    worker.init_model()
    replica = get_rollout_replica_class("zerokl")(dist.get_rank(), config.rollout, config.model, 1)
    replica.workers = [Place.remote()]
    await replica.launch_servers()
    rows = [(p, g) for p in range(len(PROMPTS)) for g in range(G)]
    rows = rows[dist.get_rank() :: dist.get_world_size()]
    steps = []
    for step in range(STEPS):
        if not (stale and step == STEPS - 1):
            await worker.update_weights(global_steps=step)
        outputs = await draw(replica.server_handle, rows)
        batch = batch_of(rows, outputs, step)
        batch.batch["old_log_probs"] = compute_log_prob(worker, batch)
        drawn, old = batch.batch["rollout_log_probs"], batch.batch["old_log_probs"]
        mask = batch.batch["response_mask"].bool()
        steps.append(
            calculate_debug_metrics(batch)
            | {k: float(v) for k, v in compute_offpolicy_metrics(old, drawn, mask).items()}
            | {
                "unequal": int((old[mask].view(torch.int32) != drawn[mask].view(torch.int32)).sum()),
                "tokens": int(mask.sum()),
                "digests": {
                    f"{p}-{g}": hashlib.sha256(str((o.token_ids, o.log_probs)).encode()).hexdigest()
                    for (p, g), o in zip(rows, outputs, strict=True)
                },
            }
        )
        update_actor(worker, batch)
    return steps


def main(model: str, out: str, dtype: str, *options: str) -> None:
    """Write OUT.RANK.json."""
    torch.set_num_threads(1)
    os.environ["RAY_LOCAL_WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    dist.init_process_group("gloo")
    start_ray()
    overrides = [word for word in options if not word.startswith("--")]
    steps = asyncio.run(run(model, dtype, "--stale" in options, overrides))
    Path(f"{out}.{dist.get_rank()}.json").write_text(json.dumps(steps))
    dist.barrier()
    ray.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
