"""The entry point of `python -m zerokl`."""

from .cli import run

if __name__ == "__main__":
    run()
