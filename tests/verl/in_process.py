"""Steps of verl's own worker with zerokl's actor, and the server of the rollout, in one process without Ray.

torchrun --nproc_per_node 1 -m tests.verl.in_process MODEL OUT DTYPE

The third step draws with stale weights: the update before it does not reach the server.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.verl import exact_runs as runs  # chooses verl's platform before verl is imported

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from verl.utils.config import omega_conf_to_dataclass  # isort: skip
from zerokl.integrations.exact_verl_rollout import ExactServer  # isort: skip

SYNCED = (True, True, False, True)
ROWS = [(p, g) for p in range(len(runs.PROMPTS)) for g in range(runs.G)]


async def update_weights(worker: Any, server: ExactServer, step: int) -> None:
    """What ExactRollout.update_weights does by Ray."""
    weights, _ = worker.actor.engine.get_per_tensor_param()
    await server.receive({name: tensor.detach().cpu() for name, tensor in weights})
    await server.use(step)


async def steps(worker: Any, server: ExactServer) -> list[dict[str, Any]]:
    params = {"temperature": runs.TEMPERATURE, "top_p": 1.0, "top_k": -1, "logprobs": True}
    rows = []
    for step, synced in enumerate(SYNCED):
        if synced:
            await update_weights(worker, server, step)
        asked = [
            server.generate(prompt_ids=runs.PROMPTS[p], sampling_params=params, request_id=f"det-{p}-{g}")
            for p, g in ROWS
        ]
        batch = runs.batch_of(ROWS, await asyncio.gather(*asked), step)
        batch.batch["old_log_probs"] = runs.compute_log_prob(worker, batch)
        drawn, old = batch.batch["rollout_log_probs"], batch.batch["old_log_probs"]
        mask = batch.batch["response_mask"].bool()
        off_policy = runs.compute_offpolicy_metrics(old, drawn, mask)
        unequal = int((old[mask].view(torch.int32) != drawn[mask].view(torch.int32)).sum())
        counts = {"kl": float(off_policy["kl"]), "unequal": unequal, "tokens": int(mask.sum())}
        rows.append(runs.calculate_debug_metrics(batch) | counts)
        runs.update_actor(worker, batch)
    return rows


def main(model: str, out: str, dtype: str) -> None:
    """Write OUT.json."""
    torch.set_num_threads(1)
    os.environ["RAY_LOCAL_WORLD_SIZE"] = "1"
    dist.init_process_group("gloo")
    config = runs.settings(model, dtype, [])
    worker = runs.ActorRolloutRefWorker(config, role="actor_rollout")
    worker.init_model()
    server = ExactServer(omega_conf_to_dataclass(config.rollout), model)
    Path(f"{out}.json").write_text(json.dumps(asyncio.run(steps(worker, server))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
