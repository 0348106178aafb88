"""Dumps of slime and miles, prime-rl's exports, NeMo Gym, atropos, server answers, and what nobody knows."""

import pickle
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from zerokl.audit.formats import registry, unknown
from zerokl.audit.formats.registry import find_format
from zerokl.audit.frameworks import LOGS
from zerokl.cli import main
from zerokl.kernels.sampling_params import SamplingParams

from tests.audit.formats.samples import SAMPLES, first_row, read, rows_of, write_rows

TOKENS = [[12, 5, 39, 4, 8, 15], [12, 5, 40, 7, 9]]
COUNTS = [3, 2]
COLUMNS = {
    "tokens": [torch.tensor(ids) for ids in TOKENS],
    "response_lengths": COUNTS,
    "total_lengths": [6, 5],
    "loss_masks": [torch.tensor([1, 0, 1], dtype=torch.int), torch.ones(2, dtype=torch.int)],
    "log_probs": [torch.tensor([-0.5, -9.0, -0.25]), torch.tensor([-1.0, -2.0])],
    "rollout_log_probs": [torch.tensor([-0.75, 0.0, -0.5]), torch.tensor([-1.0, -2.5])],
    "advantages": [torch.full((3,), 0.5), torch.full((2,), -0.5)],
    "rewards": [0.5, -0.5],
    "raw_reward": [1.0, 0.0, 1.0, 0.0],
    "sample_indices": [11, 8],
    "rollout_ids": [11, 8],
}


def facts(rollout) -> tuple:
    """All that a dump of training says of a sample."""
    columns = tuple(x.tobytes() for x in (rollout.logprobs, rollout.trainer_logprobs, rollout.mask))
    names = (rollout.step, rollout.sample, rollout.reward, rollout.advantage)
    return rollout.prompt_ids, rollout.completion_ids, columns, names


def rank_dump(rank: int = 0, **changes) -> dict:
    """A dump of one rank, as slime to 0.3.1 and miles write it."""
    return {"rollout_id": 5, "rank": rank, "rollout_data": COLUMNS | changes}


def samples_dump() -> dict:
    """The same dump as slime writes it after 0.3.1."""
    shared = ("sample_indices", "raw_reward")
    rows = [{name: COLUMNS[name][i] for name in COLUMNS if name not in shared} for i in range(2)]
    rows = [row | {"sample_index": COLUMNS["sample_indices"][i]} for i, row in enumerate(rows)]
    return {"format_version": 2, "rollout_id": 5, "rank": 0, "samples": rows, "raw_reward": [1.0, 0.0] * 2}


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_both_forms_of_a_dump_of_training_say_the_same(tmp_path):
    first, second = read(saved(tmp_path / "columns.pt", rank_dump()))
    assert (first.prompt_ids, first.completion_ids) == ((12, 5, 39), (4, 8, 15))
    assert (first.step, first.sample) == (5, 11)
    assert first.mask.tolist() == [True, False, True]
    assert np.array_equal(first.trainer_logprobs, [-0.5, np.nan, -0.25], equal_nan=True)
    assert np.array_equal(first.logprobs, [-0.75, np.nan, -0.5], equal_nan=True)
    assert (first.advantage, first.reward, second.reward) == ((0.5, 0.5, 0.5), 0.5, -0.5)
    again = read(saved(tmp_path / "samples.pt", samples_dump()))
    assert [facts(r) for r in again] == [facts(first), facts(second)]


def test_the_step_is_the_dumps_though_a_sample_counts_itself(tmp_path):
    row = {"tokens": [1, 2, 3], "response_length": 1, "index": 40, "rollout_id": 40}
    (rollout,) = read(saved(tmp_path / "5.pt", {"rollout_id": 5, "samples": [row]}))
    assert (rollout.step, rollout.sample) == (5, 40)


def test_ranks_that_write_the_same_samples_count_once(tmp_path, capsys):
    for rank in range(2):
        saved(tmp_path / f"5_{rank}.pt", rank_dump(rank))
    assert len(read(tmp_path)) == 2
    assert "5_1.pt: 2 completions are those of an earlier file" in capsys.readouterr().err
    other = [COLUMNS["log_probs"][0], torch.tensor([-1.0, -2.125])]
    saved(tmp_path / "5_1.pt", rank_dump(1, log_probs=other))
    assert len(read(tmp_path)) == 3


