"""Words with which messages are made."""

import pytest
from zerokl.files.reading import first_few


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, ""), (1, "w0"), (2, "w0, w1"), (3, "w0, w1 and 1 more"), (2002, "w0, w1 and 2,000 more")],
)
def test_a_list_names_the_first_few_and_counts_the_others(n, expected):
    assert first_few([f"w{i}" for i in range(n)], 2) == expected
