"""What `[perturb]` plants in a run's sampler is what the fault beside its key names.

Here the native sampler draws, and the trainer's column is our decoder's.
"""

import numpy as np
import pytest
import torch
from zerokl.audit.faults import all_faults
from zerokl.audit.faults.fault import Fault, Plant
from zerokl.audit.faults.planting.sampling import Line
from zerokl.benchmarks.audit_cases.run import judged, report_of, write_case
from zerokl.engine.config.perturb_section import PerturbConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.section import settings_of
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.perturb import Delayed, sampled_weights
from zerokl.engine.rollout.types import DrawParams, Request, RngKey
from zerokl.engine.runs.lagged import perturbed
from zerokl.engine.runs.samplers import numerics_of
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder

EACH, MOST = 3, 48
# Not a fault that anyone has: noise that follows no rule has no other name than "unknown".
NAMELESS = {"logit_noise"}
PLANTED = {
    "round_weights": "bfloat16",
    "weights": "float8_e4m3fn/row",
    "kv": "float8_e4m3fn/unit",
    "temperature": 1.1,
    "top_k": 12,
    "top_p": 0.8,
    "min_p": 0.1,
    "delay": 1,
}
# What a report may say of a fault in place of its name.
NAMED = {
    "another top-p, top-k or min-p": ("drew with", "without top-p, top-k or min-p"),
    "keys and values rounded": ("keys and values",),
}
BY_KEY = {key: fault for fault in all_faults.with_model() for key in fault.perturb}


def drawn(world, perturb: PerturbConfig) -> list[Line]:
    """Completions of the world's prompts by the native sampler of a run with these perturbations."""
    config = Config(exact=False, perturb=perturb)
    model = load_decoder(world.folder, torch.float32)
    late = Delayed(perturb.delay)
    late.push(load_decoder(world.old, torch.float32).flat.detach())
    weights = sampled_weights(config, model.layout, late.push(model.flat.detach()))
    sampler = NativeSampler(Decoder(model.config, weights, model.layout, numerics_of(config, True)))
    params = DrawParams(SamplingParams(world.usual.temperature), frozenset({world.end_id}))
    requests = [
        perturbed(perturb, Request(tuple(prompt), RngKey(0, 0, prompt=p, sample=s), params, MOST))
        for p, prompt in enumerate(world.prompts)
        for s in range(EACH)
    ]
    return [
        Line(list(request.ids), list(x.ids), np.float32(x.logprobs))
        for request, x in zip(requests, sampler.generate(requests), strict=True)
    ]


def verdict(world, folder, perturb: PerturbConfig, fault: Fault | None = None) -> str:
    """What an audit says of such a log: the word of benchmarks/audit_cases/run.py, and the cause."""

    def planted(w):
        return w.log(w.both(drawn(w, perturb)), options=w.with_old)

    named = NAMED.get(fault.name, ()) if fault else ()
    plant = Plant(group="perturb" if fault else "sound", make=planted, named=named)
    case = write_case(folder, world, plant, fault)
    report = report_of(folder, case)
    return f"{judged(case, report)} ({report['cause']['kind']}: {report['cause']['text']})"


@pytest.mark.parametrize(
    "key", [pytest.param(k, marks=[] if k == "delay" else pytest.mark.full) for k in PLANTED]
)
def test_what_a_run_plants_is_named(world, tmp_path, key):
    perturb = PerturbConfig(**{key: PLANTED[key]})
    assert verdict(world, tmp_path, perturb, BY_KEY[key]).startswith("named")


def test_control_a_run_that_plants_nothing_is_clear(world, tmp_path):
    assert verdict(world, tmp_path, PerturbConfig()).startswith("clear")


def test_each_way_to_differ_is_a_fault_of_one_file():
    keys = [key for fault in all_faults.everything() for key in fault.perturb]
    differing = {key for key, s in settings_of(PerturbConfig).items() if s.facts.differs}
    assert set(keys) | NAMELESS == differing
    assert len(keys) == len(set(keys))
    assert set(PLANTED) == set(keys)
