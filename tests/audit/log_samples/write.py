"""Writes the sample logs with the frameworks' own code: python write.py NAME OUT.

NAME is prime_rl (verifiers 0.4.0), tinker (tinker-cookbook 0.6.1), verl, verl_recorder (verl 0.9.1) or skyrl
(skyrl 0.3.0). The numbers are drawn; a framework gives them the form of its file. Of SkyRL's pickle,
formats/scripts/skyrl_to_log.py makes skyrl.jsonl. trl.jsonl is a part of what tests/trl/test_record.py
records.

train_data_step4.jsonl (NeMo-RL), titanrl.jsonl, prime-rl-tokens.jsonl, nemo-gym.jsonl, atropos.jsonl and the
dumps of slime and miles in the tests follow the fields that these frameworks document: their writers do not
install from PyPI.
"""

import random
import sys
import types
from pathlib import Path

PROMPTS = ([12, 5, 39], [12, 5, 40, 7])
LENGTHS = (4, 6)
random.seed(0)


def drawn(count: int) -> tuple[list[int], list[float]]:
    """Token ids and their logprobs."""
    return [random.randrange(3, 50) for _ in range(count)], [random.uniform(-3, -0.01) for _ in range(count)]


def prime_rl(out: Path) -> None:
    """Two turns with a tool's answer between them, and one turn, as prime-rl dumps them."""
    import orjson
    from verifiers.v1.episode import Episode, GroupInfo, PolicySpan, TrainRunInfo, TrainWorkInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, ModelCall, Reward, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, Sampling, ToolMessage, UserMessage

    def answer(parent: int, count: int, scored: bool) -> MessageNode:
        ids, logprobs = drawn(count)
        return MessageNode(
            parent=parent,
            message=AssistantMessage(content="answer"),
            sampled=True,
            token_ids=[2, *ids],
            mask=[False] + [True] * count,
            logprobs=logprobs,
            trainer_logprobs=[x + 0.001 for x in logprobs] if scored else None,
        )

    lines = []
    for index, prompt in enumerate(PROMPTS):
        count = len(prompt)
        nodes = [
            MessageNode(message=UserMessage(content="question"), token_ids=prompt, mask=[False] * count),
            answer(0, LENGTHS[index], scored=True),
        ]
        calls = [ModelCall(node=1, sampling=Sampling(temperature=0.8))]
        if index == 0:
            told = ToolMessage(content="result", tool_call_id="1")
            nodes += [
                MessageNode(parent=1, message=told, token_ids=[8, 9], mask=[False] * 2),
                answer(2, 3, scored=True),
            ]
            calls.append(ModelCall(node=3, sampling=Sampling(temperature=0.8)))
        task = TraceTask.model_construct(type="Task", data=None)
        trace = Trace.model_construct(
            id=f"trace-{index}",
            task=task,
            agent=AgentInfo.model_construct(config=None),
            nodes=nodes,
            calls=calls,
            rewards={"correct": Reward(score=0.5, weight=2.0)},
            ok=True,
        )
        work = TrainWorkInfo(step=7, policy=PolicySpan(start=5, end=6 - index))
        episode = Episode.model_construct(
            id=f"episode-{index}",
            task=task,
            group=GroupInfo(id="group-0"),
            run=TrainRunInfo(id="run", work=work),
            traces=[trace],
            ok=True,
        )
        lines.append(orjson.dumps(episode.to_record(), default=str, option=orjson.OPT_APPEND_NEWLINE))
    out.write_bytes(b"".join(lines))


def tinker(out: Path) -> None:
    """A call with two samples, and one that failed, through the recording wrapper and the file's sink."""
    from tinker_cookbook.capture import instrument
    from tinker_cookbook.capture.exporter import CaptureExporter, JsonlFileSink
    from tinker_cookbook.stores.storage import LocalStorage

    exporter = CaptureExporter(JsonlFileSink(LocalStorage(str(out.parent))))
    for index, prompt in enumerate(PROMPTS):
        params = types.SimpleNamespace(max_tokens=8, temperature=1.0, top_p=1.0, top_k=-1, seed=1)
        asked = types.SimpleNamespace(to_ints=lambda prompt=prompt: prompt)
        record = {"kind": "sample", "scope": {"iteration": 3, "group_idx": index}, "created_at": 0.0}
        record |= instrument._sample_request_metadata(exporter, object(), asked, 2, params)
        sequences = []
        for length in LENGTHS:
            tokens, logprobs = drawn(length)
            sequences.append(types.SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason="stop"))
        if index == 0:
            instrument._sample_outcome(record, types.SimpleNamespace(sequences=sequences))
        else:
            record |= {"status": "error", "error": "TimeoutError"}
        exporter.enqueue(record)
    exporter.shutdown()
    (out.parent / "capture" / "sample.jsonl").rename(out)


