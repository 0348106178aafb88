"""Set before anything loads torch; and which tests `make test` and `make test-rest` run.

`make test` is pytest --quick. It leaves tests out in two ways:

- the marker `full`, on a test or on one of its parameters;
- of every other test, few cases: of a matrix the first two and the last of one diagonal, of a list the first
  and the last, and of a property a fifth of its examples.

`make test-rest` is pytest --rest: all that was left out, and every property with another fifth of its
examples. `make test-full` has all of them. In CI the environments of their own, which no test-rest follows,
run with --diagonal: --quick, but every case of a list and of the diagonal.
"""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator

import pytest
from hypothesis import seed, settings

# A barrier of several threads on a busy core spins until the others are scheduled; passive ones sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run, and a busy machine fails no test. helpers.property_settings takes the number
# of examples as a share of a test's own, in percent.
settings.register_profile("zerokl", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("quick", settings.get_profile("zerokl"), max_examples=20)
settings.register_profile("rest", settings.get_profile("quick"))


# The profile of each option that chooses tests.
SHARES = {"quick": "quick", "diagonal": "quick", "rest": "rest"}
# Cases of a test with one axis in `make test`. A matrix has one more: its dtypes are the first ones.
LISTED = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "no test marked full, and few cases of every other one"
    parser.addoption("--quick", action="store_true", help=help)
    parser.addoption(
        "--diagonal", action="store_true", help="--quick, but every case of a list and of the diagonal"
    )
    parser.addoption("--rest", action="store_true", help="what --quick leaves out, and every property again")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell's `make test &` ignores Ctrl-C, and so would the processes to which tests send it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = next((name for name in SHARES if config.getoption(f"--{name}")), None)
    settings.load_profile(SHARES[chosen] if chosen else "zerokl")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected and imported is no garbage. To look for some took 6 of a collection's 16 CPU s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, deselect what `make test` leaves out. --rest selects that, and every property."""
    if not any(config.getoption(f"--{name}") for name in SHARES):
        return
    listed = sys.maxsize if config.getoption("--diagonal") else LISTED
    by_function: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.path, getattr(item, "originalname", item.name)].append(item)
    kept = {id(item) for same in by_function.values() for item in few(same, listed)}
    quick = [item for item in items if id(item) in kept]
    if config.getoption("--rest"):
        done = {id(item) for item in quick if not _is_property(item)}
        chosen = [item for item in items if id(item) not in done]
        for item in filter(_is_property, chosen):
            seed("rest")(item.obj)  # other examples than those of --quick
    else:
        chosen = quick
    run = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in run])
    items[:] = chosen


def _is_property(item: pytest.Item) -> bool:
    return getattr(item.obj, "is_hypothesis_test", False)


def few(items: list[pytest.Item], listed: int) -> list[pytest.Item]:
    """Cases of one test, none marked full: `listed` of a list, from first to last; one more of a diagonal."""
    cases = _places(items)
    is_matrix = len(cases[0]) > 1
    chosen = _diagonal(items, cases) if is_matrix else items
    quick = [item for item in chosen if not item.get_closest_marker("full")]
    if len(quick) <= listed + is_matrix:
        return quick
    if is_matrix:
        return quick[:listed] + quick[-1:]
    return [quick[i * (len(quick) - 1) // (listed - 1)] for i in range(listed)]


def _diagonal(items: list[pytest.Item], cases: list[dict[tuple[str, ...], int]]) -> list[pytest.Item]:
    """As few cases as hold every value of every axis."""
    unseen = {(axis, place) for case in cases for axis, place in case.items()}
    kept = []
    for item, case in sorted(zip(items, cases, strict=True), key=lambda pair: _off_diagonal(pair[1])):
        if not unseen.isdisjoint(case.items()):
            unseen -= set(case.items())
            kept.append(item)
    return kept


def _places(items: list[pytest.Item]) -> list[dict[tuple[str, ...], int]]:
    """For each case, its place on every axis. Names that one `parametrize` gives together are one axis.

    A value is known by its identity: all cases of a matrix share the objects that were listed. pytest's own
    callspec.indices number the cases (pytest 9.2), not the values.
    """
    numbers: dict[tuple[str, ...], dict[tuple[int, ...], int]] = defaultdict(dict)
    places = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        place = {}
        for axis in _axes(item, params):
            values = tuple(id(params[name]) for name in axis)
            place[axis] = numbers[axis].setdefault(values, len(numbers[axis]))
        places.append(place)
    return places


def _axes(item: pytest.Item, params: dict[str, object]) -> list[tuple[str, ...]]:
    together = []
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0]
        together.append(
            tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names)
        )
    alone = params.keys() - {name for axis in together for name in axis}
    return together + [(name,) for name in sorted(alone)]


def _off_diagonal(case: dict[tuple[str, ...], int]) -> tuple[int, list[int]]:
    """How far a case lies from the diagonal, whose indices are equal."""
    values = list(case.values())
    return max(values) - min(values), values
