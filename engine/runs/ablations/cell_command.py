"""What a process of an ablation runs: a `zerokl` command. The imports were done before it began.

No import asks for a GPU, or computes with several threads (processes/process.py says why).
"""

import json
import sys
from importlib import import_module

from ...processes.channel import Channel
from ...processes.keeper import accept_interrupts

# The module of the command line, whose floor is above this one.
_COMMAND_LINE = "zerokl.cli"


def import_what_every_run_imports() -> None:
    """Import it, once for all processes of an ablation."""
    from transformers import AutoTokenizer  # noqa: F401

    from .. import run  # noqa: F401

    import_module(_COMMAND_LINE)


def run_command(channel: Channel) -> None:
    """Run `zerokl` with the words that the channel gives, after the number of torch's threads."""
    import torch

    accept_interrupts()
    threads, *words = json.loads(channel.receive())
    torch.set_num_threads(threads)
    sys.argv = ["zerokl", *words]
    import_module(_COMMAND_LINE).run()
