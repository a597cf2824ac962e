"""The sampler's support from the record: sampling masks, processed and raw alternatives, and what proves none."""

import json
from dataclasses import replace

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.token_sets import TokenSets
from tracegrad.data.sampling import options_on
from tracegrad.errors import ArgumentError, FormatError
from tracegrad.storage import manifest
from tracegrad.trainer.dataset import InMemoryDataset, PreparedDataset, select
from truncated import entries_of, sample
from vocabulary import EXAMPLE, align, load, user


@pytest.fixture(scope="module")
def tokenizer():
    return load(EXAMPLE)


def found(sequences):
    """Return support and logprob of each sampled token."""
    terms = np.flatnonzero(sequences.source == 2)
    rows = sequences.support.rows(terms) if sequences.support else [np.zeros(0)] * len(terms)
    return [row.tolist() for row in rows], sequences.rollout_logprobs[terms]


OPTIONS = [
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.7},
]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_processed_alternatives_give_the_kept_ids(tokenizer, options, temperature):
    record, supports, logprobs = sample(
        np.random.default_rng(0), 40, "processed", 150, spread=4.0, temperature=temperature, **options
    )
    sequences = align(tokenizer, record)
    rows, recorded = found(sequences)
    known = ~np.isnan(recorded)
    assert known.mean() > 0.9
    assert [row for row, ok in zip(rows, known, strict=True) if ok] == [
        row for row, ok in zip(supports, known, strict=True) if ok
    ]
    np.testing.assert_allclose(recorded[known], np.array(logprobs)[known], atol=1e-6)
    assert (sequences.reshaped[0], options_on(int(sequences.replayed[0]))) == (
        0,
        tuple(sorted(options, key=["top_p", "top_k", "min_p"].index)),
    )
    assert sequences.inv_temperature[sequences.trainable] == pytest.approx(1 / temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_raw_alternatives_give_the_kept_ids_and_the_logprob_over_them(tokenizer, options, temperature):
    if options == {"top_p": 0.9} and temperature > 1:
        pytest.skip("the mass of further ids at this temperature has no bound")
    record, supports, logprobs = sample(
        np.random.default_rng(1), 40, "raw", 150, spread=4.0, temperature=temperature, **options
    )
    sequences = align(tokenizer, record)
    rows, recorded = found(sequences)
    known = ~np.isnan(recorded)
    assert known.mean() > 0.7
    assert [row for row, ok in zip(rows, known, strict=True) if ok] == [
        row for row, ok in zip(supports, known, strict=True) if ok
    ]
    np.testing.assert_allclose(recorded[known], np.array(logprobs)[known], atol=2e-6)
    assert sequences.logprob_kind.tolist() == [2]
    assert sequences.inv_temperature[sequences.trainable] == pytest.approx(1 / temperature)
    assert sequences.reshaped[0] == 0 != sequences.replayed[0]


def test_a_list_that_may_be_too_short_proves_nothing(tokenizer):
    # top_k 20 and 20 ids in the list: the next id may be as probable as the last. With 21 it is seen.
    for listed, known in [(20, False), (21, True)]:
        record, *_ = sample(np.random.default_rng(2), 1, "raw", listed, top_k=20)
        sequences = align(tokenizer, record)
        assert bool(sequences.reshaped[0]) is not known
        assert (sequences.support is not None) is known
        assert not np.isnan(sequences.rollout_logprobs[sequences.trainable]).any()


def test_equal_logits_at_the_edge_of_top_k_are_all_kept(tokenizer):
    record, *_ = sample(np.random.default_rng(3), 1, "raw", 6, top_k=3)
    [entry] = entries_of(record)
    tops = sorted(entry["top_logprobs"], key=lambda each: -each["logprob"])
    entry |= {name: tops[0][name] for name in ("token_id", "logprob")}
    record["calls"][0]["response"]["choices"][0]["token_ids"] = [entry["token_id"]]
    tops[3]["logprob"] = tops[2]["logprob"]
    [row], _ = found(align(tokenizer, record))
    assert len(row) == 4


def test_tokens_whose_support_is_not_proven_have_no_logprob_and_are_counted(tokenizer):
    record, supports, _ = sample(np.random.default_rng(4), 6, "processed", 150, spread=4.0, min_p=0.05)
    content = entries_of(record)
    content[2]["top_logprobs"] = content[2]["top_logprobs"][:2]
    content[4]["top_logprobs"] = []
    sequences = align(tokenizer, record)
    rows, recorded = found(sequences)
    assert np.isnan(recorded).tolist() == [False, False, True, False, True, False]
    assert [rows[0], rows[2], rows[4]] == [supports[0], [], []]
    report = sequences.alignment_report
    assert [name for name in report.table() if name.startswith("R23")]
    assert report.count[report.reason == [*report.reasons].index("R23 missing_logprob")].tolist() == [2]


@pytest.mark.parametrize(
    ("change", "replayed"),
    [
        ({"repetition_penalty": 1.2}, True),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, True),
        ({"logit_bias": {"5": 3, "4": -1.5}}, True),
        ({"logit_bias": [[5, 3]]}, False),
        ({"repetition_penalty": "high"}, False),
        ({"use_beam_search": True}, False),
    ],
    ids=str,
)
def test_penalties_are_replayed_if_the_logprobs_include_them(tokenizer, change, replayed):
    record, *_ = sample(np.random.default_rng(5), 5, "processed", 60, top_k=10)
    record["calls"][0]["request"]["sampling_params"] |= change
    sequences = align(tokenizer, record)
    assert set(options_on(int(sequences.replayed[0]))) == {"top_k", *(change if replayed else ())}
    assert set(options_on(int(sequences.reshaped[0]))) == {*(() if replayed else change)}
    if replayed:
        penalties = sequences.penalties
        assert penalties.generation.tolist() == [0]
        assert penalties.repetition.tolist() == [np.float32(change.get("repetition_penalty", 1))]
        assert penalties.presence.tolist() == [change.get("presence_penalty", 0)]
        assert penalties.frequency.tolist() == [change.get("frequency_penalty", 0)]
        bias = dict(zip(penalties.bias_ids.tolist(), penalties.bias.tolist(), strict=True))
        assert bias == ({4: -1.5, 5: 3} if "logit_bias" in change else {})
    else:
        assert sequences.penalties is None
    record["logprob_kind"] = "raw"
    raw = align(tokenizer, record)
    assert set(options_on(int(raw.reshaped[0]))) == {"top_k", *change}
    assert (raw.support, raw.penalties, raw.replayed[0]) == (None, None, 0)


