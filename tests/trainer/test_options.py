"""Choices of a run that change what is computed or by whom: references, optimizers, memory, adapters, compilation."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import sampled, tiny_model
from tracegrad.errors import ArgumentError
from tracegrad.objective import presets, with_kl
from tracegrad.trainer import train
from tracegrad.trainer.lora import with_adapters
from training_runs import assert_same, told

KL = with_kl(presets.DAPO, 0.05)


@pytest.fixture(scope="module")
def traces():
    return sampled(tiny_model(), groups=12)


def run(traces, out, model=None, *, objective=presets.DAPO, optimizer=None, reference=None, **changes):
    model = model or tiny_model()
    given = {"optimizer": optimizer, "reference": reference, "sinks": (), "log": lambda _: None}
    done = train(traces, model, objective=objective, out=out, config=told(**changes), **given)
    return done, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("memory", ["balanced", "low"])
def test_less_memory_is_the_same_run(traces, tmp_path, memory):
    _, plain = run(traces, tmp_path / "a", train__epochs=1)
    _, found = run(traces, tmp_path / "b", train__epochs=1, train__memory_mode=memory)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_an_optimizer_of_ones_own_takes_the_steps(traces, tmp_path):
    model = tiny_model()
    own = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim <= 1]},
        ],
        lr=3e-3,
        weight_decay=0.0,
    )
    plain = {"train__epochs": 1, "optimizer__lr": 1e-6}
    _, found = run(traces, tmp_path / "own", model, optimizer=own, **plain)
    _, wanted = run(traces, tmp_path / "ours", **{**plain, "optimizer__lr": 3e-3})
    assert_same(found, wanted)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-061.*optimizer\.beta1"):
        run(traces, tmp_path / "two", optimizer=torch.optim.SGD, optimizer__lr=1e-6, optimizer__beta1=0.8)
    with pytest.raises(ArgumentError, match="TG-TRAIN-056"):
        run(traces, tmp_path / "other", optimizer=torch.optim.SGD(tiny_model().parameters()), optimizer__lr=1e-6)


def test_a_renewed_reference_follows_the_policy_and_another_model_does_not(traces, tmp_path):
    still, _ = run(traces, tmp_path / "a", objective=KL)
    renewed, _ = run(traces, tmp_path / "b", objective=KL, train__ref_sync_steps=1)
    other, _ = run(traces, tmp_path / "c", objective=KL, reference=tiny_model(7))
    assert still.rows[-1]["kl_ref"] > 1e-5
    assert all(abs(row["kl_ref"]) < 1e-6 for row in renewed.rows[1:])  # each step's reference is its own policy
    assert other.rows[1]["kl_ref"] > still.rows[-1]["kl_ref"]


def test_adapters_alone_are_trained_and_the_model_without_them_is_the_reference(traces, tmp_path):
    pytest.importorskip("peft")
    base = tiny_model()
    adapted = with_adapters(base, 2)
    with torch.no_grad():  # a policy that has left its reference already
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    done, _ = run(traces, tmp_path, adapted, objective=replace(KL), train__epochs=1)
    moved = {name for name, p in adapted.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora" in name}
    assert done.rows[1]["kl_ref"] > 1e-5
    assert (done.checkpoint / "adapter_model.safetensors").is_file()
