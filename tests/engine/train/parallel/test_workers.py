"""Worker processes: equal bits whichever process computes, and what happens when one raises or dies."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from zerokl.engine.config.run_config import NativeConfig
from zerokl.engine.processes.process import Process
from zerokl.engine.processes.shared_tensor import Handle, SharedTensor, map_tensor
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.train.parallel import worker
from zerokl.engine.train.parallel.worker import Failure, Host, _pickled
from zerokl.engine.train.parallel.workers import ParallelSampler, Workers
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.context import Buffers
from zerokl.model.decoder import Decoder

from tests.helpers import add_to_grad

PROMPTS = [(5, 6, 7), (8,), (9, 10, 11, 12), (5,), (6, 6)]
SAMPLING = GenerationParams(SamplingParams(0.8), 3, 12, frozenset({1}))


def _process_id(host: Host, item: object) -> int:
    return os.getpid()


def _raise(host: Host, item: str) -> None:
    if item:
        raise FloatingPointError(item)


def _die(host: Host, item: bool) -> None:
    if item:
        os.kill(os.getpid(), signal.SIGKILL)


def _ones(decoder: Decoder, shards: list[float], buffers: Buffers) -> list[float]:
    (factor,) = shards
    for w in decoder.w.values():
        add_to_grad(buffers[w], factor)
    return shards


@pytest.fixture(scope="module", autouse=True)
def _no_forks():
    """Here each worker's process is a fresh one, as users have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Process", Process)
        yield


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def workers(request: pytest.FixtureRequest, model):
    with Workers(load_decoder(model, request.param), 4, 2, NativeConfig(max_concurrency=4)) as workers:
        yield workers


def test_each_item_has_a_process_of_its_own(workers):
    first, second = workers.map(_process_id, [None, None])
    assert (first, second != first) == (os.getpid(), True)
    assert workers.map(_process_id, [None]) == [first]


def test_tokens_and_logprobs_are_those_of_one_sampler(workers):
    decoder = workers.host.decoder
    alone = complete(NativeSampler(decoder, version=3), PROMPTS, SAMPLING, RngKey(1, 2))
    sampler = ParallelSampler(workers)
    sampler.sync_weights(3)
    for prompts in (PROMPTS, PROMPTS[:1]):
        together = complete(sampler, prompts, SAMPLING, RngKey(1, 2))
        for a, b in zip(alone, together, strict=False):
            assert (a.prompt, a.sample) == (b.prompt, b.sample)
            assert (a.completion_ids, a.weight_version) == (b.completion_ids, b.weight_version)
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert len(together) == 3 * len(prompts)


def _two_turns(sampler: NativeSampler | ParallelSampler, prompts: int) -> list[tuple]:
    """What three trajectories of each prompt of 40 ids draw in two turns."""
    requests = SAMPLING.requests([(20 + i,) * 40 for i in range(prompts)], RngKey(prompts, 2))
    requests = [replace(request, trajectory_tokens=100) for request in requests]
    first = sampler.generate(requests)
    later = [
        replace(request, ids=(*request.ids, *c.ids, 11), drawn=len(c.ids))
        for request, c in zip(requests, first, strict=True)
    ]
    return [(c.ids, c.logprobs.tobytes()) for c in (*first, *sampler.generate(later))]


@pytest.mark.parametrize(("prompts", "moved"), [(4, 0), (3, 1)])
def test_trajectories_come_back_to_the_worker_that_has_them(workers, prompts, moved):
    """Of 9 trajectories one worker has 6, and an even cut gives it 5 of them. The other one is read anew."""
    sampler, alone = ParallelSampler(workers), NativeSampler(workers.host.decoder, 4)
    assert _two_turns(sampler, prompts) == _two_turns(alone, prompts)
    assert alone.tokens_cached == 3 * prompts * KEY_TILE
    assert alone.tokens_cached - sampler.tokens_cached == moved * KEY_TILE
    assert sampler.tokens_read - alone.tokens_read == moved * KEY_TILE
    sampler.end_turns()


def _memories(host: Host, item: None) -> bool:
    return host.sampler._memory is not None