def test_penalties_need_the_ids_of_the_prompt(tokenizer):
    def penalized(**prompt):
        [choice] = sample(np.random.default_rng(5), 3, "processed", 1)[0]["calls"][0]["response"]["choices"]
        choice["message"] = {"role": "assistant", "content": tokenizer.decode(choice["token_ids"])}
        response = {"object": "chat.completion", "choices": [choice], **prompt}
        request = {"messages": [user("q")], "repetition_penalty": 1.2}
        call = {"request": request, "response": response}
        return align(tokenizer, {"id": "t", "logprob_kind": "processed", "calls": [call]})

    ids = tokenizer.render_ids([user("q")], add_generation_prompt=True).tolist()
    assert penalized().penalties is None
    assert penalized(prompt_token_ids=ids).penalties is not None
    assert penalized(prompt_token_ids=ids, meta_info={}).penalties is not None


@pytest.mark.parametrize("kind", ["processed", "raw", "unknown"])
def test_a_recorded_mask_counts_if_the_logprobs_are_those_over_it(tokenizer, kind):
    record, supports, _ = sample(np.random.default_rng(6), 4, "processed", 1, top_p=0.8)
    record["logprob_kind"] = kind
    [choice] = record["calls"][0]["response"]["choices"]
    choice["sampling_mask"] = supports
    sequences = align(tokenizer, record)
    rows, _ = found(sequences)
    is_replayed = kind == "processed"
    assert rows == (supports if is_replayed else [[]] * 4)
    assert options_on(int(sequences.replayed[0])) == (("top_p",) if is_replayed else ())
    assert options_on(int(sequences.reshaped[0])) == (() if is_replayed else ("top_p",))
    assert "sampling_mask" not in sequences.extras

    # A token that was sampled from one id has the logprob 0, or the logprobs are not those over the masks.
    choice["sampling_mask"] = [[choice["token_ids"][0]], *supports[1:]]
    before = align(tokenizer, record)
    assert (before.support, options_on(int(before.reshaped[0]))) == (None, ("top_p",))

    # A mask without the sampled id is not that of the token.
    choice["sampling_mask"] = [
        [i for i in row if n != 1 or i != choice["token_ids"][1]] for n, row in enumerate(supports)
    ]
    changed = align(tokenizer, record)
    assert np.isnan(changed.rollout_logprobs[changed.source == 2]).tolist() == [False, is_replayed, False, False]


