"""Alignment on the bundled example's tokenizer and template, and on what a real vLLM recorded with it."""

import copy

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.data.codes import ENDINGS
from vocabulary import EXAMPLE, align, ids_of, reasons


@pytest.fixture(scope="module")
def recorded():
    return tg.read(EXAMPLE.parent / "traces.jsonl.zst")


def spelled(tokenizer, ids):
    return tokenizer.decode_bytes(np.asarray(ids, np.int32)).decode()


def chat(tokenizer, answers, *, keep=("ids",), **more):
    """A conversation as plain messages; each answer is text that the policy sampled, with its stop token."""
    messages = [{"role": "system", "content": "Be brief."}]
    for number, text in enumerate(answers):
        ids = ids_of(tokenizer, text)
        logprobs = [-0.25 * (k + 1) for k in range(len(ids))]
        messages.append({"role": "user", "content": f"question {number}"})
        message = {"role": "assistant", "content": text.removesuffix("<|im_end|>"), "finish_reason": "stop"}
        if "ids" in keep:
            message["token_ids"] = ids
        message["logprobs"] = {"content": [{"token": "", "logprob": value} for value in logprobs]}
        if "ids" not in keep:
            content = message["logprobs"]["content"]
            for entry, id_ in zip(content, ids, strict=True):
                raw = tokenizer.decode_bytes(np.asarray([id_], np.int32))
                special = id_ in tokenizer.eos_ids
                entry["bytes"] = [] if special else list(raw)
                entry["token"] = "" if special else raw.decode(errors="replace")
        messages.append(message)
    return {"id": "t", "reward": 1.0, "logprob_kind": "raw", "temperature": 1.0, "messages": messages, **more}


def test_recorded_ids_are_spliced_between_what_the_template_supplies(tokenizer):
    record = chat(tokenizer, ["alpha<|im_end|>", "beta<|im_end|>"])
    found = align(tokenizer, record)
    plain = [{k: m[k] for k in ("role", "content")} for m in record["messages"]]
    expected = tokenizer.render(plain).text.removesuffix("\n")
    assert spelled(tokenizer, found.ids) == expected
    assert spelled(tokenizer, found.ids[found.source == 0]) == "Be brief.question 0question 1"
    assert found.branches == 1
    sampled = [ids_of(tokenizer, text) for text in ("alpha<|im_end|>", "beta<|im_end|>")]
    assert found.ids[found.trainable].tolist() == sampled[0] + sampled[1]
    assert found.turn[found.trainable].tolist() == [0] * len(sampled[0]) + [1] * len(sampled[1])
    values = [-0.25 * (k + 1) for ids in sampled for k in range(len(ids))]
    assert found.rollout_logprobs[found.trainable].tolist() == values
    assert len(found.alignment_report) == 0
    assert np.isnan(found.rollout_logprobs[~found.trainable]).all()


def test_bytes_of_tokens_give_the_ids_that_were_sampled(tokenizer):
    answers = ["Zoë: 12 €<|im_end|>", "again<|im_end|>"]
    whole = align(tokenizer, chat(tokenizer, answers))
    stripped = align(tokenizer, chat(tokenizer, answers, keep=()))
    assert stripped.ids.tolist() == whole.ids.tolist()
    assert set(stripped.alignment_level[stripped.trainable]) <= {2, 3}


def test_noncanonical_tokens_are_kept_as_sampled_and_reported(tokenizer):
    record = chat(tokenizer, ["alpha<|im_end|>", "beta<|im_end|>"])
    single = [i for letter in "alpha" for i in ids_of(tokenizer, letter)] + list(tokenizer.eos_ids)
    assert single[:-1] != ids_of(tokenizer, "alpha")
    turn = record["messages"][2]
    turn["token_ids"] = single
    turn["logprobs"] = {"content": [{"token": "", "logprob": -1.0}] * len(single)}
    found = align(tokenizer, record)
    assert found.ids[found.turn == 0].tolist() == single
    assert found.branches == 1
    assert reasons(found) == {"R01"}


def test_a_trace_says_how_its_last_generation_ended(tokenizer):
    def ending(first="stop", last="stop", **changes):
        record = chat(tokenizer, ["alpha<|im_end|>", "beta<|im_end|>"])
        record["messages"][2]["finish_reason"] = first
        turn = record["messages"][4]
        turn["finish_reason"] = last
        if changes.get("short"):
            turn["token_ids"].pop()
            turn["logprobs"]["content"].pop()
        return ENDINGS[int(align(tokenizer, record).ending[0])]

    assert ending() == "ended"
    assert ending(first="length") == "ended"  # a turn before the last one
    assert ending(last="length", short=True) == "cut"
    assert ending(last="max_tokens", short=True) == "cut"
    assert ending(last="abort") == "cut"
    assert ending(last=None) == "ended"  # its tokens show the stop token
    assert ending(last=None, short=True) == "unknown"


def test_text_alone_is_aligned_and_trained_on_request_only(tokenizer):
    record = chat(tokenizer, ["alpha<|im_end|>"])
    del record["messages"][2]["token_ids"], record["messages"][2]["logprobs"]
    plain, asked = align(tokenizer, record), align(tokenizer, record, text_only=True)
    assert plain.trainable.sum() == 0
    assert plain.levels()["T6"]["trainable"] == 0
    assert asked.ids[asked.trainable].tolist() == ids_of(tokenizer, "alpha<|im_end|>")
    assert np.isnan(asked.rollout_logprobs).all()


