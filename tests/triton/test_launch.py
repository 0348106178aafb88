"""A launch runs the binary that Triton would have found, also one that was compiled ahead of time."""

from tests.triton.compiling import TRITONS, reports


def test_a_kept_binary_is_the_one_that_triton_finds():
    by_triton = reports("handles.py", ("sm_90",))
    assert list(by_triton) == TRITONS
    for report in by_triton.values():
        assert report["unequal"] == 0
        assert 100 < report["kinds"] < 300  # of 1,000 launches, so most run a kept binary
        assert report["same binaries"]
        assert report["launches"] > report["kept"] > 20
        assert report["other keys"] == 0, "what is compiled ahead is what a launch looks for"
        assert report["control: eight warps"] == 1
        assert report["control: alignment left out"] > 0
        assert report["control: numbers left out"] > 0


def test_a_step_finds_what_a_run_compiles_ahead_and_compiles_what_is_left_out():
    (report,) = reports("found_ahead.py", ("sm_90",), TRITONS[-1:]).values()
    assert report["found"] > 20
    assert report["missing"] == [report["left out"]]
