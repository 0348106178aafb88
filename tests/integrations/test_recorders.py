"""The recorders for loops and frameworks: what they write is read to the bit, and nothing changes."""

import json
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.audit.formats.registry import read_rollouts
from zerokl.audit.frameworks import FRAMEWORKS
from zerokl.cli import main
from zerokl.integrations import openrlhf, skyrl, verl
from zerokl.integrations.recorder import FIELDS, Recorder
from zerokl.integrations.trl import record
from zerokl.integrations.verl import RecordsRollouts
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.audit.formats.samples import SAMPLES, declared, told
from tests.helpers import property_settings


def test_lists_arrays_and_tensors_are_taken_and_left_alone(tmp_path):
    logprobs = torch.tensor([-0.1, -0.2], dtype=torch.bfloat16, requires_grad=True)
    ids, mask = np.array([4, 5]), torch.tensor([True, False])
    before = logprobs.detach().clone(), ids.copy()
    with Recorder(tmp_path / "log.jsonl", temperature=0.5) as recorder:
        recorder.record((1, 2), ids, logprobs, trainer_logprobs=[-0.1, float("nan")], mask=mask, step=3)
        recorder.record([1], [], [])
    ((_, rollout),) = read_rollouts(tmp_path / "log.jsonl")
    assert rollout.logprobs[0] == logprobs[0].item()
    assert np.isnan(rollout.trainer_logprobs).tolist() == [False, True]
    assert (rollout.mask.tolist(), rollout.step, rollout.sampling_params.temperature) == (
        [True, False],
        3,
        0.5,
    )
    assert torch.equal(before[0], logprobs)
    assert (before[1] == ids).all()
    assert logprobs.grad is None


