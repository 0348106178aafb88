"""Exactness and rates on a GPU, in parts of at most four minutes each. device.sh runs it.

    exact     the law, exact policy gradient, a KL reference, rollouts of older weights, kill and resume
    kernels   each kernel beside plain torch, beside atomics, beside Liger-Kernel's
    step      forward and backward; the whole exact step and its split, beside TRL with vLLM
    decode    tokens a second: the samplers native, vllm-zerokl and vllm-exact, and vLLM as it comes
    vllm      vLLM's kernels and compiled operations, and runs in which vLLM samples, beside zerokl's

The sections of a part run in order of importance. A section that would begin after LAST_START_S is left out,
and so is what is left at machine.END_S. Both are named. What needs vLLM, TRL or Liger-Kernel is left out with
a line where it is not installed.
"""

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
from zerokl.benchmarks.device.processes import KERNEL_VARIABLES
from zerokl.benchmarks.device.report import Report, new_report
from zerokl.benchmarks.machine import END_S, Machine, Row

Section = Callable[[Machine], Iterator[Row]]
# Part -> the module with its SECTIONS.
PARTS = {
    "exact": "exact",
    "kernels": "kernels",
    "step": "step",
    "decode": "decode",
    "vllm": "beside_vllm",
}
LAST_START_S = 200


class OutOfTime(BaseException):
    """The table is due. It is no Exception, so that no `except` of a section catches it."""


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def main() -> int:
    """Run a part; the exit code is 1 where a bit is unequal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes; checks this code, measures nothing")
    args = parser.parse_args()
    if args.device == "cpu" and not args.small:
        parser.error("--device cpu needs --small: the sizes of a GPU take hours on a CPU")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("device: torch finds no CUDA GPU here; --device cpu --small checks this code", file=sys.stderr)
        return 2
    os.environ.update(KERNEL_VARIABLES)  # vLLM reads them when it is imported
    m = Machine(args.device, args.small)
    report = new_report(args.part, m.device, measures=m.on_gpu and not m.small)
    _run_sections(m, importlib.import_module(f"{__package__}.{PARTS[args.part]}").SECTIONS, report)
    print(f"\n{report.table()}")
    if report.target is None:
        print(f"toy sizes on {m.device.type}, {m.elapsed_s():.0f} s: the times above measure nothing")
    else:
        print(f"wrote {report.target}; left out for time: {', '.join(report.left_out) or 'nothing'}")
    names = "; ".join(map(str, report.broken))
    print(f"{args.part}: unequal bits in {len(report.broken)} rows{': ' + names if names else ''}")
    return 1 if report.broken else 0


def _run_sections(m: Machine, sections: tuple[Section, ...], report: Report) -> None:
    """Run the sections until the time is over."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(END_S)
    for section in sections:
        if m.elapsed_s() > LAST_START_S:
            report.left_out.append(section.__name__)
            continue
        try:
            for result in section(m):
                report.rows.append({"section": section.__name__} | result)
                print(f"{m.elapsed_s():6.1f} s  {result['what']}", flush=True)
        except OutOfTime:
            report.left_out.append(f"the rest of {section.__name__}")
        except Exception as error:  # it counts as unequal, and the figures of the other sections are kept
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            what = f"{section.__name__} failed: {reason}"
            report.rows.append({"section": section.__name__, "what": what, "unequal": 1})
        report.write(m.elapsed_s())
    signal.alarm(0)
    report.write(m.elapsed_s())


if __name__ == "__main__":
    sys.exit(main())
