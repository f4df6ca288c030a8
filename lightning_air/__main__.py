"""`python -m lightning_air` is `lightning-air`."""

import sys

from lightning_air.cli import main

if __name__ == "__main__":
    sys.exit(main())