@pytest.mark.parametrize(
    "dump",
    [rank_dump() | {"cp_rank": 0, "cp_size": 2}, rank_dump(log_probs=[x[:1] for x in COLUMNS["log_probs"]])],
    ids=["miles says it", "slime does not"],
)
def test_slices_of_context_parallelism_are_named(tmp_path, capsys, dump):
    file = saved(tmp_path / "5_0.pt", dump)
    assert main(["audit", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "a rank of context parallelism holds a slice" in capsys.readouterr().err
    assert main(["convert", str(file), str(tmp_path / "log.jsonl")]) == 2
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    "content",
    [
        {"log_probs": [torch.zeros(4)]},
        {"rollout_data": {"log_probs": [torch.zeros(4)]}},
        {"samples": [{"train_log_probs": torch.zeros(4)}]},
        [1, 2],
    ],
    ids=["losses", "columns", "samples", "list"],
)
def test_another_dump_is_told_from_one_of_samples(tmp_path, capsys, content):
    file = saved(tmp_path / "rank_0_call_0.pt", content)
    assert main(["convert", str(file), str(tmp_path / "log.jsonl")]) == 2
    assert "train_data and rollout_data have samples" in capsys.readouterr().err


class Status(Enum):
    """A value that weights_only does not open."""

    DONE = "done"


def dump_of_rollouts() -> dict:
    samples = [
        {"tokens": ids, "response_length": count, "rollout_log_probs": [-0.5] * count}
        for ids, count in zip(TOKENS, COUNTS, strict=True)
    ]
    return {"rollout_id": 5, "samples": samples}


def with_objects(dump: dict) -> dict:
    """The dump as a framework's own code may write it: with objects that are no plain values."""
    if "samples" in dump:
        return dump | {"samples": [row | {"status": Status.DONE} for row in dump["samples"]]}
    return dump | {"rollout_data": dump["rollout_data"] | {"status": [Status.DONE] * 2}}


@pytest.mark.parametrize(
    "dump", [rank_dump(), samples_dump(), dump_of_rollouts()], ids=["rank", "samples", "rollouts"]
)
def test_the_printed_script_writes_what_the_reader_reads(tmp_path, capsys, dump):
    file = saved(tmp_path / "5.pt", with_objects(dump))
    log = tmp_path / "log.jsonl"
    assert main(["convert", str(file), str(log)]) == 2  # no log, so no success
    printed, error = capsys.readouterr()
    assert error.count("\n") == 1
    assert "no log was written" in error
    assert not log.exists()
    run_script(printed, str(file), str(log))
    plain = read(saved(tmp_path / "plain.pt", dump))
    assert [r.completion_ids for r in read(log)] == [r.completion_ids for r in plain]
    assert [r.logprobs.tobytes() for r in read(log)] == [r.logprobs.tobytes() for r in plain]
    if "samples" not in dump or "log_probs" in dump["samples"][0]:
        assert [facts(r) for r in read(log, "slime")] == [facts(r) for r in plain]


def run_script(script: str, *words: str) -> None:
    """Run a script that `zerokl convert` printed, which finds the tests' own classes here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", *words])
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})


def batch() -> dict[str, torch.Tensor]:
    """Two sequences, padded left and right, in SkyRL's names and in verl's."""
    padded = {
        "sequences": [[12, 5, 39, 4, 8, 15], [0, 12, 5, 40, 0, 0]],
        "attention_mask": [[1] * 6, [0, 1, 1, 1, 0, 0]],
        "response_mask": [[1, 1, 1], [1, 0, 0]],
        "loss_mask": [[1, 0, 1], [1, 0, 0]],
        "prompts": [[12, 5, 39], [0, 12, 5]],
        "responses": [[4, 8, 15], [40, 0, 0]],
    }
    sampler, trainer = [[-0.75, 0.0, -0.5], [-1.5, 0.0, 0.0]], [[-0.5, 0.0, -0.25], [-1.0, 0.0, 0.0]]
    padded |= {"rollout_logprobs": sampler, "rollout_log_probs": sampler}
    padded |= {"action_log_probs": trainer, "old_log_probs": trainer}
    return {name: torch.tensor(values) for name, values in padded.items()}


VERL = """
import pickle
class DataProto:
    def __init__(self, batch): self.batch = batch
    @staticmethod
    def load_from_disk(path): return DataProto(pickle.load(open(path, "rb")))
"""


@pytest.mark.parametrize("format", ["skyrl", "verl"])
def test_the_scripts_of_skyrl_and_verl_write_a_log(tmp_path, monkeypatch, capsys, format):
    exec(VERL, vars(verl := ModuleType("verl")))
    monkeypatch.setitem(sys.modules, "verl", verl)
    file, log = tmp_path / "batch.pkl", tmp_path / "log.jsonl"
    file.write_bytes(pickle.dumps(batch()))
    assert main(["convert", str(file), "--format", format]) == 2
    run_script(capsys.readouterr().out, str(file), str(log), "0.7")
    first, second = read(log, format)
    assert (first.prompt_ids, first.completion_ids) == ((12, 5, 39), (4, 8, 15))
    assert (second.prompt_ids, second.completion_ids) == ((12, 5), (40,))
    assert (second.trainer_logprobs.tolist(), second.logprobs.tolist()) == ([-1.0], [-1.5])
    assert first.sampling_params == SamplingParams(0.7)


def test_both_columns_of_prime_rls_exports_in_all_digits():
    first, second = read(SAMPLES / "prime-rl-tokens.jsonl")
    row = rows_of("prime-rl-tokens")[1][0]
    assert (second.prompt_ids, len(second.completion_ids)) == ((12, 5, 40, 7), 8)
    assert second.mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    drawn = np.array(row["loss_mask"])
    columns = {"inference_logprobs": second.logprobs, "trainer_logprobs": second.trainer_logprobs}
    for name, column in columns.items():
        assert np.isnan(column).tolist() == (~second.mask).tolist()
        assert column[second.mask].tolist() == np.float32(np.array(row[name], float)[drawn]).tolist()
    assert (first.decimals, first.trainer_decimals) == (None, None)
    assert (first.step, first.advantage) == (7, (0.5,) * 4)


def test_tokens_of_a_frozen_model_were_not_drawn():
    row = first_row(SAMPLES / "prime-rl-tokens.jsonl")
    count = len(row["token_ids"])
    drawn = [4, 5]
    row["rl_weights"] = [float(i == drawn[0]) for i in range(count)]
    row["ref_kl_weights"] = [float(i == drawn[1]) for i in range(count)]
    (rollout,) = LOGS["prime-rl-tokens"].parse(row, Path())
    assert [len(rollout.prompt_ids) + i for i in np.flatnonzero(rollout.mask)] == drawn
    row |= {"rl_weights": [0.0] * count, "ref_kl_weights": [None] * count}
    assert list(LOGS["prime-rl-tokens"].parse(row, Path())) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 2}, "schema_version (2) must be 1"),
        ({"trainer_logprobs": [-1.0]}, "trainer_logprobs has 1 entries for 7 token_ids"),
        ({"rl_weights": [1.0]}, "rl_weights and ref_kl_weights must have an entry for each of 7 tokens"),
        ({"loss_mask": [True] * 7}, "loss_mask: the first token was drawn, so there is no prompt"),
    ],
)
def test_an_export_that_does_not_fit_is_named(tmp_path, capsys, change, reason):
    write_rows(tmp_path / "rank_0.jsonl", first_row(SAMPLES / "prime-rl-tokens.jsonl") | change)
    assert main(["audit", str(tmp_path / "rank_0.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert f"line 1: {reason}" in capsys.readouterr().err


def test_the_calls_of_nemo_gym_are_turns():
    first, second, third = read(SAMPLES / "nemo-gym.jsonl")
    assert [(r.sample, r.turn, len(r.completion_ids)) for r in (first, second, third)] == [
        (0, 0, 3),
        (0, 1, 4),
        (1, 0, 3),
    ]
    assert second.prompt_ids == (*first.prompt_ids, *first.completion_ids, 8, 9)
    call = first_row(SAMPLES / "nemo-gym.jsonl")["response"]["output"][-1]
    assert second.logprobs.tolist() == np.float32(call["generation_log_probs"]).tolist()
    assert (second.sampling_params, second.reward, second.prompt) == (SamplingParams(0.8), 1.0, 0)


def test_a_rollout_of_nemo_gym_without_ids_is_refused_unless_nothing_was_written():
    row = rows_of("nemo-gym")[1][0]
    for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        del row["response"]["output"][-1][name]
    with pytest.raises(ValueError, match="return_token_id_information: true"):
        list(LOGS["nemo-gym"].parse(row, Path()))
    row["response"]["output"] = [{"type": "message", "role": "assistant", "content": []}]
    assert list(LOGS["nemo-gym"].parse(row, Path())) == []


def test_the_groups_and_nodes_of_atropos():
    first, second, node = read(SAMPLES / "atropos.jsonl")
    assert (first.prompt_ids, first.reward, second.reward) == ((12, 5, 39), 1.0, 0.0)
    assert [len(r.completion_ids) for r in (first, second, node)] == [4, 3, 3]
    group = first_row(SAMPLES / "atropos.jsonl")
    assert second.logprobs.tolist() == np.float32(group["inference_logprobs"][1][3:]).tolist()
    assert (second.advantage, second.sampling_params) == ((-0.5,) * 3, SamplingParams(0.8))
    assert (node.prompt_ids, node.sampling_params) == ((12, 5, 40, 7), None)


def test_a_mask_of_atropos_is_minus_100_or_the_token(tmp_path, capsys):
    group = first_row(SAMPLES / "atropos.jsonl")
    group["masks"][1][-1] = -100
    group["masks"][0] = [-100] * len(group["masks"][0])
    (rollout,) = LOGS["atropos"].parse(group, Path())
    assert rollout.mask.tolist() == [True, True, False]
    group["masks"][1][-1] = 1
    log = write_rows(tmp_path / "log.jsonl", group)
    assert main(["convert", str(log), str(tmp_path / "out.jsonl")]) == 2
    assert "line 1: sequence 1: masks holds 1, which is neither" in capsys.readouterr().err
    log = write_rows(
        tmp_path / "log.jsonl", first_row(SAMPLES / "atropos.jsonl") | {"inference_logprobs": None}
    )
    assert main(["audit", str(log), "--out", str(tmp_path / "out")]) == 2
    assert "ManagedServer" in capsys.readouterr().err


ANSWER = {"id": "x", "choices": [{"index": 0, "token_ids": [4, 8], "logprobs": {"content": []}}]}


@pytest.mark.parametrize(
    "row",
    [
        ANSWER,
        {"text": "x", "meta_info": {"output_token_logprobs": [[-0.5, 4, None]]}},
        {"custom_id": "1", "response": {"status_code": 200, "body": ANSWER}},
        {"id": "x", "object": "response", "output": []},
    ],
    ids=["choices", "meta_info", "batch", "responses"],
)
def test_answers_of_a_server_are_to_be_recorded(tmp_path, capsys, row):
    log = write_rows(tmp_path / "log.jsonl", row)
    for words in (["audit", str(log), "--out"], ["convert", str(log)]):
        assert main([*words, str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert "answers of a server" in error
        assert "`zerokl record`" in error


@pytest.mark.parametrize(
    ("row", "ids", "logprobs"),
    [
        ({"in_tokens": [3, 1], "out_tokens": [7], "lp": [-0.5], "w": [-0.5]}, "in_tokens, out_tokens", "lp"),
        ({"x": [9, 4], "at": [0, 1, 2], "kept": [1, 0], "y": [-0.5, None], "advantages": [-0.5]}, "x", "y"),
        ({"a": {"b": [{"ids": [[5, 6]], "old_logp": [[-1.5, 0.0]]}]}}, "a.b[0].ids[0]", "a.b[0].old_logp[0]"),
        ({"prompt": "1+2=", "tokens": [5, 6]}, "tokens", ""),
        ({"prompt": "1+2=", "answer": "3", "usage": {"prompt_tokens": 4}}, "", ""),
    ],
)
def test_an_unknown_row_is_told_what_it_holds_and_what_to_do(tmp_path, capsys, row, ids, logprobs):
    log = write_rows(tmp_path / "log.jsonl", row)
    assert main(["audit", str(log), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Recorder" in error
    assert "docs/log-format.md" in error
    kinds = [kind for kind, names in (("token ids", ids), ("log-probabilities", logprobs)) if not names]
    if not kinds:
        assert f"{ids} may be token ids, and {logprobs} log-probabilities: write them as" in error
        return
    assert f"nothing in it looks like {' or '.join(kinds)}: record the run" in error
    assert "`zerokl record`" in error
    assert not ids or f"{ids} may be token ids" in error


def test_columns_of_tensors_are_looked_into():
    told = unknown.remedy({"ids": torch.tensor([[4, 9]]), "logp": [torch.tensor([-0.5, -1.0])]})
    assert told.startswith("ids[0] may be token ids, and logp[0] log-probabilities")


def test_another_format_than_the_one_asked_for_is_named():
    with pytest.raises(ValueError, match="is of the format prime-rl-tokens; leave out --format prime-rl"):
        find_format(SAMPLES / "prime-rl-tokens.jsonl", "prime-rl")
    assert find_format(SAMPLES / "trl.jsonl", "slime").name == "zerokl"


def test_a_parquet_file_is_of_the_format_of_its_first_row(tmp_path, monkeypatch):
    row = {"sample_index": 3, "response_length": 1, "tokens": [1, 2], "rollout_log_probs": [-0.5]}
    monkeypatch.setattr(registry, "parquet_rows", lambda path: iter([("row 1", row)]))
    (tmp_path / "rollout_5.parquet").write_bytes(b"PAR1")
    (rollout,) = read(tmp_path / "rollout_5.parquet")
    assert (rollout.completion_ids, rollout.sample) == ((2,), 3)
