"""Every argument of the installed vLLM's engine was looked at: it is allowed, set by zerokl, or refused."""

from dataclasses import fields
from pathlib import Path

import pytest
from zerokl.engine.rollout.vllm.arguments import ALLOWED, REFUSED, SET_BY_ZEROKL, check_engine_arguments

pytestmark = pytest.mark.vllm
# Every argument that somebody has looked at.
REVIEWED = Path(__file__).with_name("engine_arguments.txt").read_text().split()


def not_reviewed(arguments: set[str]) -> set[str]:
    """Arguments that nobody has looked at."""
    return arguments - set(REVIEWED)


def engine_arguments() -> set[str]:
    """The arguments of the installed vLLM's engine."""
    from vllm.engine.arg_utils import EngineArgs

    return {field.name for field in fields(EngineArgs)}


def test_every_argument_of_vllm_was_looked_at():
    remedy = "add it to engine_arguments.txt, and to ALLOWED where it keeps the law"
    assert not_reviewed(engine_arguments()) == set(), remedy


def test_control_a_new_argument_is_noticed():
    assert not_reviewed(engine_arguments() | {"new_in_0_99"}) == {"new_in_0_99"}


def test_what_is_allowed_refused_or_set_is_an_argument_of_vllm():
    assert {*ALLOWED, *REFUSED, *SET_BY_ZEROKL} <= engine_arguments()
    assert len({*ALLOWED, *REFUSED, *SET_BY_ZEROKL}) == len(ALLOWED) + len(REFUSED) + len(SET_BY_ZEROKL)


def test_tensor_parallel_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(2\) is refused: it cuts the sums"):
        check_engine_arguments({"tensor_parallel_size": 2})
