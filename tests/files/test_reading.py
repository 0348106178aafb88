"""Words with which messages are made, and JSON as Python's own parser reads it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.reading import first_few, parse_json
from zerokl.verify.mismatch import exact_sum


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, ""), (1, "w0"), (2, "w0, w1"), (3, "w0, w1 and 1 more"), (2002, "w0, w1 and 2,000 more")],
)
def test_a_list_names_the_first_few_and_counts_the_others(n, expected):
    assert first_few([f"w{i}" for i in range(n)], 2) == expected


_NUMBERS = st.one_of(
    st.floats().map(json.dumps), st.from_regex(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?(e[+-]?[0-9]{1,3})?")
)
_TEXTS = st.one_of(_NUMBERS, st.text().map(json.dumps), st.text('[]{}",:0123456789eE+-.\\udtrfnalsNI \n'))


def _read(parse, text):
    """The value, floats by their bits; or that there is none."""
    try:
        value = parse(text)
    except ValueError:
        return "refused"
    return repr(value) if value == value else "NaN"


@given(_TEXTS)
def test_json_is_read_as_python_reads_it(text):
    assert _read(lambda x: parse_json(x, non_finite=True), text) == _read(json.loads, text)
    assert _read(lambda x: parse_json(x.encode(), non_finite=True), text) == _read(json.loads, text)


@given(st.integers(0, 2**32 - 1), st.integers(0, 40_000))
def test_a_sum_in_parts_has_the_bits_of_the_whole(seed, n):
    rng = np.random.default_rng(seed)
    x = rng.standard_cauchy(n)
    for values in (x, rng.random(n)):  # of one sign and size: a sum has more bits than its terms
        assert exact_sum(values) == math.fsum(values.tolist())
    # Numbers of all sizes, most of which cancel: a plain sum is wrong here.
    x = np.ldexp(x[:1000], rng.integers(-1070, 1000, min(n, 1000)))
    x = np.concatenate([x, rng.permutation(-x), x[: n % 7]])
    assert exact_sum(x) == math.fsum(x.tolist())


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, -0.0])
def test_a_sum_in_parts_of_what_is_no_finite_number_is_that_of_the_whole(special):
    x = np.full(40_000, -0.0)
    x[17] = special
    assert repr(exact_sum(x)) == repr(math.fsum(x.tolist()))