def test_align_mode_replays_nothing(tokenizer):
    record, *_ = sample(np.random.default_rng(7), 3, "processed", 60, top_k=10)
    [choice] = record["calls"][0]["response"]["choices"]
    choice["message"] = {"role": "assistant", "content": tokenizer.decode(choice["token_ids"])}
    record["calls"][0]["request"] = {"messages": [user("q")], "top_k": 10}
    record["calls"][0]["response"] = {"object": "chat.completion", "choices": [choice]}
    assert align(tokenizer, record).support is not None
    sequences = align(tokenizer, record, mode="align")
    assert (sequences.support, options_on(int(sequences.reshaped[0]))) == (None, ("top_k",))


@pytest.mark.parametrize("name", ["token_id", "token"])
def test_ids_are_read_of_fields_and_of_names_by_both_readers(tokenizer, name):
    record, supports, _ = sample(np.random.default_rng(8), 8, "processed", 60, top_k=10)
    if name == "token":
        for entry in entries_of(record):
            entry["top_logprobs"] = [
                {"token": f"token_id:{e['token_id']}", "logprob": e["logprob"]} for e in entry["top_logprobs"]
            ]
    text = json.dumps(record)
    # The fast reader leaves an id that is written as a float to the general one.
    own = f'"token_id": {entries_of(record)[0]["token_id"]},'
    slow = text.replace(own, own.replace(",", ".0,"), 1)
    assert text != slow
    for each in (text, slow):
        rows, _ = found(tg.align(tg.Traces.from_records([each.encode()]), tokenizer))
        assert rows == supports


def penalties_of(generation, repetition, bias=()):
    ones = np.ones(len(generation), np.float32)
    ends = np.cumsum([len(bias)] * len(generation)).astype(np.int64)
    ids, values = (np.array([each[at] for each in bias] * len(generation)) for at in (0, 1))
    arrays = (ends, ids.astype(np.int32), values.astype(np.float32))
    return Penalties(np.array(generation, np.int64), np.float32(repetition) * ones, 0 * ones, 0 * ones, *arrays)


def test_penalties_are_stored_loaded_selected_and_joined(tmp_path):
    nan = float("nan")

    def traces(penalties):
        return Sequences.from_arrays(
            [5, 6, 7, 8], [0, 2, 4], [nan, -1, nan, -1], [False, True] * 2, rewards=[1.0, 0.0], penalties=penalties
        )

    both = traces(penalties_of([0, 1], 1.5, [(7, 2.0)]))
    both.save(tmp_path / "shard-00000")
    traces(None).save(tmp_path / "shard-00001")
    traces(penalties_of([1], 1.25)).save(tmp_path / "shard-00002")
    manifest.seal(tmp_path)
    joined = Sequences.load(tmp_path).penalties
    assert (joined.generation.tolist(), joined.repetition.tolist()) == ([0, 1, 5], [1.5, 1.5, 1.25])
    assert (joined.bias_ends.tolist(), joined.bias_ids.tolist(), joined.bias.tolist()) == ([1, 2, 2], [7, 7], [2, 2])
    assert joined.settings().tolist() == [0, 0, 1]
    assert select(both, np.array([1])).penalties.generation.tolist() == [0]
    dataset = PreparedDataset.open(tmp_path)
    assert dataset.take(np.array([2])).penalties is None
    found = dataset.take(np.array([1, 2, 5])).penalties
    assert (found.generation.tolist(), found.repetition.tolist(), found.bias.tolist()) == ([0, 2], [1.5, 1.25], [2])
    assert dataset.take_with_details(np.array([5])).penalties.repetition.tolist() == [1.25]


