"""The one search for differences, its words, and the exit code that follows from them."""

import pytest
from zerokl.cli.exit_codes import ExitCode
from zerokl.verify.difference import (
    ABSENT,
    CheckResult,
    Difference,
    Mark,
    compare_values,
    differences,
    first_difference,
    first_in_order,
    first_unequal,
    first_wrong,
    same_json,
)


def test_differences_come_in_the_order_of_the_first_record_and_say_who_lacks_what():
    a = {"tokens": 1, "rewards": 2, "weights": None}
    b = {"weights": 3, "rewards": 2, "tokens": 9, "notes": 4}
    assert [(d.quantity, d.values, d.missing) for d in differences(a, b)] == [
        ("tokens", (1, 9), None),
        ("weights", (None, 3), None),
        ("notes", (ABSENT, 4), 0),
    ]
    assert first_difference(a, b).quantity == "tokens"
    assert first_difference(a, a) is None
    assert [d.quantity for d in differences({"x": None}, {}, absent=None)] == []
    (lacking,) = differences({"x": None}, {})
    assert (lacking.missing, lacking.one_sided) == (1, "only the first has it")


def test_values_are_compared_as_json_has_them():
    assert [d.quantity for d in differences({"a": 1, "b": True}, {"a": 1.0, "b": 1}, same_json)] == ["a", "b"]
    assert first_difference({"a": float("nan")}, {"a": float("nan")}, same_json) is None
    assert first_difference({"a": 1}, {"a": 1.0}) is None, "control: plain equality does not see it"


def test_what_was_not_derived_does_not_count_and_what_is_lacking_does():
    assert first_wrong({"reward": 1.0, "time": 7}, {"reward": 1.0}) is None
    assert first_wrong({"time": 7}, {"reward": 1.0}).values == (ABSENT, 1.0)


@pytest.mark.parametrize(
    ("x", "y", "index"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (4,), 0)]
)
def test_the_first_unequal_index_is_where_the_shorter_ends_at_the_latest(x, y, index):
    assert first_unequal(x, y) == first_unequal(y, x) == index


def test_a_cause_comes_before_its_effect_in_whichever_pair_it_stands():
    pairs = [({"token": 1, "reward": 5}, {"token": 1, "reward": 6}), ({"token": 2}, {"token": 3})]

    def compare(kind, x, y):
        return compare_values(kind, x.get(kind), y.get(kind))

    kind, pair, difference = first_in_order(("token", "reward"), pairs, compare)
    assert (kind, pair, difference.values) == ("token", pairs[1], (2, 3))
    assert first_in_order(("reward", "token"), pairs, compare)[1] is pairs[0]
    assert first_in_order(("token",), pairs[:1], compare) is None


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (
            Difference("first_weights", part="w", others=2, step=3),
            "step 3: first weights of w and 2 other weights",
        ),
        (
            Difference("configuration", (1, ABSENT), "seed", place="before"),
            "before: configuration seed: 1 and nothing",
        ),
        (compare_values("token", [1, 2], [1, 3]), "token at position 1: 2 and 3"),
        (compare_values("reward", 1.0, 0.5), "reward 1.0 and 0.5"),
    ],
)
def test_a_difference_is_said_in_one_way(difference, words):
    assert str(difference) == words


def test_a_hostile_name_and_value_are_escaped_and_the_value_is_cut():
    difference = Difference("\x1b[2J\n", ("\x1b[2J" * 1000, "a  b"))
    for words in (str(difference), difference.beside("must be")):
        assert len(words) < 400
        assert words.isprintable()
        assert "'a  b'" in words, "spaces are not folded: they may be the difference"


@pytest.mark.parametrize(
    ("marks", "code"),
    [
        ((), ExitCode.DONE),
        ((Mark.EQUAL, Mark.NOT_COMPARED), ExitCode.DONE),
        ((Mark.OPEN, Mark.EQUAL), ExitCode.UNCONFIRMED),
        ((Mark.OPEN, Mark.DIFFERENT, Mark.EQUAL), ExitCode.DIFFERS),
    ],
)
def test_one_line_that_differs_decides_and_else_one_that_is_open(marks, code):
    assert ExitCode.after(marks) == code


def test_a_fault_of_a_check_keeps_its_difference():
    difference = Difference("weights", step=2)
    result = CheckResult.judged("step 2", difference, "the same bits")
    assert (result.mark, result.result, result.difference) == (Mark.DIFFERENT, "step 2: weights", difference)
    assert CheckResult.judged("step 2", None, "the same bits").result == "the same bits"
    assert CheckResult.note("step 2", "not done").holds
