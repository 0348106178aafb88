"""polar by Triton's products, interpreted: accuracy against fp64 beside torch's Muon."""

from zerokl.files.bitwise import count_unequal
from zerokl.kernels.polar import polar

from tests.helpers import assert_at_most_twice_the_error, randn
from tests.kernels.test_polar import by_torch


def test_the_error_is_at_most_twice_that_of_torch(monkeypatch):
    m = randn(0, 40, 24)
    y = polar(m, 3)
    assert_at_most_twice_the_error(y, by_torch(m, 3, monkeypatch), by_torch(m.double(), 3, monkeypatch), "")
    assert count_unequal(polar(m.t(), 3), y.t()) == 0
