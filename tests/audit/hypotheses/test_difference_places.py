"""Where a difference sits, and which wrong number stands there: long logs, classes of tokens and of lines.

The columns are drawn here; no decoder computes.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from zerokl.audit.faults.ids import after_the_end, cut_short, end_without_logprob
from zerokl.audit.formats.record import LoggedRollout
from zerokl.audit.hypotheses.column_causes import try_columns
from zerokl.audit.hypotheses.log_checks import check_log, drawn_parts

from tests.audit.rounded_lines import END, rounded_lines


def sound(lines: int, seed: int = 0) -> list[LoggedRollout]:
    """Lines with prompts of several lengths, whose two columns differ by what bf16 rounds."""
    return rounded_lines(seed, 1.2e-2, lines, lambda rng, i: tuple(rng.integers(3, 400, 3 + i % 7).tolist()))


def with_trainer(rollouts, change) -> list[LoggedRollout]:
    """The lines with other numbers of the trainer: change(i, line) -> [C], or None to leave a line."""
    changed = []
    for i, x in enumerate(rollouts):
        column = change(i, x)
        changed.append(x if column is None else replace(x, trainer_logprobs=np.float32(column)))
    return changed


def zeros_at(x: LoggedRollout, places: np.ndarray) -> np.ndarray:
    return np.where(places, 0.0, x.trainer_logprobs)


def beginning_of(other: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x, which begins with the numbers of another line, as many as both have."""
    n = min(len(other), len(x))
    return np.append(other[:n], x[n:])


def test_a_rank_of_a_long_log_has_the_numbers_of_the_next_line():
    """200 lines: those that are tried hold the lines beside a wrong one, and sound lines as well."""
    rollouts = sound(200)

    def next_lines(i, x):
        return None if i % 4 != 2 else beginning_of(rollouts[i + 1].trainer_logprobs, x.trainer_logprobs)

    named = try_columns(with_trainer(rollouts, next_lines))[1].best
    assert "every 4th from line 3 on the trainer's number is the next line's" in named.what
    assert named.share_left < 0.1


def test_lines_that_differ_little_are_found_with_the_others():
    """Every third of 18 lines has the next line's numbers; by chance those of two differ little."""
    rollouts = sound(18)
    for i in (3, 9):
        n = min(len(rollouts[i].logprobs), len(rollouts[i + 1].logprobs))
        other = rollouts[i].trainer_logprobs[:n] - np.float32(0.02)
        columns = {
            name: np.append(other, getattr(rollouts[i + 1], name)[n:])
            for name in ("logprobs", "trainer_logprobs")
        }
        rollouts[i + 1] = replace(rollouts[i + 1], **columns)

    def next_lines(i, x):
        return None if i % 3 else beginning_of(rollouts[i + 1].trainer_logprobs, x.trainer_logprobs)

    named = try_columns(with_trainer(rollouts, next_lines))[1].best
    assert "every 3rd from line 1 on the trainer's number is the next line's" in named.what


def test_numbers_of_another_sample_of_the_group_are_named():
    """The completions of a group were sorted, and their numbers were not: lengths differ."""
    rollouts = sound(18)
    groups = [[replace(x, prompt_ids=group[0].prompt_ids) for x in group] for group in _by_three(rollouts)]
    rotated = []
    for group in groups:
        for x, other in zip(group, [*group[1:], group[0]], strict=True):
            rotated.append(replace(x, logprobs=beginning_of(other.logprobs, x.logprobs)))
    sampler, trainer = try_columns(rotated)[:2]
    assert sampler.best.name == "another line's numbers"
    assert trainer.best is None, "its numbers are of its own tokens"


def _by_three(rollouts):
    return [rollouts[i : i + 3] for i in range(0, len(rollouts), 3)]


LONG = np.quantile([len(x.completion_ids) for x in sound(18)], 0.6)
LINES = {
    "weight version 5": lambda i, x: i >= 9,
    "from line 8 to line 12": lambda i, x: 7 <= i <= 11,
    "all those with a completion of": lambda i, x: len(x.completion_ids) >= LONG,
}


