"""TRL's asynchronous trainer over zerokl's kernels: the lag is the one that was set, the ratio exact."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, vllm_client
from trl.experimental.async_grpo.packing import TreeRow
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.train.monitor import MismatchError
from zerokl.files.bitwise import equal
from zerokl.integrations import exact_async_trl
from zerokl.integrations.exact_async_trl import ExactAsyncGRPOTrainer
from zerokl.integrations.transformers import ExactModel, StaleWeightsError
from zerokl.kernels.sampling_params import SamplingParams

from tests.trl.exact_runs import G, P, character_tokenizer, prompts, write_model

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _what_trl_asks_for_and_does_not_use_here(monkeypatch):
    """The name of a GPU, and `requests`, by which its own worker and transfer talk to a server of vLLM."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    monkeypatch.setattr(vllm_client, "is_requests_available", lambda: True)


def digits(completions, **_) -> list[float]:
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def make(model: Path, out: Path, lag: int = 1, reward=digits, **options) -> ExactAsyncGRPOTrainer:
    settings = dict(
        output_dir=str(out),
        per_device_train_batch_size=P * G,
        gradient_accumulation_steps=1,
        num_generations=G,
        max_completion_length=6,
        max_steps=STEPS,
        learning_rate=1e-2,
        token_budget=0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    return ExactAsyncGRPOTrainer(
        str(model),
        reward,
        args=AsyncGRPOConfig(**(settings | options)),
        train_dataset=prompts(),
        processing_class=character_tokenizer(),
        lag=lag,
    )


def logged(trainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


CASES = {
    "fp32": {},
    "bf16 over fp32": dict(bf16=True, gradient_checkpointing=True),
    "accumulation": dict(per_device_train_batch_size=P * G // 2, gradient_accumulation_steps=2),
    "truncated": dict(temperature=0.7, top_k=5, top_p=0.9),
}


@pytest.mark.parametrize(("case", "lag"), [(case, 1) for case in CASES] + [("fp32", 2)])
def test_the_lag_is_known_and_the_ratio_is_one_where_it_is_zero(model, tmp_path, case, lag):
    trainer = make(model, tmp_path, lag, **CASES[case])
    trainer.train()
    lags = [min(step, lag) for step in range(STEPS)]
    assert logged(trainer, "sample/lag") == lags
    ratios, kls = logged(trainer, "ratio"), logged(trainer, "kl")
    assert (ratios[0], kls[0]) == (1.0, 0.0)
    assert all(ratio != 1.0 for ratio in ratios[1:]), "the policy has changed since the draw"
    assert all(norm > 0.0 for norm in logged(trainer, "grad_norm"))


def test_each_batch_is_drawn_with_the_weights_of_its_lag_and_again_the_same(model, tmp_path, monkeypatch):
    drawn, trained = {}, {}
    draw, loss = exact_async_trl._Worker._draw, ExactAsyncGRPOTrainer.compute_loss

    def noted_draw(worker, step, version):
        drawn[step] = worker._trainer.drawing.decoder.flat.clone()
        draw(worker, step, version)

    def noted_loss(trainer, *arguments, **named):
        result = loss(trainer, *arguments, **named)
        trained[trainer.state.global_step] = trainer.policy.decoder.flat.clone()
        return result

    monkeypatch.setattr(exact_async_trl._Worker, "_draw", noted_draw)
    monkeypatch.setattr(ExactAsyncGRPOTrainer, "compute_loss", noted_loss)
    trainer = make(model, tmp_path / "run", 2)
    trainer.train()
    for step in range(STEPS):
        assert equal(drawn[step], trained[max(0, step - 2)])
    assert not equal(trained[0], trained[1])
    # TRL counts when a completion leaves its queue, which is before the update of the step before.
    assert logged(trainer, "sample/lag")[2:] == [2.0] * (STEPS - 2)
    assert logged(trainer, "sample/staleness_mean")[2:] == [1.0] * (STEPS - 2)
    again = make(model, tmp_path / "again", 2)
    again.train()
    assert equal(weights(trainer), weights(again))


def sample(ids: list[int], prompt: int, group: int) -> dict:
    """A completion as TRL's dataset gives it: the first `prompt` ids are the prompt."""
    mask = np.array([0] * prompt + [1] * (len(ids) - prompt))
    named = dict(old_log_probs=np.zeros(len(ids), np.float32), advantage=1.0, group_id=group)
    return dict(input_ids=np.array(ids), completion_mask=mask, **named)


def scored(policy: ExactModel, samples: list[dict]) -> list[torch.Tensor]:
    """Of each completion the log-probabilities of its trained tokens, from one packed row of TRL's."""
    row = TreeRow()
    for one in samples:
        row.add(one)
    packed = row.pack()
    names = ("input_ids", "position_ids", "shift_labels")
    output = exact_async_trl._score_tree(policy, packed | {name: packed[name][None] for name in names})
    flat = output.log_probs.flatten()[packed["token_index"]]
    return list(flat.split([int(one["completion_mask"].sum()) for one in samples]))


def test_a_packed_row_is_scored_as_its_completions_are(model):
    """A prompt in common, a completion within another, two that are equal, one alone, forks at any depth."""
    policy = ExactModel(AutoModelForCausalLM.from_pretrained(model), None, SamplingParams(), False)
    rng = random.Random(0)
    for _ in range(20):
        prompt = [rng.randrange(5, 9) for _ in range(rng.randrange(1, 4))]
        samples = [
            sample(prompt + [rng.randrange(5, 8) for _ in range(rng.randrange(1, 7))], len(prompt), 0)
            for _ in range(5)
        ]
        samples += [samples[0], sample([9, 5, 6], 1, 1), sample(samples[1]["input_ids"].tolist()[:-1], 1, 2)]
        samples = [one for one in samples if one["completion_mask"].any()]
        with torch.no_grad():
            for one, got in zip(samples, scored(policy, samples), strict=True):
                ids, mask = (torch.tensor(one[name])[None] for name in ("input_ids", "completion_mask"))
                labels = ids.masked_fill(mask == 0, -100)
                alone = policy.score(ids, torch.ones_like(ids), labels).log_probs[mask[:, 1:] == 1]
                assert equal(got, alone)


def test_the_gradient_of_a_packed_row_is_that_of_its_completions(model):
    net = AutoModelForCausalLM.from_pretrained(model)
    policy = ExactModel(net, None, SamplingParams(), False)
    samples = [
        sample([5, 6, 7, 8], 2, 0),
        sample([9, 6, 7], 1, 1),
    ]  # nothing in common: nothing to take apart
    torch.cat(scored(policy, samples)).sum().backward()
    packed = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    labels = torch.tensor([[-100, -100, 7, 8], [-100, 6, 7, -100]])
    policy.score(ids, mask, labels).log_probs.sum().backward()
    assert all(equal(a, p.grad) for a, p in zip(packed, net.parameters(), strict=True))


def test_a_bit_that_differs_ends_the_run(model, tmp_path, monkeypatch):
    generate = NativeSampler.generate

    def one_bit_off(self, requests):
        completions = generate(self, requests)
        if requests[0].rng_key.step == 2:
            completions[1].logprobs.view(np.int32)[0] ^= 1
        return completions

    monkeypatch.setattr(NativeSampler, "generate", one_bit_off)
    with pytest.raises(MismatchError, match="step 2, prompt 0, sample 1, position 0"):
        make(model, tmp_path).train()


def test_a_copy_that_stays_behind_ends_the_run(model, tmp_path, monkeypatch):
    trainer = make(model, tmp_path)
    monkeypatch.setattr(trainer.drawing, "_copy", lambda: None)
    with pytest.raises(StaleWeightsError):
        trainer.train()


def test_a_reward_that_raises_ends_the_run(model, tmp_path):
    def broken(completions, **_):
        raise KeyError("no answer")

    with pytest.raises(KeyError, match="no answer"):
        make(model, tmp_path, reward=broken).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lag": 0}, "lag (0) must lie in 1 to max_staleness (4)"),
        ({"lag": 5}, "lag (5) must lie in 1"),
        ({"token_budget": 64}, "token_budget (64) is refused"),
        ({"weight_sync_steps": 2}, "weight_sync_steps (2) is refused"),
        ({"repetition_penalty": 1.1}, "repetition_penalty (1.1) is refused"),
        ({"per_device_train_batch_size": 3}, "the 3 completions of a step must be whole groups"),
    ],
    ids=str,
)
def test_what_cannot_be_exact_is_refused_by_name(model, tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(model, tmp_path, **options)


def test_a_run_does_not_go_on_from_a_checkpoint(model, tmp_path):
    with pytest.raises(ValueError, match="resume_from_checkpoint is refused"):
        make(model, tmp_path).train(resume_from_checkpoint=True)
