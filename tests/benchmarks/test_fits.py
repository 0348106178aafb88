"""The table of what a card trains is the prediction's."""

import pytest
from zerokl.benchmarks.fits import CARDS, place, row, run_of
from zerokl.verify.run_environment import PACKAGE_ROOT

COSTS = (PACKAGE_ROOT / "docs" / "costs.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "lora"),
    [("8B", True), pytest.param("0.6B", False, marks=pytest.mark.full), ("1.7B", False), ("14B", True)],
)
def test_the_page_has_the_predicted_row(name, lora):
    assert COSTS.count(f"| {' | '.join(row(name, lora))} |") == 1


def test_control_a_smaller_card_has_another_cell():
    run = run_of("8B", 8192, True, 8)
    assert place(run, CARDS["80 GB"]) == "card"
    assert place(run, 40.0).startswith("host")
    assert place(run, 10.0) == "-"
