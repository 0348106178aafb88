"""A store where the agents of torchrun meet: `python -m zerokl.engine.train.parallel.rendezvous 29400`.

torchrun hosts this store in one of its agents by default, and the job ends with this agent. Here it is a
process of its own, on a host that outlives the agents (a login node, a service), so that any of them can be
killed and come back. The agents are given --rdzv-endpoint HOST:29400 --rdzv-conf is_host=0.
"""

import argparse
import signal
import sys
from datetime import timedelta

from torch.distributed import TCPStore


def serve(port: int) -> TCPStore:
    """A store that listens on all addresses of this host, as long as the returned object lives.

    port: 0 chooses a free one, which `.port` names. Raises RuntimeError where the port is taken.
    """
    return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))


def main() -> None:
    """Serve until a signal ends this process. The port is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int, nargs="?", default=29400)
    store = serve(parser.parse_args().port)
    sys.stdout.write(f"rendezvous on port {store.port}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
