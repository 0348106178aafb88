"""What other prompts of a resumed run tell of its data loader: where B's stand in A, and in which order."""

from collections.abc import Iterator
from typing import NamedTuple

from .side import Side, rollouts_of

# Lost prompts of which the places are named.
_NAMED = 3


class Piece(NamedTuple):
    """Steps of B from `step` on, whose prompts are those of as many steps of A from `start` on."""

    step: int
    start: int
    length: int


def loader_words(a: Side, b: Side, first: int) -> Iterator[str]:
    """What the prompts from step `first` on tell, the first that has others."""
    mine = {step: a.steps[step].prompts for step in a.steps}
    others = {step: s.prompts for step, s in b.steps.items() if step >= first}
    if not all(others.values()) or not a.numbered:
        yield "So the two were given other prompts, or their tokenizers differ: no engine computed yet."
    elif others.get(first) == mine.get(first):
        yield "So the step has the same prompts in another order: they were shuffled or handed out otherwise."
    elif (start := moved(mine, others, first)) is not None:
        yield _moved_words(mine, Piece(first, start, max(others) - first + 1))
    elif pieces := _pieces(mine, others):
        yield from (_moved_words(mine, piece) for piece in pieces)
        if sum(piece.start == min(mine) for piece in pieces) > 1:
            yield "So it restarted more than once: a resume does not restore it."
    elif words := _lost_words(a, b, first):
        yield words
    else:
        yield _other_order(mine, others, first)


def _other_order(mine: dict[int, list], others: dict[int, list], first: int) -> str:
    known = {p for prompts in mine.values() for p in prompts}
    asked = [p for prompts in others.values() for p in prompts]
    share = sum(p in known for p in asked)
    if not share:
        return (
            "So the two were given other prompts: none of B's stands anywhere in A. Other data, another "
            "template or tokenizer, or a part of the data that A had not reached."
        )
    return (
        f"{share} of {len(asked)} prompts of B from step {first} on stand in A, at other steps and in "
        "another order: the data was shuffled with another seed, or its order was not restored."
    )


def moved(mine: dict[int, list], others: dict[int, list], step: int) -> int | None:
    """The step of A at which B's values from `step` on stand, all of them; None where there is none."""

    def fits(start: int) -> bool:
        pairs = [(mine.get(start + s - step), values) for s, values in others.items()]
        return pairs[0][0] is not None and all(p is None or p == q for p, q in pairs)

    return next((start for start in sorted(mine) if start != step and fits(start)), None)


def _pieces(mine: dict[int, list], others: dict[int, list]) -> list[Piece]:
    """B's steps as a few pieces of A, each as long as can be; none where they are no such pieces.

    Any order can be cut into single steps, so a piece must have two on average.
    """
    steps, pieces, i = sorted(others), [], 0

    def length(start: int) -> int:
        n = 0
        while i + n < len(steps):
            values = mine.get(start + steps[i + n] - steps[i])
            beyond = n and start + steps[i + n] - steps[i] > max(mine)
            if not beyond and values != others[steps[i + n]]:
                break
            n += 1
        return n

    while i < len(steps):
        start = max(sorted(mine), key=length)
        if not (n := length(start)):
            return []
        pieces.append(Piece(steps[i], start, n))
        i += n
    return pieces if 2 * len(pieces) <= len(steps) else []


def _moved_words(mine: dict[int, list], piece: Piece) -> str:
    step, start, length = piece
    until = min(max(mine), start + length - 1)
    same = f"steps {start} to {until}" if until > start else f"step {start}"
    here = f"B's prompts from step {step} on are those of A's {same}"
    if start == min(mine):
        return f"{here}: the data loader was not restored, and restarted at its beginning."
    if start == step:
        return f"{here}: the same ones again."
    way = "skipped" if start > step else "repeated"
    count = abs(start - step)
    return f"{here}: the data loader {way} {count} {'step' if count == 1 else 'steps'}."


def _lost_words(a: Side, b: Side, first: int) -> str:
    """Prompts of A that B lacks, where the others keep A's order; empty where they do not.

    In a long log a few prompts stand in any order. So at most half as many may be lost as are kept.
    """
    prompts_a = [(s, j, d.prompt) for s in a.steps if s >= first for j, d in enumerate(a.steps[s].rollouts)]
    kept = _in_order([prompt for _, _, prompt in prompts_a], b, first)
    lost = sorted(set(range(max(kept, default=0))) - set(kept))
    if not lost or 2 * len(lost) > len(kept):
        return ""
    names: dict[int, list[str]] = {}
    for step, j, _ in (prompts_a[place] for place in lost[:_NAMED]):
        names.setdefault(step, []).append(rollouts_of(a, step)[j][0])
    prompts, steps = len({prompts_a[place][2] for place in lost}), [prompts_a[place][0] for place in lost]
    places = ", ".join(place for at_step in names.values() for place in at_step)
    return (
        f"{prompts} {'prompt' if prompts == 1 else 'prompts'} of A's steps {steps[0]} to {steps[-1]} "
        f"never come in B ({len(lost)} completions; the first are {places}), and what is left keeps A's "
        "order: they were lost, with a buffer or in a filter, and the others moved up."
    )


def _in_order(prompts_a: list[bytes | None], b: Side, first: int) -> list[int]:
    """The places of A's prompts at which those of B stand, ascending from step to step; none without order.

    At its end B may have prompts that A has not reached.
    """
    places: dict[bytes | None, list[int]] = {}
    for place, prompt in enumerate(prompts_a):
        places.setdefault(prompt, []).append(place)
    kept: list[int] = []
    ended = False
    for step in (s for s in b.steps if s >= first):
        prompts = [d.prompt for d in b.steps[step].rollouts]
        reached = [p for p in prompts if p in places]
        if ended and reached:
            return []
        ended = len(reached) < len(prompts)
        after, now = kept[-1] if kept else -1, set()
        for prompt in reached:  # within a step they may stand in any order
            place = next((x for x in places[prompt] if x > after and x not in now), None)
            if place is None:
                return []
            now.add(place)
        kept += sorted(now)
    return kept
