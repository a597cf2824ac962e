"""`Trainer`, one update at a time: `train` is one of its callers, and a user's loop is another."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import training_runs
from manual_steps import (
    steps_of,
    traces,  # noqa: F401
)
from tiny import VOCABULARY, tiny_model
from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.objective import AdaptiveEntropy, EntropyBonus, override_all, presets, with_kl
from tracegrad.packing import pack
from tracegrad.trainer import Trainer, train
from tracegrad.trainer.lora import adapters_off, load_model, with_adapters
from truncated import restricted

OF_THE_LOOP = {"seconds", "tokens_per_s", "epoch"}
told = partial(training_runs.told, data__holdout=0)


def parameters(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def without(row, names=frozenset()):
    return {k: v for k, v in row.items() if k not in OF_THE_LOOP | names and not k.startswith("ope")}


def known(row):
    """Return a row without NaN, because `nan != nan`."""
    return {k: v for k, v in row.items() if v is not None and v == v}


OWN = {
    "old": (presets.DAPO, {"train__updates_per_old_logprobs": 1}),
    "direct, with a reference": (with_kl(presets.DAPO_DIRECT, 0.05), {}),
    "adapters": (with_kl(presets.DAPO_DIRECT, 0.05), {"train__lora_rank": 2}),
    "proximal": (presets.A3PO, {"train__updates_per_old_logprobs": 2}),
    "idle left out": (presets.DR_GRPO, {"train__updates_per_old_logprobs": 1, "pack__skip_zero_weight": True}),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.first_cases(1)
def test_a_custom_loop_matches_train_bit_for_bit(traces, tmp_path, name):
    objective, changes = OWN[name]
    proximal = objective.requirements.proximal
    if (
        proximal
    ):  # a term without a version has the newest version of the file, or the version of the trainer if it is given
        traces = replace(traces, version=np.where(traces.trainable, np.maximum(traces.version, 3), -1).astype(np.int32))
    theirs, ours = tiny_model(), tiny_model()
    given = {"config": told(**changes), "sinks": (), "log": lambda _: None}
    done = train(traces, theirs, objective=objective, out=tmp_path / "train", **given)
    run = Trainer(ours, objective, told(**changes), out=tmp_path / "own")
    rows, reference = [], np.zeros(traces.tokens, np.float32)
    for epoch in range(2):
        for step in steps_of(traces, objective, epoch, skip_zero_advantage=run.config.pack.skip_zero_weight):
            if objective.requirements.ref and epoch == 0:  # measured once: rounding may differ next to other traces
                step = run.add_logprobs(step)
                reference[step.origin] = step.ref_logprobs
            elif objective.requirements.ref:
                step = step.with_logprobs(ref=reference[step.origin])
            version = 4 + run.steps_done if proximal else 4  # the newest recorded version is 4
            run.step(step, version, rewards=traces.reward, endings=traces.ending)
            rows.append(run.metrics())
    assert run.steps_done == done.total == 8
    assert_same(parameters(theirs), parameters(ours))
    own = {"staleness_mean", "staleness_max"}
    for one, other in zip(done.rows[1:], rows, strict=True):
        assert own < other.keys()
        assert own.isdisjoint(one)  # a file does not contain the version that it trains
        if not proximal:
            assert known(without(one)) == known(without(other, own))


def test_several_updates_per_old_logprobs_match_train(traces, tmp_path):
    theirs, ours = tiny_model(), tiny_model()
    given = {"objective": presets.GRPO, "config": told(), "sinks": (), "log": lambda _: None}
    train(traces, theirs, out=tmp_path / "train", **given)
    run = Trainer(ours, presets.GRPO, told(), out=tmp_path / "own")
    for epoch in range(2):
        for step in [run.add_logprobs(step) for step in steps_of(traces, presets.GRPO, epoch)]:
            run.step(step)
    assert_same(parameters(theirs), parameters(ours))


# --- save and restore ---

ADAPTS = replace(
    with_kl(presets.A3PO, 0.05),
    entropy=EntropyBonus(0.01, masked=False, adapt=AdaptiveEntropy(target=9.0, delta=0.01, high=1.0)),
)


def driven(run, traces, numbers):
    """Take the steps with these numbers, two epochs in total, and return the rows."""
    packed, rows = [*steps_of(traces, run.objective, 0), *steps_of(traces, run.objective, 1)], []
    for number in numbers:
        run.step(packed[number], version=7 + number)
        rows.append(without(run.metrics()))
    return rows


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.first_cases(1)
def test_a_restored_run_matches_bit_for_bit(traces, tmp_path, adapters):
    told_so = told(train__lora_rank=adapters, train__updates_per_old_logprobs=3, schedule__warmup_steps=6)
    whole = Trainer(tiny_model(), ADAPTS, told_so, out=tmp_path / "whole")
    rows = driven(whole, traces, range(8))
    cut = Trainer(tiny_model(), ADAPTS, told_so, out=tmp_path / "cut")
    driven(cut, traces, range(4))
    saved = cut.save()
    torch.manual_seed(5)
    again = Trainer(tiny_model(), ADAPTS, told_so, out=tmp_path / "cut")
    assert again.restore().step == 4
    assert (again.steps_done, again.version) == (4, 10)
    assert again.watch.seconds["train"] == cut.watch.seconds["train"] > 0
    assert driven(again, traces, range(4, 8)) == rows[4:]
    assert rows[4]["entropy_coef"] == pytest.approx(0.05)  # 0.01, and 0.01 more after each of four steps
    assert_same(parameters(whole.model), parameters(again.model))
    if not adapters:
        assert_same(parameters(load_model(saved)), cut.weights())
    assert (tmp_path / "cut" / "checkpoint").resolve() == saved.resolve()
    assert (tmp_path / "cut" / "config.toml").read_text() == (tmp_path / "whole" / "config.toml").read_text()


def test_restore_without_a_checkpoint_returns_none_and_a_checkpoint_is_not_overwritten(traces, tmp_path):
    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)
    assert run.restore() is None
    [step, *_] = steps_of(traces, run.objective, 0)
    run.step(step)
    run.save()
    other = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)
    for act in (lambda: other.step(step), other.save):
        with pytest.raises(ArgumentError, match=r"TG-TRAIN-083.*step-00000001"):
            act()
    other.restore()
    other.step(step)


def test_a_checkpoint_is_restored_with_equal_optimizer_options(traces, tmp_path):
    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)
    run.save()
    Trainer(
        tiny_model(), presets.DAPO_DIRECT, told(train__groups_per_step=3, data__holdout=0.5), out=tmp_path
    ).restore()
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-066.*optimizer\.lr.*0\.003.*0\.1"):
        Trainer(tiny_model(), presets.DAPO_DIRECT, told(optimizer__lr=0.1), out=tmp_path).restore()
    with pytest.raises(ArgumentError, match="TG-TRAIN-067"):  # it had no sequences
        train(traces, tiny_model(), objective=presets.DAPO_DIRECT, out=tmp_path, config=told(), resume=True, sinks=())
    state = next((tmp_path / "checkpoint" / "resume" / "state").glob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    with pytest.raises(ReadError, match="TG-TRAIN-015"):
        Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path).restore()


# --- staleness ---


def test_staleness_counts_from_the_given_version(traces, tmp_path):
    """Two traces with four terms of the versions 3, 3, unknown and 5. The trainer has version 6."""
    from tracegrad.alignment.sequences import Sequences

    nan = float("nan")
    ids, trainable = [5, 6, 7, 8, 9, 3], [0, 1, 1, 1, 0, 1]
    two = Sequences.from_arrays(ids, [0, 4, 6], [nan, -1, -2, -1, nan, -1], trainable, group=[0, 0])
    two = replace(two, version=np.array([-1, 3, 3, -1, -1, 5], np.int32))
    [step] = pack(two, [1.0, -1.0], tokens_per_row=16)
    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)
    run.step(step, version=6)
    row = run.metrics()
    assert (row["staleness_mean"], row["staleness_max"]) == (pytest.approx((3 + 3 + 1) / 3), 3)
    assert {k: row[k] for k in row if k.startswith("tokens_with_rollout_logprob/staleness")} == {
        "tokens_with_rollout_logprob/staleness_1": 1,
        "tokens_with_rollout_logprob/staleness_3": 2,
        "tokens_with_rollout_logprob/staleness_unknown": 1,
    }
    run.step(step)
    assert not [name for name in run.metrics() if "/staleness" in name and "unknown" not in name]
    with pytest.raises(ArgumentError, match=r"TG-PACK-003.*4.*5"):
        run.step(step, version=4)
    assert run.steps_done == 2


def test_a_stale_batch_does_not_have_staleness_0(traces, tmp_path):
    stale = replace(traces, version=np.where(traces.trainable, 3, -1).astype(np.int32))
    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)
    run.step(steps_of(stale, run.objective, 0)[0], version=5)
    assert (run.metrics()["staleness_mean"], run.metrics()["staleness_max"]) == (2, 2)


def test_the_proximal_policy_is_between_the_versions(tmp_path, traces, monkeypatch):
    """`old` would be measured every third step. alpha = (proximal - recorded) / (current - recorded)."""
    import tracegrad.trainer.trainer as module

    seen, whole = [], module.optimizer_step
    monkeypatch.setattr(
        module, "optimizer_step", lambda t, step, *a, **k: (seen.append(step.alpha), whole(t, step, *a, **k))[1]
    )
    # All traces except the first have version 2. The first has no version, so the given one is used.
    version = np.where(traces.trainable & (np.arange(traces.tokens) >= traces.cu_seqlens[1]), 2, -1)
    some = replace(traces, version=version.astype(np.int32))
    step = next(step for step in steps_of(some, presets.A3PO, 0) if (step.version < 0).any())
    # The proximal of steps 1 to 3 is version 4, and of step 4 its own: 2/2, 2/3, 2/4, 1 for terms of version 2.
    # For the others, 1 if they have the version of the policy, and (4 - 4) / (5 - 4) if they have that of the proximal.
    cases = {"a version a step": ((4, 5, 6, 7), [1, 1, 1, 1]), "a version a refresh": ((4, 4, 4, 5), [1, 0, 0, 1])}
    for name, (versions, fresh) in cases.items():
        run, seen[:] = (
            Trainer(tiny_model(), presets.A3PO, told(train__updates_per_old_logprobs=3), out=tmp_path / name),
            [],
        )
        for version in versions:
            run.step(step, version=version)
        here = [sorted({round(float(a), 6) for a in each[step.version == 2]}) for each in seen]
        assert here == [[1.0], [0.666667], [0.5], [1.0]]
        assert [set(each[step.version < 0].tolist()) for each in seen] == [{alpha} for alpha in fresh]
    with pytest.raises(ArgumentError, match="TG-TRAIN-084"):
        run.step(step)


# --- weights ---


def test_weights_are_the_state_dict(traces, tmp_path):
    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)
    run.step(steps_of(traces, run.objective, 0)[0])
    assert_same(parameters(run.model), run.weights())
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= run.weights().keys()  # a tied head by both its names
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-029.*Qwen3ForCausalLM"):
        run.weights(adapters="alone")
    with pytest.raises(ArgumentError, match="TG-TRAIN-028"):
        run.weights(adapters="both")


def adapted(**more):
    import peft

    kind = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more}
    return peft.get_peft_model(tiny_model(), peft.LoraConfig(**kind))


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}], ids=str)
def test_merged_weights_match_peft(traces, tmp_path, more):
    run = Trainer(adapted(**more), presets.DAPO_DIRECT, told(optimizer__lr=0.1), out=tmp_path)
    for step in steps_of(traces, run.objective, 0)[:2]:
        run.step(step)
    before = parameters(run.model)
    found = run.weights()
    assert_same(before, parameters(run.model))  # and the run can continue
    bare = tiny_model()
    assert found.keys() == bare.state_dict().keys()
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], bare.model.layers[0].mlp.up_proj.weight)
    bare.load_state_dict(found)
    [step, *_] = steps_of(traces, run.objective, 0)
    with_them = run.compute_logprobs(step)
    other = Trainer(bare, presets.DAPO_DIRECT, told(), out=tmp_path / "bare")
    np.testing.assert_allclose(other.compute_logprobs(step), with_them, rtol=0, atol=2e-5)
    with adapters_off(run.model):
        assert np.abs(run.compute_logprobs(step) - with_them).max() > 1e-2
    assert_same(found, parameters(run.model.merge_and_unload()))


def test_adapter_weights_match_peft(traces, tmp_path):
    from safetensors.torch import load_file

    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(train__lora_rank=2), out=tmp_path)
    run.step(steps_of(traces, run.objective, 0)[0])
    assert_same(load_file(run.save() / "adapter_model.safetensors"), run.weights(adapters="alone"))


# --- inputs of a step ---


def test_the_reference_is_the_initial_model(traces, tmp_path):
    objective = with_kl(presets.DAPO_DIRECT, 0.05)
    run = Trainer(tiny_model(), objective, told(), out=tmp_path)
    [first, second, *_] = steps_of(traces, objective, 0)
    run.step(first)
    start = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path / "start").compute_logprobs(second)
    assert np.array_equal(run.add_logprobs(second).ref_logprobs, start)
    assert not np.array_equal(run.compute_logprobs(second), start)
    given = second.with_logprobs(ref=start - 1)
    assert run.add_logprobs(given) is given  # logprobs of the step are used


@pytest.mark.parametrize("keep_start", [True, False])
def test_a_mixed_reference_follows_the_policy(traces, tmp_path, keep_start):
    objective = with_kl(presets.DAPO_DIRECT, 0.05)
    options = told(train__ref_sync_steps=1, train__ref_mixup_alpha=0.25)
    run = Trainer(tiny_model(), objective, options, out=tmp_path, keep_initial_reference=keep_start)
    [first, *_] = steps_of(traces, objective, 0)
    start = run.compute_logprobs(first, model="reference")
    run.step(first)
    model, trained = tiny_model(), dict(run.model.named_parameters())
    mixed = {name: 0.25 * trained[name] + 0.75 * before for name, before in model.named_parameters()}
    model.load_state_dict(mixed, strict=False)
    expected = Trainer(model, objective, told(), out=tmp_path / "expected").compute_logprobs(first)
    np.testing.assert_allclose(run.compute_logprobs(first, model="reference"), expected, rtol=0, atol=1e-6)
    assert np.abs(expected - start).max() > 1e-4


def test_adapters_are_not_mixed_and_an_alpha_without_a_cadence_is_refused(traces, tmp_path):
    objective = with_kl(presets.DAPO_DIRECT, 0.05)
    mixing = told(train__ref_sync_steps=1, train__ref_mixup_alpha=0.25, train__lora_rank=2)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-060.*0\.25"):
        Trainer(tiny_model(), objective, mixing, out=tmp_path)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-085.*ref_mixup_alpha.*train\.ref_sync_steps.*0"):
        train(traces, tiny_model(), objective=objective, out=tmp_path, config=told(train__ref_mixup_alpha=0.5))


@pytest.mark.parametrize("how", [{"keep_initial_reference": False}, {"config": {"train__ref_sync_steps": 2}}], ids=str)
def test_a_missing_reference_is_an_error(traces, tmp_path, how):
    objective = with_kl(presets.DAPO_DIRECT, 0.05)
    run = Trainer(tiny_model(), objective, told(**how.pop("config", {})), out=tmp_path, **how)
    [step, *_] = steps_of(traces, objective, 0)
    with pytest.raises(ArgumentError, match="TG-TRAIN-082"):
        run.step(step)
    run.step(step.with_logprobs(ref=run.compute_logprobs(step)))
    assert run.metrics()["kl_ref"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("over", ["support", "vocabulary"])
def test_a_reference_is_compared_over_the_ids_that_the_penalty_says(traces, tmp_path, over):
    objective = override_all(presets.DAPO, {"kl": 0.05, "kl_over": over})
    trainer = Trainer(tiny_model(), objective, told(), out=tmp_path)
    [step, *_] = steps_of(restricted(traces, trainer.model.config.vocab_size), objective, 0)
    own = trainer.compute_logprobs(step)
    whole = trainer.compute_logprobs(replace(step, batches=tuple(replace(b, support=None) for b in step.batches)))
    expected = own if over == "support" else whole
    assert np.nanmax(np.abs(own - whole)) > 0.1
    reference = trainer.compute_logprobs(step, model="reference")
    np.testing.assert_allclose(reference, expected, rtol=0, atol=1e-6)
    result = trainer.step(step)
    np.testing.assert_allclose(result.logprobs, own, rtol=0, atol=1e-5)
    if over == "support":
        assert result.vocabulary_logprobs is None
    else:
        np.testing.assert_allclose(result.vocabulary_logprobs, whole, rtol=0, atol=1e-5)
    assert trainer.metrics()["kl_ref"] == pytest.approx(0, abs=1e-9)


def test_ids_rewards_and_versions_that_do_not_fit_are_refused(traces, tmp_path):
    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)
    [step, *_] = steps_of(replace(traces, ids=np.where(traces.ids == 7, VOCABULARY, traces.ids)), run.objective, 0)
    with pytest.raises(ArgumentError, match=rf"TG-TRAIN-062.*{VOCABULARY}.*{VOCABULARY}"):
        run.step(step)
    [step, *_] = steps_of(traces, run.objective, 0)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-069.*3"):
        run.step(step, rewards=np.zeros(3))
    with pytest.raises(ArgumentError, match=r"TG-ARGS-005.*version"):
        run.step(step, version=-1)
    assert run.metrics() == {}


def test_out_of_memory_names_the_step(traces, tmp_path, monkeypatch):
    import tracegrad.trainer.trainer as module

    run = Trainer(tiny_model(), presets.DAPO_DIRECT, told(), out=tmp_path)

    def lost(*given, **how):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0")

    monkeypatch.setattr(module, "optimizer_step", lost)
    with pytest.raises(TracegradError, match=r"TG-TRAIN-095.*1"):
        run.step(steps_of(traces, run.objective, 0)[0])


def test_a_step_without_terms_is_reported(traces):
    objective = presets.DR_GRPO
    even = np.where(np.arange(traces.traces) // 4 % 12 < 6, 0.0, 1.0)  # six groups with, six without an advantage
    given = {"tokens_per_row": 64, "groups_per_step": 6, "per": "trace", "requirements": objective.requirements}
    assert [step.has_trained_tokens for step in pack(traces, even, **given)] == [True] * 4
    packed = pack(traces, even, skip_zero_advantage=True, **given)
    assert [step.has_trained_tokens for step in packed] == [False, True, False, True]
    assert [len(step) for step in packed if not step.has_trained_tokens] == [0, 0]
    by_rank = pack(traces, even, skip_zero_advantage=True, ranks=30, rank=29, **given)
    assert [step.has_trained_tokens for step in by_rank] == [False, True, False, True]  # even if this rank has none
    assert {len(step) for step in by_rank} == {0}


def test_adapters_of_the_caller_use_their_base_as_reference(traces, tmp_path):
    objective = with_kl(presets.DAPO_DIRECT, 0.05)
    run = Trainer(with_adapters(tiny_model(), 2), objective, told(), out=tmp_path)
    assert run.reference is None  # no copy was made
    [step, *_] = steps_of(traces, objective, 0)
    run.step(step)
    with adapters_off(run.model):
        bare = run.compute_logprobs(step)
    assert np.array_equal(run.add_logprobs(step).ref_logprobs, bare)
