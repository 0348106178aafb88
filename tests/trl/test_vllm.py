"""TRL's own trainers with zerokl's decoder inside vLLM as the sampler: use_vllm=True.

`make test-trl-vllm` runs it where vLLM and TRL are both installed.
"""

from pathlib import Path

import pytest
import torch
from zerokl.engine.config.vllm_section import VllmConfig
from zerokl.engine.rollout.vllm.sampler import VllmZeroklSampler
from zerokl.integrations.transformers import StaleWeightsError

from tests.trl.exact_runs import STEPS, G, P, SeenGRPO, SeenRLOO, make_trainer, mismatches, write_model

pytestmark = [pytest.mark.trl, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SMALL = VllmConfig(context=64, cache_bytes=32 << 20)
CASES = {
    "bf16 over fp32": (SeenGRPO, dict(bf16=True)),
    "truncated": (SeenGRPO, dict(dtype="bfloat16", temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)),
    "several batches a generation": (
        SeenGRPO,
        dict(per_device_train_batch_size=P * G // 2, steps_per_generation=2, max_steps=2 * STEPS),
    ),
    "rloo, fp16 over fp32": (SeenRLOO, dict(fp16=True, beta=0.04)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if i == 0 else pytest.mark.proof) for i, case in enumerate(CASES)]
)
def test_vllm_draws_what_the_native_sampler_draws_at_every_generation(case, model, tmp_path):
    """Other weights after any step would give other draws, and another hash."""
    trainer_class, options = CASES[case]
    trainers = []
    for more in (dict(use_vllm=True, vllm=SMALL), {}):
        trainer = make_trainer(trainer_class, model, tmp_path, **options, **more)
        trainer.train()
        assert mismatches(trainer) == [0.0] * STEPS
        trainers.append(trainer)
    with_vllm, native = trainers
    assert isinstance(with_vllm.sampler, VllmZeroklSampler)
    assert with_vllm.seen == native.seen
    assert len({weights for weights, _ in with_vllm.seen}) == STEPS


def test_control_a_vllm_with_the_first_weights_is_found(model, tmp_path):
    """After the first update: the copy that draws is compared, not only the one that scores."""
    trainer = make_trainer(SeenGRPO, model, tmp_path, use_vllm=True, vllm=SMALL)
    trainer.sampler.llm.apply_model(lambda model: model.use(model.decoder.flat.detach().clone()))
    with pytest.raises(StaleWeightsError, match=r"copy of model\.\S+ is not the Parameter"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert len(trainer.seen) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(vllm_mode="server"),
            r"vllm_mode \('server'\) is refused: vLLM must be in the trainer's process",
        ),
        (dict(vllm_tensor_parallel_size=2), r"vllm_tensor_parallel_size \(2\) is refused: it cuts the sums"),
        (dict(vllm_model_impl="transformers"), r"vllm_model_impl \('transformers'\) is refused"),
        (dict(vllm_enable_sleep_mode=True), r"vllm_enable_sleep_mode \(True\) is refused"),
        (dict(vllm=VllmConfig(multiprocess=True)), r"^exact_trl: vllm.multiprocess \(True\) is refused: "),
        (dict(vllm_structured_outputs_regex="a"), r"vllm_structured_outputs_regex \('a'\) is refused"),
    ],
)
def test_settings_of_vllm_that_cannot_be_exact_are_refused(options, message, model, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(SeenGRPO, model, tmp_path, use_vllm=True, **options)


def test_vllm_takes_trls_longest_sequence(model, tmp_path):
    trainer = make_trainer(SeenGRPO, model, tmp_path, use_vllm=True, vllm_max_model_length=48)
    assert trainer.sampler.context == 48
    assert trainer.sampler.weights().data_ptr() == trainer.policy.decoder.flat.data_ptr()
    assert trainer.sampler.weights().dtype == torch.float32
