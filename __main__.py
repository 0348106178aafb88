"""The entry point of `python -m zerokl`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