def proto():
    """A batch as verl has it after a step: prompts padded left, responses padded right."""
    import numpy as np
    import torch
    from verl import DataProto

    P, R = max(map(len, PROMPTS)), max(LENGTHS)
    rows = {name: [] for name in ("prompts", "responses", "attention_mask", "rollout_log_probs")}
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        tokens, logprobs = drawn(length)
        rows["prompts"].append([0] * (P - len(prompt)) + prompt)
        rows["responses"].append(tokens + [0] * (R - length))
        rows["rollout_log_probs"].append(logprobs + [0.0] * (R - length))
        attended = [0] * (P - len(prompt)) + [1] * (len(prompt) + length) + [0] * (R - length)
        rows["attention_mask"].append(attended)
    tensors = {name: torch.tensor(values) for name, values in rows.items()}
    tensors["response_mask"] = tensors["attention_mask"][:, P:]
    tensors["old_log_probs"] = tensors["rollout_log_probs"] * 1.001
    tensors["advantages"] = tensors["response_mask"].float() * 0.5
    tensors["token_level_scores"] = tensors["response_mask"].float()
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a", "b"], dtype=object)})


def verl(out: Path) -> None:
    """The texts that verl logs, by its own method."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.global_steps = 3
    trainer._init_dump_executor()
    tokenizer = types.SimpleNamespace(
        batch_decode=lambda ids, skip_special_tokens: ["".join(chr(48 + t) for t in row if t) for row in ids]
    )
    trainer.tokenizer = tokenizer
    trainer._log_rollout_data(proto(), {}, {}, str(out.parent / "verl"))
    trainer._shutdown_dump_executor()
    (out.parent / "verl" / "3.jsonl").rename(out)


def verl_recorder(out: Path) -> None:
    """What our recorder writes beside verl's texts."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from zerokl.integrations.verl import RecordsRollouts

    class RecordedTrainer(RecordsRollouts, RayPPOTrainer):
        pass

    trainer = RecordedTrainer.__new__(RecordedTrainer)
    trainer.global_steps = 3
    trainer._init_dump_executor()
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"temperature": 0.9, "top_p": 1.0, "top_k": -1}},
            "algorithm": {"rollout_correction": None},
        }
    )
    trainer.tokenizer = types.SimpleNamespace(batch_decode=lambda ids, **_: [str(row) for row in ids])
    trainer._log_rollout_data(proto(), {}, {}, str(out.parent / "dump"))
    trainer._shutdown_dump_executor()
    (out.parent / "dump.zerokl" / "3.jsonl").rename(out)


def skyrl(out: Path) -> None:
    """What trainer.dump_data_batch saves, by SkyRL's own padding."""
    import typing

    import typing_extensions

    # On Python 3.11 pydantic refuses SkyRL's typing.TypedDict.
    typing.TypedDict = typing_extensions.TypedDict
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    responses, logprobs = zip(*(drawn(length) for length in LENGTHS), strict=True)
    masks = [[1] * length for length in LENGTHS]
    padding = types.SimpleNamespace(pad_token_id=0)
    rewards = [[0.0] * length for length in LENGTHS]
    sequences, attention, response, _, loss, rollout, *_ = convert_prompts_responses_to_batch_tensors(
        padding, list(PROMPTS), list(responses), rewards, masks, list(logprobs)
    )
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "response_mask": response,
            "loss_mask": loss,
            "rollout_logprobs": rollout,
            "action_log_probs": rollout * 1.001,
        }
    )
    batch.metadata = {}
    batch.save(str(out))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
