"""The other segmentations of a text: against all id sequences with its bytes, and the ids that may come next."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rollout
import tracegrad as tg
from tracegrad.alignment.ragged import Ragged
from tracegrad.missing_logprobs.predictions import Predictions
from tracegrad.missing_logprobs.segmentation import Vocabulary, other_segmentations


@pytest.fixture(scope="module")
def tokenizer(example):
    return tg.Tokenizer.from_pretrained(example / "model")


@pytest.fixture(scope="module")
def loaded(example):
    return rollout.load(example / "model")


@pytest.fixture(scope="module")
def entries(tokenizer, loaded):
    """Ids by their bytes, of the entries that text can have: transformers lists the added ones."""
    by_bytes: dict[bytes, list[int]] = {}
    for id_ in range(len(tokenizer)):
        if id_ not in loaded[1].added_tokens_decoder:
            by_bytes.setdefault(tokenizer.decode_bytes([id_]), []).append(id_)
    return by_bytes


def segmentations(text, entries):
    """Return all sequences of ids with these bytes."""
    if not text:
        return [[]]
    return [
        [id_, *rest]
        for length in range(1, len(text) + 1)
        for id_ in entries.get(text[:length], ())
        for rest in segmentations(text[length:], entries)
    ]


def predictions_of(logprobs, ids, listed):
    rows = np.arange(len(ids))
    best = np.argsort(-logprobs, 1)[:, :listed]
    top = np.take_along_axis(logprobs, best, 1)
    own = logprobs[rows, ids].astype(np.float32)
    return Predictions(own, best.astype(np.int32), top.astype(np.float32), np.array(ids, np.int32))


def endings(example):
    """Return (ids before, last ids) of recorded generations: 4 to 8 bytes of text, and the stop token."""
    found = {}
    for trace in tg.read(example / "traces.jsonl.zst", limit=64):
        for generation in trace.generations:
            if generation.prompt_token_ids is None or generation.finish_reason != "stop":
                continue
            ids = generation.token_ids.tolist()
            for count, least in ((2, 4), (3, 6)):
                found.setdefault(
                    tuple(ids[-count - 1 :]),
                    (generation.prompt_token_ids.tolist() + ids[:-1], ids[-count - 1 :], least),
                )
    return [(before[: len(before) - len(last) + 1], last, least) for before, last, least in found.values()]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_other_segmentations_of_a_text_are_not_more_probable_than_estimated(
    tokenizer, loaded, entries, example, temperature
):
    vocabulary, model = Vocabulary(tokenizer), loaded[0]
    compared = 0
    for before, canonical, least in endings(example):
        text = tokenizer.decode_bytes(canonical[:-1])
        if not least <= len(text) <= 8:
            continue
        everything = [[*ids, canonical[-1]] for ids in segmentations(text, entries)]
        assert canonical in everything
        longest = max(map(len, everything))
        padded = torch.tensor([before + ids + [0] * (longest - len(ids)) for ids in everything])
        with torch.no_grad():
            logprobs = (model(padded).logits.double() / temperature).log_softmax(-1)[:, len(before) - 1 :].numpy()
        each = [logprobs[row, range(len(ids)), ids].sum() for row, ids in enumerate(everything)]
        own = everything.index(canonical)
        exact = np.logaddexp.reduce(each) - each[own]
        rows = logprobs[own, : len(canonical)]
        continuations = vocabulary.continuations(canonical)
        estimate = other_segmentations(predictions_of(rows, canonical, rows.shape[1]), continuations)
        # The definition: at each token, the ids whose bytes begin the rest of the text.
        expected = []
        for at, id_ in enumerate(canonical):
            rest = tokenizer.decode_bytes(canonical[at:-1])
            others = [other for piece, ids in entries.items() if piece and rest.startswith(piece) for other in ids]
            p = np.exp(rows[at])
            expected.append(np.log(1 + sum(p[other] for other in others if other != id_) / p[id_]))
        assert estimate == pytest.approx(expected, rel=1e-4, abs=1e-9)
        # The rest of the text is at most as probable after another id as after the canonical one, which the model was
        # trained on. So the estimate is an upper bound; float32 logprobs add 1e-6.
        assert -1e-6 <= exact <= estimate.sum() + 1e-6
        assert estimate.sum() > (1e-6 if temperature == 1 else 1e-3)
        # With a list of 20, an id that is not listed counts as the last one.
        assert other_segmentations(predictions_of(rows, canonical, 20), continuations).sum() >= estimate.sum() - 1e-9
        compared += len(everything) > 2
    assert compared >= 4


def test_the_estimate_is_exact_if_the_rest_is_as_probable():
    # After each of three first ids the rest is certain, as in a model that forgets how the text was divided.
    with np.errstate(divide="ignore"):
        rows = np.log(np.array([[0.5, 0.3, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]]))
    predictions = predictions_of(rows, [0, 3], 4)
    nats = other_segmentations(predictions, Ragged(np.array([0, 3, 4]), np.array([0, 1, 2, 3])))
    assert nats == pytest.approx([np.log(0.9 / 0.5), 0.0])


def test_continuations_are_all_ids_that_begin_the_rest_of_the_text(tokenizer, entries, loaded):
    vocabulary = Vocabulary(tokenizer)
    [mark], [space] = entries[b"?"], entries[b" "]
    ids = [*entries[b"price"], mark, space, *entries[b"s"], loaded[1].eos_token_id]
    rows = vocabulary.continuations(ids)
    texts = [
        sorted(tokenizer.decode_bytes([id_]) for id_ in rows.values[start:end].tolist())
        for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
    ]
    prefixes = [b"price"[:length] for length in range(1, 6) if b"price"[:length] in entries]
    assert prefixes[0] == b"p"
    assert len(prefixes) > 1
    assert b" s" in entries  # the two tokens before the last are one entry of the vocabulary
    assert texts == [prefixes, [b"?"], [b" ", b" s"], [b"s"], [tokenizer.decode_bytes([loaded[1].eos_token_id])]]
    assert all((np.diff(rows.values[a:b]) > 0).all() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True))


def test_special_and_added_tokens_are_no_part_of_texts(tokenizer, loaded):
    vocabulary = Vocabulary(tokenizer)
    for content, added in ((t.content, id_) for id_, t in loaded[1].added_tokens_decoder.items()):
        # As ordinary text, its letters are not the added token, and the token itself has no other ids.
        letters = [
            id_
            for byte in content.encode()
            for id_ in vocabulary.continuations(
                loaded[1](chr(byte), add_special_tokens=False)["input_ids"]
            ).values.tolist()
        ]
        assert tokenizer.decode_bytes(letters) == content.encode()
        assert added not in vocabulary.continuations(letters).values
        assert vocabulary.continuations([added]).values.tolist() == [added]
        # It ends the text before it: the two parts have no common id.
        split = vocabulary.continuations([letters[0], added, *letters[1:]])
        assert split.values[: split.offsets[1]].tolist() == [letters[0]]
