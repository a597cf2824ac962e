"""Run the command line as `python -m tracegrad`, for shells in which `tracegrad` is not on the PATH."""

import sys

from tracegrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
