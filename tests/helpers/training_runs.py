"""Train a tiny model, stop it by a signal, and compare two runs."""

import signal

import pytest

pytest.importorskip("transformers")
from tiny import sampled, tiny_model
from tracegrad import config
from tracegrad.objective import presets
from tracegrad.trainer import train

torch = pytest.importorskip("torch")

TIMES = {"seconds", "tokens_per_s"}


@pytest.fixture(scope="module")
def traces():
    return sampled(tiny_model())


def told(**changes):
    """A config of dotted names with double underscores for dots."""
    base = {"optimizer.lr": 3e-3, "train.epochs": 2, "train.groups_per_step": 6, "pack.tokens_per_row": 64}
    return config.load(overrides=[*base.items(), *((k.replace("__", "."), v) for k, v in changes.items())])


def run(traces, out, model=None, *, objective=presets.DAPO, resume=False, sinks=(), **changes):
    model = model or tiny_model()
    done = train(
        traces,
        model,
        objective=objective,
        out=out,
        config=told(**changes),
        resume=resume,
        sinks=sinks,
        log=lambda _: None,
    )
    return done, {name: value.clone() for name, value in model.state_dict().items()}


class SignalAfter:
    """A sink that presses Ctrl-C when a step's row arrives."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def log(self, row):
        if row["step"] == self.step:
            signal.raise_signal(self.number)

    def close(self):
        pass


def assert_same(one, other):
    for name in one:
        assert torch.equal(one[name], other[name]), name


def without_times(rows):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
