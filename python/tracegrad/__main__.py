"""`python -m tracegrad`: the command line, where its own name is not on the path."""

import sys

from tracegrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