@pytest.mark.parametrize("extra", [0, 1])
def test_logprobs_without_text_whose_count_fits_are_trained_on_request_only(tokenizer, extra):
    record = chat(tokenizer, ["alpha beta<|im_end|>"])
    turn = record["messages"][2]
    del turn["token_ids"]
    count = len(ids_of(tokenizer, "alpha beta")) + extra
    turn["logprobs"] = [-0.5] * count
    guessed, asked = align(tokenizer, record), align(tokenizer, record, assume_canonical=True)
    assert (guessed.alignment_level == 5).sum() == (asked.alignment_level == 5).sum() == count
    assert guessed.trainable.sum() == guessed.alignment_report.exact == 0
    assert guessed.levels() == {"T5": {"tokens": count, "trainable": 0, "generations": 1}}
    assert asked.rollout_logprobs[asked.trainable].tolist() == [-0.5] * count


def call(request, ids, text, tokenizer, prompt_ids=None):
    entries = [{"token": f"token_id:{i}", "logprob": -0.5, "bytes": None} for i in ids]
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    response = {"choices": [{**choice, "token_ids": ids, "logprobs": {"content": entries}}]}
    if prompt_ids is not None:
        response["prompt_token_ids"] = prompt_ids
    return {"request": {"model": "m", "messages": request, "temperature": 1.0}, "response": response}


def test_prompt_ids_that_part_from_what_was_sampled_open_a_branch(tokenizer):
    user = [{"role": "user", "content": "question"}]
    letters = [i for letter in "alpha" for i in ids_of(tokenizer, letter)] + list(tokenizer.eos_ids)
    onward = [*user, {"role": "assistant", "content": "alpha"}, {"role": "user", "content": "more"}]
    prompts = [ids_of(tokenizer, tokenizer.render(m, add_generation_prompt=True).text) for m in (user, onward)]
    calls = [
        call(user, letters, "alpha", tokenizer, prompts[0]),
        call(onward, ids_of(tokenizer, "beta<|im_end|>"), "beta", tokenizer, prompts[1]),
    ]
    found = align(tokenizer, {"id": "t", "reward": 1.0, "logprob_kind": "raw", "calls": calls})
    assert found.branches == 2
    assert found.ids[: found.cu_seqlens[1]].tolist() == prompts[0] + letters
    assert found.ids[found.cu_seqlens[1] :].tolist() == prompts[1] + ids_of(tokenizer, "beta<|im_end|>")
    second = slice(found.cu_seqlens[1], None)
    assert found.turn[second][found.trainable[second]].tolist() == [1] * len(ids_of(tokenizer, "beta<|im_end|>"))


def without_ids(record):
    """A call log with ids, as the same server would have sent it without."""
    bare = copy.deepcopy(record)
    for each in bare["calls"]:
        each["response"].pop("prompt_token_ids", None)
        for choice in each["response"]["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    return bare


def test_what_vllm_recorded_is_recovered_without_its_ids_or_refused(tokenizer, recorded):
    records = [t.to_dict() for t in recorded if t.metadata["shape"] == "token_ids"]
    whole = align(tokenizer, *records)
    bare = align(tokenizer, *map(without_ids, records))
    wrong = lost = 0
    ours, sampled = by_turn(bare), by_turn(whole)
    for event, theirs in sampled.items():
        mine = ours.get(event, [])
        wrong += mine != theirs[: len(mine)]
        lost += len(theirs) - len(mine)
    assert set(ours) <= set(sampled)
    assert wrong == 0
    assert lost <= 0.02 * whole.trainable.sum()


def by_turn(sequences):
    """(trace, turn) to the ids trained there."""
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    found = {}
    for position in sequences.terms:
        key = (int(owner[position]), int(sequences.turn[position]))
        found.setdefault(key, []).append(int(sequences.ids[position]))
    return found


def test_every_shape_of_the_example_is_held_with_its_logprobs(tokenizer, recorded):
    found = tg.align(recorded, tokenizer)
    levels = found.levels()
    assert set(levels) <= {"T0", "T1", "T2", "T3"}
    assert levels["T0"]["tokens"] > 10_000
    assert levels["T1"]["tokens"] > 10_000
    assert levels["T2"]["tokens"] > 20_000
    assert found.alignment_report.rate < 0.01
    valid = ~np.isnan(found.rollout_logprobs[found.trainable])
    assert valid.all()
    assert (found.rollout_logprobs[found.trainable] <= 0).all()


def test_alignment_does_not_depend_on_how_traces_are_batched(tokenizer, recorded):
    some = recorded[:64]
    whole = tg.align(some, tokenizer)
    parts = [tg.align(some[k : k + 7], tokenizer) for k in range(0, 64, 7)]
    assert np.concatenate([p.ids for p in parts]).tolist() == whole.ids.tolist()
    assert np.concatenate([p.trainable for p in parts]).tolist() == whole.trainable.tolist()


def test_a_trace_that_cannot_be_rendered_is_a_located_error_or_left_out(tokenizer):
    good, bad = chat(tokenizer, ["alpha<|im_end|>"]), chat(tokenizer, ["alpha<|im_end|>"])
    bad |= {"id": "broken", "template_kwargs": {"messages": "of the caller"}}
    with pytest.raises(tg.TracegradError, match=r"TG-TEMPLATE-009.*broken"):
        align(tokenizer, good, bad)
    found = align(tokenizer, good, bad, on_error="skip")
    assert found.trace_ids == ("t",)
    assert "broken" in found.alignment_report.errors[0]


def test_one_trace_of_many_is_aligned_alone(example, tokenizer):
    traces = tg.read(example / "traces.jsonl.zst", limit=4)
    alone = tg.align(traces[2], tokenizer)
    assert alone.trace_ids == (traces[2].id,)
    assert alone.ids.tolist() == tg.align(traces[2:3], tokenizer).ids.tolist()