@pytest.mark.parametrize(
    "change",
    [
        {"generation": np.array([2], np.int64)},
        {"repetition": np.zeros(1, np.float32)},
        {"presence": np.full(1, np.nan, np.float32)},
        {"bias_ends": np.array([2], np.int64)},
        {"frequency": np.zeros(1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_penalties_that_are_not_those_of_the_generations_are_refused(change):
    penalties = replace(penalties_of([0], 1.5, [(7, 2.0)]), **change)
    with pytest.raises(ArgumentError, match="TG-ALIGN-042"):
        Sequences.from_arrays([5, 6], [0, 2], [-1, -1], [False, True], penalties=penalties)


def test_pack_gives_each_logit_row_the_changes_of_its_context():
    # Two branches with the same ids: the answer 7 7 after 5 6, and one of them without penalties.
    ids, nan = [5, 6, 7, 7], float("nan")
    two = Sequences.from_arrays(
        ids * 2,
        [0, 4, 8],
        [nan, nan, -1, -1] * 2,
        [False, False, True, True] * 2,
        group=[0, 0],
        penalties=penalties_of([1], 2.0, [(9, 1.0)]),
    )
    [batch] = tg.pack(two, [1.0, 1.0], tokens_per_row=16, share_prefixes=True)[0].batches
    found = batch.support
    rows = {
        int(term): [
            (int(found.ids[at]), *(float(column[at]) for column in found.changes))
            for at in range(found.offsets[row], found.offsets[row + 1])
        ]
        for term, row in zip(batch.term, batch.logit_row, strict=True)
    }
    assert len(batch.read) == 4
    assert rows[0] == rows[1] == []
    assert rows[2] == [(5, 0, 2, 0), (6, 0, 2, 0), (9, 1, 1, 0)]
    assert rows[3] == [(5, 0, 2, 0), (6, 0, 2, 0), (7, 0, 2, 0), (9, 1, 1, 0)]
    assert not found.restricted.any()


@pytest.mark.parametrize("echo", [False, True])
def test_legacy_completions_list_ids_by_name(tokenizer, echo):
    record, supports, logprobs = sample(np.random.default_rng(9), 8, "processed", 60, top_k=10)
    [choice] = record["calls"][0]["response"]["choices"]
    entries = entries_of(record)
    tops = [{f"token_id:{e['token_id']}": e["logprob"] for e in entry["top_logprobs"]} for entry in entries]
    lists = {
        "tokens": [f"token_id:{entry['token_id']}" for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": tops,
    }
    prompt = [5, 6, 7]
    if echo:
        listed = {"token_id:5": -1.0, "token_id:6": -2.0}
        lists["tokens"] = [f"token_id:{id_}" for id_ in prompt] + lists["tokens"]
        lists["token_logprobs"] = [None, -1.0, -2.0] + lists["token_logprobs"]
        lists["top_logprobs"] = [None, listed, listed, *tops]
    text = tokenizer.decode(choice["token_ids"])
    answer = {"index": 0, "text": text, "logprobs": lists, "finish_reason": "length"}
    call = {
        "request": {"prompt": prompt, "top_k": 10, "echo": echo},
        "response": {"object": "text_completion", "choices": [answer]},
    }
    legacy = {**record, "calls": [call]}
    rows, recorded = found(align(tokenizer, legacy))
    assert rows == supports
    np.testing.assert_allclose(recorded, logprobs, atol=1e-6)
    # An id that is named by its text is ambiguous.
    lists["top_logprobs"] = [
        top and {f"{name} ": value for name, value in top.items()} for top in lists["top_logprobs"]
    ]
    assert align(tokenizer, legacy).support is None


def test_equal_ids_with_another_start_of_the_answer_have_rows_of_their_own():
    # 5 6 | 7 7 and 5 6 7 | 7: the last token has the same ids before it, but 7 is of the answer only in the first.
    nan, flags = float("nan"), [False, False, True, True, False, False, False, True]
    penalties = replace(penalties_of([0, 1], 1.0), presence=np.ones(2, np.float32))
    logprobs = [-1.0 if flag else nan for flag in flags]
    two = Sequences.from_arrays([5, 6, 7, 7] * 2, [0, 4, 8], logprobs, flags, group=[0, 0], penalties=penalties)
    [batch] = tg.pack(two, [1.0, 1.0], tokens_per_row=16, share_prefixes=True)[0].batches
    assert (len(batch.term), len(batch.read), len(batch.ids)) == (3, 3, 4)
    assert np.diff(batch.support.offsets).tolist() in ([0, 1, 0], [0, 0, 1])
    assert (batch.support.ids.tolist(), batch.support.changes.after.tolist()) == ([7], [-1.0])


def sequences_of(rows, ids=(5, 6, 7)):
    nan = float("nan")
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    support = Ragged(offsets, np.array([i for row in rows for i in row], np.int32))
    return Sequences.from_arrays(
        ids, [0, 1, 3], [nan, -0.5, -0.1], [False, False, True], trace=[0, 1], rewards=[1.0, 0.0], support=support
    )


def test_support_is_stored_loaded_selected_and_joined(tmp_path):
    one = sequences_of([[], [9, 5], [7, 8]])
    one.save(tmp_path / "shard-00000")
    sequences_of([[], [], []]).save(tmp_path / "shard-00001")
    plain = Sequences.from_arrays([5], [0, 1], [float("nan")], [False], rewards=[1.0])
    plain.save(tmp_path / "shard-00002")
    manifest.seal(tmp_path)
    loaded = Sequences.load(tmp_path / "shard-00000")
    assert [row.tolist() for row in loaded.support] == [[], [5, 9], [7, 8]]
    assert [row.tolist() for row in Sequences.load(tmp_path).support] == [[], [5, 9], [7, 8], *[[]] * 4]
    assert [row.tolist() for row in select(one, np.array([1])).support] == [[5, 9], [7, 8]]
    dataset = PreparedDataset.open(tmp_path)
    assert [row.tolist() for row in dataset.take(np.array([1, 4])).support] == [[5, 9], [7, 8], []]
    assert [row.tolist() for row in dataset.take_with_details(np.array([1])).support] == [[5, 9], [7, 8]]
    assert dataset.take(np.array([4])).support is None


def test_other_support_or_penalties_are_another_data_set():
    nan, rewards = float("nan"), np.zeros(1, np.float32)
    rows = [Ragged(np.array([0, 0, 2]), np.array([6, other], np.int32)) for other in (8, 9)]
    sampling = [{}, *({"support": each} for each in rows), *({"penalties": penalties_of([0], r)} for r in (1.5, 2.0))]
    found = [
        InMemoryDataset(Sequences.from_arrays([5, 6], [0, 2], [nan, -1], [False, True], **each)).fingerprint(rewards)
        for each in sampling
    ]
    assert len({*found}) == 5


def test_a_trained_token_outside_of_its_support_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="TG-ALIGN-041"):
        sequences_of([[], [], [8, 9]])
    with pytest.raises(ArgumentError, match="TG-ALIGN-040"):
        Sequences.from_arrays([5], [0, 1], [0.0], [False], support=Ragged(np.zeros(3, np.int64), np.zeros(0, np.int32)))
    with pytest.raises(ArgumentError, match="TG-ALIGN-508"):
        sequences_of([[], [], [7, -1]])
    one = sequences_of([[], [], [7, 8]])
    object.__setattr__(one, "ids", np.array([5, 6, 9], np.int32))
    with pytest.raises(ArgumentError, match="TG-ALIGN-018"):
        one.save(tmp_path)


def test_broken_sets_are_refused():
    sets = TokenSets.from_rows(Ragged(np.array([0, 2]), np.array([5, 6], np.int32)))
    broken = TokenSets(sets.starts, sets.data[:-1], 1)
    for read in (broken.check, lambda: broken.rows([0])):
        with pytest.raises(FormatError, match="TG-ALIGN-510"):
            read()
    with pytest.raises(ArgumentError, match="TG-ALIGN-509"):
        sets.rows([1])
    with pytest.raises(IndexError):
        sets[1]