@property_settings(100)
@given(values=st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=8))
def test_every_bit_of_a_logprob_comes_back(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "bits.jsonl"
    path.unlink(missing_ok=True)
    column = torch.tensor(values, dtype=torch.float32)
    with Recorder(path, temperature=1.0) as recorder:
        recorder.record([1], list(range(len(values))), column, trainer_logprobs=column.numpy())
    ((_, rollout),) = read_rollouts(path)
    assert rollout.logprobs.tobytes() == rollout.trainer_logprobs.tobytes() == column.numpy().tobytes()


def test_a_recorded_log_is_audited_and_an_equal_one_is_equal(tmp_path):
    for name in ("a", "b"):
        with Recorder(tmp_path / f"{name}.jsonl", temperature=1.0) as recorder:
            recorder.record([1], [2, 3], [-0.5, -1.0], trainer_logprobs=[-0.5, -1.0], sample=0)
    assert main(["audit", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert main(["diff", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temprature": 1.0}, "field temprature is not known; a line takes trainer_logprobs"),
        ({"mask": [1]}, "mask has 1 entries for 2 completion_ids"),
        ({"trainer_logprobs": [-1.0] * 3}, "trainer_logprobs has 3 entries"),
        ({"repetition_penalty": 1.2}, r"recorder: repetition_penalty \(1.2\) is refused: a penalty makes"),
    ],
)
def test_a_wrong_field_is_refused(tmp_path, fields, reason):
    with Recorder(tmp_path / "log.jsonl") as recorder, pytest.raises(ValueError, match=reason):
        recorder.record([1], [2, 3], [-0.5, -1.0], **fields)
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_a_log_is_not_overwritten(tmp_path):
    Recorder(tmp_path / "log.jsonl").close()
    with pytest.raises(ValueError, match=r"log\.jsonl exists; choose another file"):
        Recorder(tmp_path / "log.jsonl")


def test_the_recorder_knows_every_field_of_the_format():
    schema = json.loads((PACKAGE_ROOT / "audit/formats/log.schema.json").read_text())
    assert {*FIELDS, "prompt_ids", "completion_ids", "logprobs", "turns"} == set(schema["properties"])


def test_filters_are_written_and_a_penalty_that_is_off_is_not(tmp_path):
    bias, allowed = {2: 0.5, 9: -1.0}, np.array([2, 3, 9])
    settings = dict(temperature=0.9, min_p=0.1, logit_bias=bias, allowed_token_ids=allowed)
    with Recorder(tmp_path / "log.jsonl", **settings, presence_penalty=0.0) as recorder:
        recorder.record([1], [2, 3], [-0.5, -1.0])
    (line,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert "presence_penalty" not in line
    ((_, rollout),) = read_rollouts(tmp_path / "log.jsonl")
    assert rollout.sampling_params == SamplingParams.of(0.9, 0, 1.0, 0.1, bias, (2, 3, 9))


RECORDED = [framework for framework in FRAMEWORKS.values() if framework.recording]


@pytest.mark.parametrize("framework", RECORDED, ids=lambda framework: framework.name)
def test_the_recorder_that_a_framework_declares_is_there(framework):
    module, name = framework.recording.recorder.split(":")
    assert module == framework.name  # the wheel takes it by this name
    assert callable(getattr(import_module(f"zerokl.integrations.{module}"), name))


def test_every_recorder_is_declared():
    """A module of integrations with Recorder writes a log; the others are a server's."""
    files = (PACKAGE_ROOT / "integrations").glob("*.py")
    using = {file.stem for file in files if "from .recorder import" in file.read_text()}
    assert using - {framework.name for framework in RECORDED} == {"proxy", "proxy_answers", "sglang_server"}


# TRL has a mask where there are tools, and its sample has none.
@pytest.mark.parametrize(
    ("name", "sample", "lacks"), [("trl", "trl", {"mask"}), ("verl", "verl-recorded", set())]
)
def test_a_recorded_sample_tells_what_its_framework_declares(name, sample, lacks):
    rollouts = [rollout for _, rollout in read_rollouts(SAMPLES / f"{sample}.jsonl")]
    assert told(rollouts) == declared(FRAMEWORKS[name].recording.fields) - lacks


class Logs:
    """In place of verl's trainer: its method of the same name. log_samples/write.py runs the real one."""

    global_steps = 3

    def __init__(self, bypass: bool = False, **sampling: Any):
        self.logged: list[tuple] = []
        sampling = {"top_p": 0.95, "top_k": -1, "repetition_penalty": 1.0} | sampling
        rollout = SimpleNamespace(temperature=0.9, get=sampling.get)
        correction = {"rollout_correction": {"bypass_mode": bypass}}
        self.config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=rollout),
            algorithm=correction,
            trainer={"rollout_data_dir": "dump"},
        )

    def _log_rollout_data(self, batch, extra, timing, rollout_data_dir):
        self.logged.append((batch, extra, timing, rollout_data_dir))


class RecordedLogs(RecordsRollouts, Logs):
    pass


def verl_batch() -> SimpleNamespace:
    attended = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    response = attended[:, 2:]
    return SimpleNamespace(
        batch={
            "prompts": torch.tensor([[0, 7], [8, 9]]),
            "responses": torch.tensor([[4, 5, 6, 0], [1, 2, 3, 4]]),
            "attention_mask": attended,
            "response_mask": response * torch.tensor([[1, 0, 1, 1]]),
            "rollout_log_probs": -0.5 * response,
            "old_log_probs": -0.25 * response,
            "token_level_scores": response.float(),
        },
        non_tensor_batch={"uid": np.array(["p", "q"], dtype=object)},
    )


@pytest.mark.parametrize("bypass", [False, True])
def test_verls_batch_is_recorded_without_its_padding(tmp_path, bypass):
    trainer, batch = RecordedLogs(bypass), verl_batch()
    before = {name: tensor.clone() for name, tensor in batch.batch.items()}
    trainer._log_rollout_data(batch, {"a": 1}, {}, str(tmp_path / "dump"))
    assert trainer.logged == [(batch, {"a": 1}, {}, str(tmp_path / "dump"))]
    assert all(torch.equal(before[name], tensor) for name, tensor in batch.batch.items())
    first, second = (r for _, r in read_rollouts(tmp_path / "dump.zerokl" / "3.jsonl", "verl"))
    assert (first.prompt_ids, first.completion_ids) == ((7,), (4, 5, 6))
    assert (second.prompt_ids, second.completion_ids) == ((8, 9), (1, 2, 3, 4))
    assert second.mask.tolist() == [True, False, True, True]
    assert (first.sampling_params, first.weight_span) == (SamplingParams(0.9, 0, 0.95), (2, 2))
    assert (first.prompt, first.reward) == ("p", 3.0)
    # In bypass mode verl's old_log_probs are the sampler's: there is no second column.
    assert (first.trainer_logprobs is None) == bypass


def test_a_trainer_of_verl_is_recorded_by_one_line_as_by_the_class(tmp_path):
    for name, trainer in (("class", RecordedLogs()), ("line", Logs())):
        if name == "line":
            verl.record(trainer)
        trainer._log_rollout_data(verl_batch(), {"a": 1}, {}, str(tmp_path / name))
        assert len(trainer.logged) == 1
    logs = [(tmp_path / f"{name}.zerokl" / "3.jsonl").read_bytes() for name in ("class", "line")]
    assert logs[0] == logs[1]
    trainer.config.trainer = {}
    for wrong, reason in ((trainer, "rollout_data_dir is not set"), (object(), "no RayPPOTrainer")):
        with pytest.raises(ValueError, match=reason):
            verl.record(wrong)


def test_verls_filters_are_recorded_and_its_penalties_refused(tmp_path):
    trainer = RecordedLogs(min_p=0.1, logit_bias={"3": 1.0})
    trainer._log_rollout_data(verl_batch(), {}, {}, str(tmp_path / "dump"))
    rollout, _ = (r for _, r in read_rollouts(tmp_path / "dump.zerokl" / "3.jsonl", "verl"))
    assert rollout.sampling_params == SamplingParams.of(0.9, 0, 0.95, 0.1, {3: 1.0})
    with pytest.raises(ValueError, match=r"repetition_penalty \(1.1\) is refused"):
        RecordedLogs(repetition_penalty=1.1)._log_rollout_data(verl_batch(), {}, {}, str(tmp_path / "other"))


def trl_trainer(temperature: float = 0.7, **args: Any) -> SimpleNamespace:
    """What is read of a GRPOTrainer before it trains."""
    off = dict(top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, generation_kwargs=None)
    methods = dict.fromkeys(
        ("_generate_and_score_completions", "_generate", "_generate_single_turn"), lambda *_: None
    )
    return SimpleNamespace(
        temperature=temperature,
        num_generations=2,
        accelerator=SimpleNamespace(process_index=0),
        args=SimpleNamespace(**(off | args)),
        **methods,
    )


def test_trls_filters_are_recorded_and_its_penalties_refused_before_it_trains(tmp_path):
    kwargs = {"top_p": 0.8, "logit_bias": {3: 1.0}, "skip_special_tokens": False}
    with record(trl_trainer(min_p=0.1, generation_kwargs=kwargs), tmp_path / "log.jsonl") as recorder:
        recorder.record([1], [2, 3], [-0.5, -1.0])
    ((_, rollout),) = read_rollouts(tmp_path / "log.jsonl")
    assert rollout.sampling_params == SamplingParams.of(0.7, 0, 0.8, 0.1, {3: 1.0})
    for args in ({"repetition_penalty": 1.1}, {"generation_kwargs": {"presence_penalty": 0.5}}):
        with pytest.raises(ValueError, match=r"_penalty \(.*\) is refused: a penalty makes"):
            record(trl_trainer(**args), tmp_path / "refused.jsonl")
    assert not (tmp_path / "refused.jsonl").exists()


class Maker:
    """In place of OpenRLHF's RemoteExperienceMaker: sequences padded on the right, columns one shorter."""

    def make_experience_batch(self, rollout_samples):
        mask = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1]])
        return [
            SimpleNamespace(
                sequences=torch.tensor([[7, 8, 9, 4, 5, 6, 0], [7, 1, 2, 3, 4, 5, 6]]),
                attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1] * 7]),
                action_mask=mask,
                rollout_log_probs=-0.5 * torch.arange(12).view(2, 6),
                action_log_probs=-0.25 * torch.arange(12).view(2, 6),
                rewards=torch.tensor([0.5, rollout_samples]),
            )
        ]


