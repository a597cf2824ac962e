"""What a run keeps of its steps: the same numbers as the step saw, why each term fell, and within its bound."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tracegrad as tg
from tiny import tiny_model
from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config
from tracegrad.config.schema import TokenLogConfig
from tracegrad.errors import ArgumentError, FormatError
from tracegrad.objective import Ratio, Rejection, presets
from tracegrad.trainer import Trainer, token_log
from tracegrad.trainer.token_log import CLIPPED, MASKED_BY_POLICY, TRAINED, UNKNOWN, TokenLog, subset
from tracegrad.trainer.token_log_writer import TokenLogWriter, reasons
from tracegrad.view.tokens import aggregate_by_trace

GATES = (Rejection(Ratio("old", "rollout"), low=0.2), Rejection(Ratio("old", "rollout"), high=2.0))


def sequences(traces=12, length=9, seed=0):
    rng = np.random.default_rng(seed)
    count = traces * length
    ids = rng.integers(0, 48, count)
    trainable = np.tile(np.arange(length) >= 3, traces)
    logprobs = np.where(trainable, -rng.uniform(1, 8, count), np.nan)
    logprobs[5] = np.nan  # a term whose logprob was not recorded
    groups, rewards = np.arange(traces) // 3, (np.arange(traces) % 3 == 0).astype(float)
    return Sequences.from_arrays(
        ids, np.arange(traces + 1) * length, logprobs, trainable, group=groups, rewards=rewards
    )


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """A step that was taken, with all it saw."""
    torch.manual_seed(0)
    found, objective = sequences(), replace(presets.DAPO, rejections=GATES)
    [step] = tg.pack(found, tg.advantage.group_mean(found.reward, found.group), tokens_per_row=128)
    driven = Trainer(tiny_model(), objective, Config(), out=tmp_path_factory.mktemp("run"))
    step = driven.add_logprobs(step)
    return found, objective, step, driven.step(step)


def kept(tmp_path, stepped, **options):
    found, objective, step, outcome = stepped
    token_log_writer = TokenLogWriter(tmp_path, TokenLogConfig(**options), objective)
    token_log_writer.step(1, step, outcome, found)
    token_log_writer.close()
    assert not token_log_writer.problem
    return TokenLog(tmp_path)


def test_what_is_kept_is_what_the_step_saw(tmp_path, stepped):
    found, _, step, outcome = stepped
    read = kept(tmp_path, stepped, mode="all")
    [(number, path)] = read.files()
    held = read.read(path)
    assert number == held.step == 1
    own = read.sequences(held.tokens)
    np.testing.assert_array_equal(own.ids[held.token], found.ids[step.origin])
    np.testing.assert_array_equal(held.values["gradient"], outcome.gradient)
    np.testing.assert_array_equal(held.values["entropy"], outcome.entropy)
    np.testing.assert_array_equal(held.values["old_logprobs"], step.old_logprobs)
    np.testing.assert_array_equal(held.keep, outcome.keep)
    [mine] = read.of("4")
    np.testing.assert_array_equal(mine.values["ratio"], outcome.ratio[step.trace == 4])


def test_each_term_says_which_gate_dropped_it(stepped):
    _, objective, step, outcome = stepped
    words, why = reasons(step, outcome, objective)
    ratio = np.exp(step.old_logprobs - step.rollout_logprobs)
    unknown = np.isnan(step.rollout_logprobs)
    np.testing.assert_array_equal(why == UNKNOWN, unknown)
    np.testing.assert_array_equal(why == MASKED_BY_POLICY + 1, ~unknown & (ratio < 0.2))
    np.testing.assert_array_equal(why == MASKED_BY_POLICY + 2, ~unknown & (ratio > 2.0))
    assert {MASKED_BY_POLICY + 1, MASKED_BY_POLICY + 2, TRAINED} <= set(why.tolist())
    assert "2" in words[MASKED_BY_POLICY + 2]
    assert "unless" in words[MASKED_BY_POLICY + 1]
    np.testing.assert_array_equal((why == TRAINED) | (why == CLIPPED), outcome.keep)


def test_sampled_terms_are_whole_groups_within_the_bound(tmp_path, stepped, monkeypatch):
    found, objective, step, outcome = stepped
    from tracegrad.trainer import token_log_writer as room

    monkeypatch.setattr(room, "_MEGA", 2400)  # a bound of 2,400 bytes: half of 12 traces * (9 * 24 + 6 * 41)

    def sampled(world):
        token_log_writer = TokenLogWriter(tmp_path, TokenLogConfig(max_mb=1), objective, world=world)
        for number in range(1, 40):
            token_log_writer.step(number, step, outcome, found, passes=1)
        token_log_writer.close()
        read = TokenLog(tmp_path)
        return read, sorted(int(name) for name in read.sequences(read.sets()[0]).trace_ids)

    _, of_half = sampled(world=2)
    read, rows = sampled(world=1)
    assert 0 < len(of_half) < len(rows) < 12
    assert all({3 * (row // 3), 3 * (row // 3) + 1, 3 * (row // 3) + 2} <= set(rows) for row in rows)
    assert len(read.files()) < 39  # the bound ended it


def test_nothing_is_kept_where_that_is_told(tmp_path, stepped):
    with pytest.raises(ArgumentError, match="TG-TRAIN-080"):
        kept(tmp_path, stepped, mode="none")


def test_a_resumed_run_takes_back_what_it_takes_again(tmp_path, stepped):
    found, objective, step, outcome = stepped
    token_log_writer = TokenLogWriter(tmp_path, TokenLogConfig(mode="all"), objective)
    for number in (1, 2, 3):
        token_log_writer.step(number, step, outcome, found)
    token_log_writer.close()
    TokenLogWriter(tmp_path, TokenLogConfig(mode="all"), objective, steps_done=1).close()
    assert [number for number, _ in TokenLog(tmp_path).files()] == [1]
    TokenLogWriter(tmp_path, TokenLogConfig(mode="all"), objective, steps_done=0).close()
    assert not list((tmp_path / "terms").iterdir())


def test_a_full_disk_ends_the_keeping_and_not_the_run(tmp_path, stepped):
    found, objective, step, outcome = stepped
    token_log_writer = TokenLogWriter(tmp_path, TokenLogConfig(mode="all"), objective)
    (tmp_path / "terms").rmdir()
    (tmp_path / "terms").write_text("in the way")
    for number in range(1, 9):
        token_log_writer.step(number, step, outcome, found)
    token_log_writer.close()
    assert "The token log ends here." in token_log_writer.problem


def test_a_part_of_sequences_is_those_traces_alone():
    found = sequences()
    part, places = subset(found, [2, 7])
    np.testing.assert_array_equal(part.ids, np.concatenate([found.ids[18:27], found.ids[63:72]]))
    np.testing.assert_array_equal(places, [*range(18, 27), *range(63, 72)])
    assert part.trace_ids == ("2", "7")
    assert [part.group_names[code] for code in part.group] == ["0", "2"]
    assert part.rewards.tolist() == [[0.0], [0.0]]


def test_a_step_file_that_points_elsewhere_is_refused(tmp_path, stepped):
    read = kept(tmp_path, stepped, mode="all")
    [(_, path)] = read.files()
    held = read.read(path)
    token_log.write_step(path, replace(held, token=held.token + 10_000))
    with pytest.raises(FormatError, match="TG-TRAIN-081"):
        read.read(path)


def test_what_a_step_made_of_a_trace_is_summed_by_hand(tmp_path, stepped):
    _, _, step, outcome = stepped
    read = kept(tmp_path, stepped, mode="all")
    rows, values = aggregate_by_trace(read.read(read.files()[0][1]))
    here = step.trace == rows[3]
    assert values[0, 3] == pytest.approx(np.abs(outcome.gradient[here]).sum())
    assert values[1, 3] == pytest.approx(outcome.ratio[here].mean())
    assert values[4, 3] == pytest.approx(1 - outcome.keep[here].mean())
