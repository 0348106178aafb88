"""Exactness and rates on a GPU, in parts of at most four minutes each. device.sh runs it.

    exact     the law, exact policy gradient, a KL reference, rollouts of older weights, kill and resume
    kernels   each kernel beside plain torch, beside atomics, beside Liger-Kernel's
    step      forward and backward; the whole exact step and its split, beside TRL with vLLM
    decode    tokens a second: the samplers native, vllm-zerokl and vllm-exact
    decode-vllm    the same of vLLM alone
    vllm      vLLM's kernels and compiled operations beside zerokl's
    vllm-runs    runs in which vLLM samples, and vLLM's own model beside the trainer's
    models    a mixture of experts and adapters: mismatch, and two runs with one fingerprint
    families  the law and runs of every family, two layers at published widths, in three dtypes
    long      steps at published shapes, decoding after long prompts, passes beside torch's sdpa
    ranks     runs by torchrun with one rank, and with two where there are two GPUs, beside one process

The sections of a part run in order of importance, each in a process of its own. A section that would begin
after LAST_START_S is left out, and so is what is left at machine.END_S. Both are named. What needs vLLM, TRL
or Liger-Kernel is left out with a line where it is not installed.
"""

import argparse
import importlib
import sys

import torch
from zerokl.benchmarks.device.processes import KERNEL_VARIABLES, module_command, rows_of
from zerokl.benchmarks.device.report import Report, new_report
from zerokl.benchmarks.machine import Machine

# Part -> the module with its SECTIONS.
PARTS = {
    "exact": "zerokl.benchmarks.device.exact",
    "kernels": "zerokl.benchmarks.device.kernels",
    "step": "zerokl.benchmarks.device.step",
    "decode": "zerokl.benchmarks.device.decode",
    "decode-vllm": "zerokl.benchmarks.device.decode_vllm",
    "vllm": "zerokl.benchmarks.device.beside_vllm",
    "vllm-runs": "zerokl.benchmarks.device.vllm_runs",
    "models": "zerokl.benchmarks.device.models",
    "families": "zerokl.benchmarks.device.families",
    "long": "zerokl.benchmarks.device.long",
    "ranks": "zerokl.benchmarks.device.ranks",
}
LAST_START_S = 200
# Seconds in which a section that is out of time ends its own processes and prints what they have shown.
_TO_REPORT_S = 5


def main() -> int:
    """Run a part. The exit code is 1 where a bit is unequal, else 3 where a section could not run."""
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
    m = Machine(args.device, args.small)
    report = new_report(args.part, m.device, measures=m.on_gpu and not m.small)
    _run_sections(m, args.part, report)
    print(f"\n{report.table()}")
    if report.target is None:
        print(f"toy sizes on {m.device.type}, {m.elapsed_s():.0f} s: the times above measure nothing")
    else:
        print(f"wrote {report.target}; left out for time: {', '.join(report.left_out) or 'nothing'}")
    for what, rows in (("unequal bits", report.unequal), ("no result", report.failed)):
        print(f"{args.part}: {what} in {len(rows)} rows{': ' + '; '.join(map(str, rows)) if rows else ''}")
    return 1 if report.unequal else 3 if report.failed else 0


def _run_sections(m: Machine, part: str, report: Report) -> None:
    """Run the sections until the time is over.

    Each has a process of its own: an error of CUDA stays in the process where it came up.
    """
    for section in importlib.import_module(PARTS[part]).SECTIONS:
        name = section.__name__
        if m.elapsed_s() > LAST_START_S:
            report.left_out.append(name)
            continue
        command = module_command(m, "device.section", PARTS[part], name, end_s=m.left_s() - _TO_REPORT_S)
        # vLLM reads the variables when it is imported.
        for row in rows_of(m, {name: command}, m.left_s(), variables=KERNEL_VARIABLES):
            report.rows.append({"section": name} | row)
            print(f"{m.elapsed_s():6.1f} s  {row['what']}", flush=True)
        report.write(m.elapsed_s())


if __name__ == "__main__":
    sys.exit(main())
