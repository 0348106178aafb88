"""The descriptors that tell of a child's end: their owner reads them, and its forks let go of them."""

import subprocess
import sys

import pytest

_CODE = """
import os, select, signal
from zerokl.engine.processes.process import end_wakes, ended_children, wake_at_the_end_of_a_child

{planted}
wake, writer = wake_at_the_end_of_a_child()
child = os.fork()
if child == 0:
    end_wakes(wake, writer)
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    for fd in (wake, writer):
        try:
            os.fstat(fd)
        except OSError:
            continue
        os._exit(1)
    os._exit(7)
assert select.select([wake], [], [], 20)[0]
assert list(ended_children()) == [(child, 7)]
"""
# What asyncio does from Python 3.12 on, once it is imported.
_AS_ASYNCIO_DOES = "os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))"


@pytest.mark.parametrize("planted", ["", "import asyncio", _AS_ASYNCIO_DOES])
def test_a_fork_lets_go_of_both_descriptors(planted):
    subprocess.run([sys.executable, "-c", _CODE.format(planted=planted)], check=True)