def test_openrlhfs_experiences_are_recorded_by_one_line(tmp_path):
    maker = Maker()
    recorder = openrlhf.record(maker, tmp_path / "log.jsonl", first_step=4, temperature=0.8)
    for samples in (1.0, 2.0):
        assert len(maker.make_experience_batch(samples)) == 1
    recorder.close()
    rollouts = [rollout for _, rollout in read_rollouts(tmp_path / "log.jsonl")]
    assert told(rollouts) == declared(FRAMEWORKS["openrlhf"].recording.fields)
    first, second, third, _ = rollouts
    # Entry t of a column is of token t + 1: the first action, entry 2, is token 3.
    assert (first.prompt_ids, first.completion_ids) == ((7, 8, 9), (4, 5, 6))
    assert first.mask.tolist() == [True, False, True]
    assert first.logprobs[[0, 2]].tolist() == [-1.0, -2.0]
    assert first.trainer_logprobs[[0, 2]].tolist() == [-0.5, -1.0]
    assert (second.prompt_ids, second.completion_ids) == ((7, 1), (2, 3, 4, 5, 6))
    assert second.logprobs.tolist() == [-3.5, -4.0, -4.5, -5.0, -5.5]
    assert (second.step, third.step, second.reward, second.sampling_params.temperature) == (4, 5, 1.0, 0.8)
    with pytest.raises(ValueError, match="no experience maker"):
        openrlhf.record(object(), tmp_path / "other.jsonl")


