"""`python -m tracegrad.cli`, as torchrun starts it."""

import sys

from tracegrad.cli import main

sys.exit(main())
