"""Every fault of audit/faults/ is planted, and an audit names it; a sound log names none.

transformers draws and scores, or plain Python changes a column: a plant shares no code with what predicts it.
"""

import importlib
from pathlib import Path

import pytest
from zerokl.audit.faults import all_faults
from zerokl.audit.faults.fault import Fault, Plant
from zerokl.benchmarks.audit_cases.run import judged, report_of, write_case
from zerokl.benchmarks.audit_cases.sound import SOUND

FAULTS = all_faults.everything()
# A fault that two columns show, and of sound logs one beside the model, too.
QUICK = {"zero_at_the_end_token", "bf16_beside_fp32_no_model", "bf16_beside_fp32"}


def _param(plant: Plant, *before: Fault):
    name = plant.make.__name__
    return pytest.param(*before, plant, id=name, marks=[] if name in QUICK else [pytest.mark.full])


PLANTS = [_param(plant, fault) for fault in FAULTS for plant in fault.plants]


@pytest.mark.parametrize(("fault", "plant"), PLANTS)
def test_a_planted_fault_is_named(world, tmp_path, fault, plant):
    case = write_case(tmp_path, world, plant, fault)
    report = report_of(tmp_path, case)
    accepted = ("named", "seen") if plant.untold else ("named",)
    assert judged(case, report) in accepted, f"{report['cause']['kind']}: {report['cause']['text']}"


@pytest.mark.parametrize("sound", list(map(_param, SOUND)))
def test_a_sound_log_names_no_fault(world, tmp_path, sound):
    case = write_case(tmp_path, world, sound)
    report = report_of(tmp_path, case)
    assert judged(case, report) == "clear", f"{report['cause']['kind']}: {report['cause']['text']}"


def test_each_fault_has_a_plant_an_order_and_words():
    assert all(fault.plants and fault.remedy.endswith(".") and fault.tries for fault in FAULTS)
    names = [plant.make.__name__ for fault in FAULTS for plant in fault.plants]
    assert len(names) == len(set(names)), "a case is found by its name"
    for faults in (all_faults.with_model(), all_faults.in_ids(), all_faults.in_draws()):
        orders = [fault.order for fault in faults]
        assert len(orders) == len(set(orders)), "of two that fit equally well the first is named"


def test_a_file_is_a_fault_and_is_counted_without_being_loaded():
    places = Path(all_faults.__file__).parent
    assert all_faults.predicted_count() == len(all_faults.with_model())
    for place in ("numbers", "model", "ids", "draws", "signal", "columns"):
        for file in places.joinpath(place).glob("[a-z]*.py"):
            assert importlib.import_module(f"zerokl.audit.faults.{place}.{file.stem}").FAULT in FAULTS
