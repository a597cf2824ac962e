"""Give a model after an update, and how far its parameters moved."""

import pytest

pytest.importorskip("transformers")
import forked as cases
from tiny import tiny_model
from tracegrad import config
from tracegrad.model.attention import enable_flex_attention
from tracegrad.objective import presets, with_kl
from tracegrad.packing import pack
from tracegrad.trainer.step import optimizer_step

torch = pytest.importorskip("torch")

OBJECTIVE = with_kl(presets.DAPO, 0.1)

WIDE = {"head_dim": 16, "hidden_size": 32}  # flex_attention on CUDA takes heads of 16 and more


@pytest.fixture(scope="module")
def case():
    return cases.forked(more=24, stem=24)


def model_on(device, seed=5):
    """As the learner has it on CUDA."""
    model = tiny_model(seed, **WIDE).to(device)
    enable_flex_attention(model)
    return model


def step_of(case, budget=512, share=False):
    told = {"share_prefixes": share, "requirements": OBJECTIVE.requirements, "pad_to_multiple_of": 128}
    [step] = pack(case.sequences, case.advantages, tokens_per_row=budget, **told)
    return case.ready(step)


def moved(case, device, *, precision=torch.float32, model=None, **cut):
    """What one step of SGD at a rate of 1 adds to every parameter, which is minus the gradient; and what it saw."""
    model = model or model_on(device)
    before = [p.detach().clone() for p in model.parameters()]
    step = step_of(case, **cut)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = optimizer_step(model, step, OBJECTIVE, optimizer, grad_clip=1e9, precision=precision)
    change = [(a.detach() - b).flatten().double().cpu() for a, b in zip(model.parameters(), before, strict=True)]
    return torch.cat(change), seen, step


def told(**changes):
    base = {"optimizer.lr": 3e-3, "train.epochs": 1, "train.groups_per_step": 4, "pack.tokens_per_row": 128}
    return config.load(overrides=[*base.items(), *((k.replace("__", "."), v) for k, v in changes.items())])