@pytest.mark.parametrize("words", LINES)
def test_what_the_lines_at_fault_have_in_common_is_said(words):
    version = {"weight version 5": lambda i: (4 + i // 9,) * 2}.get(words, lambda i: (4, 4))
    rollouts = [replace(x, weight_span=version(i)) for i, x in enumerate(sound(18))]

    def base_two(i, x):
        return x.trainer_logprobs / np.log(2.0) if LINES[words](i, x) else None

    tried = try_columns(with_trainer(rollouts, base_two))[1]
    assert words in tried.where.words
    assert "base 2" in tried.best.what


@pytest.mark.parametrize(
    "quiet", [pytest.param((), marks=pytest.mark.full), pytest.param((20,), marks=pytest.mark.full), (20, 27)]
)
def test_a_batch_is_told_with_its_size_also_where_some_of_its_lines_show_little(quiet):
    rollouts = sound(48)

    def base_two(i, x):
        return x.trainer_logprobs / np.log(2.0) if 16 <= i < 32 and i not in quiet else None

    words = try_columns(with_trainer(rollouts, base_two))[1].where.words
    assert f"{16 - len(quiet)} of 48 lines" in words
    assert "from line 17 to line 32" in words


def test_zeros_beyond_a_length_of_the_sequence_are_told_from_places_of_the_completion():
    def cut(i, x):
        return zeros_at(x, len(x.prompt_ids) + np.arange(len(x.completion_ids)) >= 40)

    named = try_columns(with_trainer(sound(18), cut))[1].best
    assert "from place 40 of a sequence on the trainer's number is 0" in named.what


def test_a_likely_token_with_a_wrong_number_does_not_hide_its_class():
    """Half of the end tokens are all but certain, so 0 is nearly right there."""

    def with_end(i, x):
        column = x.logprobs.copy()
        column[-1] = -1e-4 if i % 2 else -3.0
        return replace(x, logprobs=column, trainer_logprobs=column * np.float32(1.001))

    rollouts = [with_end(i, x) for i, x in enumerate(sound(18))]
    wrong = with_trainer(rollouts, lambda i, x: zeros_at(x, np.array(x.completion_ids) == END))
    assert "the end token (id 1) the trainer's number is 0" in try_columns(wrong)[1].best.what


def test_a_number_that_is_cut_off_below_is_named():
    rollouts = sound(18)
    floor = np.float32(-4.5)
    cut = [replace(x, logprobs=np.maximum(x.logprobs, floor)) for x in rollouts]
    assert "-4.5, where it is cut off" in try_columns(cut)[0].best.what


TOKENIZER = SimpleNamespace(
    stop_ids={END}, special_ids=(END,), text=lambda ids: "\n", has_chat_template=False
)


def faults(rollouts) -> set[str]:
    return {fault.name for fault in check_log(rollouts, TOKENIZER)}


def short(x: LoggedRollout, n: int, **parts) -> LoggedRollout:
    """The first n tokens of a line."""
    columns = ("completion_ids", "logprobs", "trainer_logprobs", "mask")
    first = {name: known[:n] for name in columns if (known := getattr(x, name)) is not None}
    return replace(x, **first, **parts)


def in_turns(x: LoggedRollout, cap: int, last: int) -> LoggedRollout:
    """A line of turns of at most `cap` drawn tokens, with some of a tool after each but the last."""
    n, mask = 0, []
    while n < len(x.completion_ids) - cap - 3:
        mask += [True] * cap + [False] * (3 + n % 4)
        n = len(mask)
    mask += [True] * last
    ids = (*np.random.default_rng(n).integers(3, 400, len(mask)).tolist(),)
    column = np.full(len(ids), -1.0, np.float32)
    return LoggedRollout(x.prompt_ids, ids, column, column, np.array(mask))


def test_completions_of_caps_of_their_own_are_not_cut_where_the_log_says_length():
    rollouts = sound(18)
    capped = [short(x, 5 + i, truncated=True) if i % 2 else x for i, x in enumerate(rollouts)]
    assert faults(capped) == set()
    assert faults([short(x, 5 + i, truncated=True) for i, x in enumerate(rollouts)]) == set()
    unsaid = [replace(x, truncated=None) for x in capped]
    assert faults(unsaid) == {"completions cut without an end token"}
    assert faults([short(x, 5 + i) for i, x in enumerate(rollouts)]) == {"end token left out"}


def test_turns_of_one_cap_are_not_cut():
    rollouts = sound(18)
    capped = [in_turns(x, 8, 8) if i % 2 else x for i, x in enumerate(rollouts)]
    assert len({len(x.completion_ids) for x in capped[1::2]}) > 3
    assert faults(capped) == set()
    cut = [in_turns(x, 8, 1 + i % 7) if i % 2 else x for i, x in enumerate(rollouts)]
    assert faults(cut) == {"completions cut without an end token"}
    after_a_tool = [x if x.mask is None else short(x, -8) for x in capped]
    assert faults(after_a_tool) == set()


def test_ids_after_an_end_token_and_ends_without_a_number_are_seen_beside_the_tokenizer():
    tokenizer = SimpleNamespace(stop_ids={END}, text=lambda ids: "\n", has_chat_template=False)
    rollouts = sound(9)
    checks = (after_the_end, cut_short, end_without_logprob)
    assert [check.look(rollouts, tokenizer) for check in checks] == [None] * 3
    more = [replace(x, completion_ids=(*x.completion_ids, 7), logprobs=None) for x in rollouts]
    assert "9 completions go on after their end token" in after_the_end.look(more, tokenizer)
    assert [x.completion_ids[p] for x, p in zip(more, drawn_parts(more, tokenizer), strict=True)] == [
        x.completion_ids for x in rollouts
    ]
    cut = [
        replace(x, completion_ids=x.completion_ids[: -3 - i], logprobs=None) for i, x in enumerate(rollouts)
    ]
    assert cut_short.look([*cut[:5], *rollouts[5:]], tokenizer)
    bare = [replace(x, logprobs=np.append(x.logprobs[:-1], np.float32(np.nan))) for x in rollouts]
    assert "in 9 of 9 completions that end" in end_without_logprob.look(bare, tokenizer)