@pytest.mark.parametrize("end", ["end_turns", "sync_weights"])
def test_every_worker_drops_what_it_kept(workers, end):
    sampler = ParallelSampler(workers)
    requests = SAMPLING.requests([(20 + i,) * 40 for i in range(2)], RngKey(1, 2))
    sampler.generate([replace(request, trajectory_tokens=100) for request in requests])
    sampler.generate(requests)  # the last turn: nothing more is kept, and what was is still there
    assert workers.map(_memories, [None, None]) == [True, True]
    getattr(sampler, end)(*([0] if end == "sync_weights" else []))
    assert workers.map(_memories, [None, None]) == [False, False]


def _completions(sampler: NativeSampler | ParallelSampler) -> list[tuple[int, ...]]:
    return [r.completion_ids for r in complete(sampler, PROMPTS, SAMPLING, RngKey(1, 2))]


def test_a_change_of_the_weights_reaches_the_others(workers):
    decoder, sampler = workers.host.decoder, ParallelSampler(workers)
    before = _completions(sampler)
    saved = decoder.flat.detach().clone()
    try:
        decoder.flat.mul_(1.25)
        after = _completions(sampler)
        expected = _completions(NativeSampler(decoder))
    finally:
        decoder.flat.copy_(saved)
    assert after == expected != before


def test_gradients_come_back_and_empty_shards_have_none(workers):
    assert workers.sum_shards(_ones, [None] * 4) == ([None] * 4, None)
    for shards in ([1.0, None, 2.0, 4.0], [1.0, 2.0, None, None], [None, None, 8.0, 1.0]):
        results, gradient = workers.sum_shards(_ones, shards)
        assert results == shards
        views = workers.host.decoder.layout.views(gradient)
        assert all((view == sum(x or 0.0 for x in shards)).all() for view in views.values())


@pytest.mark.parametrize("items", [["first", ""], ["", "second"], ["first", "second"]])
def test_the_first_exception_is_raised_and_the_workers_go_on(workers, items):
    with pytest.raises(FloatingPointError, match=next(filter(None, items))):
        workers.map(_raise, items)
    assert len(workers.map(_process_id, [None, None])) == 2


def test_an_exception_that_does_not_survive_pickle_is_told_as_text():
    class LocalError(Exception):
        pass

    assert b"LocalError" in _pickled(Failure(LocalError("reason")))


def test_a_worker_that_dies_is_named(model):
    workers = Workers(load_decoder(model, torch.float32), 4, 2)
    message = r"worker 1 \(process \d+\) was killed by SIGKILL.*memory.*workers = 1"
    with pytest.raises(ChildProcessError, match=message):
        workers.map(_die, [False, True])
    workers.close()


def test_other_processes_end_with_close(model):
    workers = Workers(load_decoder(model, torch.float32), 4, 2)
    ids = workers.map(_process_id, [None] * 2)[1:]
    workers.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{i}") for i in ids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("asked", "shards", "n"), [(1, 8, 1), (3, 8, 2), (5, 2, 2), (2, 1, 1)])
def test_their_number_is_a_power_of_two_that_divides_the_shards(model, asked, shards, n):
    with Workers(load_decoder(model, torch.float32), shards, asked) as workers:
        assert workers.n == n


@pytest.mark.full
def test_a_worker_that_starts_late_touches_no_other_file(model, tmp_path):
    """A worker may start after its owner has gone, and must not open its memory by the descriptor's number.

    Numbers of descriptors are used again. The worker would map, and write to, the file with that number now.
    """
    for i in range(4):
        workers = Workers(load_decoder(model, torch.float32), 4, 4)
        # The owner is gone before any worker has started.
        workers._others.clear()
        del workers
        files = [open(tmp_path / f"{i}-{n}", "w+b") for n in range(12)]
        for file in files:
            file.write(b"data" * 1000)
            file.flush()
        time.sleep(1.5)
        for file in files:
            file.seek(0)
            assert file.read() == b"data" * 1000
            file.close()


@pytest.mark.full
def test_memory_that_became_another_file_is_refused(tmp_path):
    shared = SharedTensor(8, torch.float32)
    shared.tensor.fill_(3.0)
    assert map_tensor(shared.handle, 8, torch.float32).tolist() == [3.0] * 8
    (tmp_path / "file").write_bytes(bytes(32))
    with open(tmp_path / "file", "r+b") as file:
        os.dup2(file.fileno(), shared.fd)
        stale = Handle(f"/proc/self/fd/{shared.fd}", *SharedTensor(8, torch.float32).handle[1:])
        with pytest.raises(OSError, match="is another file by now"):
            map_tensor(stale, 8, torch.float32)
    assert (tmp_path / "file").read_bytes() == bytes(32)
