"""Losses of one's own, from outside the package: through the learner and its fused head, and as numbers."""

from dataclasses import dataclass

import tracegrad as tg
from tiny import sampled, tiny_model
from tracegrad.objective import Objective, Ratio, Surrogate


@dataclass(frozen=True)
class Squared(Surrogate, locality="term"):
    """(log r - tau A)^2: each log-ratio is pulled to its advantage."""

    tau: float = 0.5

    def loss(self, view):
        return (view.log_ratio - self.tau * view.advantages).square()


def test_it_trains_as_a_class_and_as_a_function(tmp_path):
    for name, loss in {"class": Squared(), "function": lambda view: Squared().loss(view)}.items():
        objective, model = Objective(loss, Ratio("theta", "rollout")), tiny_model()
        done = tg.trainer.train(sampled(model), model, objective=objective, out=tmp_path / name)
        assert done.rows[-1]["loss"] < done.rows[1]["loss"]