class Callback:
    """In place of SkyRL's TrainingCallback."""

    def on_step_end(self, trainer, callback_input, control) -> None:
        raise AssertionError("is overridden")

    def on_save(self, trainer, callback_input, control) -> None:
        """Events that the recorder leaves alone are the base's."""


def skyrl_step(**sampling: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    batch = {
        "sequences": torch.tensor([[0, 7, 4, 5, 6, 0], [8, 9, 1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1] * 6]),
        "response_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "loss_mask": torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]),
        "rollout_logprobs": -0.5 * torch.arange(8).view(2, 4),
        "action_log_probs": -0.25 * torch.arange(8).view(2, 4),
    }
    params = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0} | sampling
    trainer = SimpleNamespace(cfg=SimpleNamespace(generator=SimpleNamespace(sampling_params=params)))
    return trainer, SimpleNamespace(batch=batch, global_step=3)


def test_skyrls_callback_records_a_step(tmp_path):
    callback = skyrl.recording(Callback, tmp_path / "log.jsonl")
    trainer, given = skyrl_step()
    before = {name: tensor.clone() for name, tensor in given.batch.items()}
    callback.on_step_end(trainer, given, None)
    callback.on_save(trainer, given, None)
    callback.on_train_end(trainer, given, None)
    assert all(torch.equal(before[name], tensor) for name, tensor in given.batch.items())
    first, second = (r for _, r in read_rollouts(tmp_path / "log.jsonl"))
    assert (first.prompt_ids, first.completion_ids) == ((7,), (4, 5, 6))
    assert first.mask.tolist() == [True, False, True]
    assert (second.prompt_ids, second.completion_ids) == ((8, 9), (1, 2, 3, 4))
    assert told([first, second]) == declared(FRAMEWORKS["skyrl"].recording.fields)
    assert second.logprobs.tolist() == [-2.0, -2.5, -3.0, -3.5]
    assert second.trainer_logprobs.tolist() == [-1.0, -1.25, -1.5, -1.75]
    assert (first.step, first.weight_span, first.sampling_params) == (3, (2, 2), SamplingParams(0.6, 0, 0.9))
    with pytest.raises(ValueError, match="exists"):
        skyrl.recording(Callback, tmp_path / "log.jsonl")
    trainer, given = skyrl_step(presence_penalty=0.5)
    with pytest.raises(ValueError, match="presence_penalty"):
        skyrl.recording(Callback, tmp_path / "other.jsonl").on_step_end(trainer, given, None)
