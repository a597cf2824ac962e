"""Run a script under several ranks and read what each wrote."""

import os
from pathlib import Path

import pytest

import tracegrad

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def told():
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
