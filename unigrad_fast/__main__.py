"""`python -m unigrad_fast` is the command `unigrad-fast`."""

import sys

from unigrad_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
