"""Pieces of a text that have other ids alone than in their place.

transformers tokenizes the whole text. What `align`, text-only training and `Conversation` put together is the same.
"""

from itertools import pairwise

import pytest

import tracegrad as tg
from made_tokenizers import KINDS, built

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

USER = ["What is 2+2?", "What?", "And ten, then?"]
ANSWER = ["It is 4", "4", "ten is ten"]
SHAPES = {
    "llama2": "{{ bos_token }}{% for m in messages %}{% if m.role=='user' %}{% if not loop.first %} {% endif %}[INST] "
    "{{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "llama2 without a space": "{{ bos_token }}{% for m in messages %}{% if m.role=='user' %}[INST] {{ m.content }} "
    "[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
}
CASES = [(kind, shape, False) for kind in KINDS for shape in SHAPES] + [("first", "zephyr", True)]


@pytest.fixture(params=CASES, ids=str)
def case(request, tmp_path):
    kind, shape, rstrip = request.param
    built(kind, tmp_path, rstrip)
    (tmp_path / "chat_template.jinja").write_text(SHAPES[shape])
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    return tg.Tokenizer.from_pretrained(tmp_path), theirs, kind, shape


def talk(count):
    messages = []
    for user, answer in zip(USER, ANSWER, strict=True):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return messages[:count]


def prompt_of(theirs, count):
    return list(theirs.apply_chat_template(talk(count), tokenize=True, add_generation_prompt=True, return_dict=False))


def turns_of(theirs):
    """The ids of the whole conversation, and where each turn's sampled ids, its stop token among them, are in them."""
    whole = list(theirs.apply_chat_template(talk(6), tokenize=True, return_dict=False))
    spans = []
    for count in (1, 3, 5):
        start = len(prompt_of(theirs, count))
        spans.append((start, whole.index(2, start) + 1))
    return whole, spans


def test_what_is_put_together_of_pieces_is_what_the_whole_text_gives(case):
    ours, theirs, _, _ = case
    whole, spans = turns_of(theirs)
    messages = talk(6)
    for n, (start, end) in enumerate(spans):
        assert prompt_of(theirs, 2 * n + 1) == whole[:start]
        logprobs = [-0.1 * (n + 1)] * (end - start)
        messages[2 * n + 1] = {**messages[2 * n + 1], "token_ids": whole[start:end], "logprobs": logprobs}
    sequences = tg.align(tg.Traces.from_records([{"group": "g", "reward": 1.0, "messages": messages}]), ours)
    end = spans[-1][1]
    assert sequences.ids.tolist()[:end] == whole[:end]
    assert sequences.alignment_report.table() == {}
    assert [n for n, trained in enumerate(sequences.trainable) if trained] == [
        n for span in spans for n in range(*span)
    ]


def test_a_conversation_gives_the_prompts_that_a_server_gives(case):
    ours, theirs, _, _ = case
    whole, spans = turns_of(theirs)
    conversation = tg.Conversation(ours, talk(1))
    for n, (start, end) in enumerate(spans):
        assert [int(i) for i in conversation.prompt_ids()] == whole[:start]
        conversation.append(whole[start:end])
        conversation.append(talk(2 * n + 3)[2 * n + 2 :])
    assert not conversation.forks


def test_text_only_training_has_the_ids_of_the_whole_text(case):
    ours, theirs, kind, shape = case
    whole, spans = turns_of(theirs)
    sequences = tg.align(tg.Traces.from_records([{"reward": 1.0, "messages": talk(6)}]), ours, text_only=True)
    end = spans[-1][1]
    assert sequences.ids.tolist()[:end] == whole[:end], (kind, shape)
    assert [n for n, trained in enumerate(sequences.trainable) if trained] == [
        n for span in spans for n in range(*span)
    ]


def test_recorded_ids_in_between_go_on_in_their_branch(case):
    """The second turn has its prompt's ids, the others have none."""
    ours, theirs, _, _ = case
    whole, spans = turns_of(theirs)
    messages = talk(6)
    for n, (start, end) in enumerate(spans):
        more = {"prompt_token_ids": whole[:start]} if n == 1 else {}
        messages[2 * n + 1] = {
            **messages[2 * n + 1],
            "token_ids": whole[start:end],
            "logprobs": [-0.5] * (end - start),
            **more,
        }
    sequences = tg.align(tg.Traces.from_records([{"reward": 1.0, "messages": messages}]), ours)
    end = spans[-1][1]
    assert sequences.ids.tolist()[:end] == whole[:end]
    assert sequences.alignment_report.table() == {}


def test_sampled_ids_that_no_tokenizer_would_give_stay_and_the_rest_is_as_in_its_place(case):
    ours, theirs, _, _ = case
    whole, spans = turns_of(theirs)
    (start, end), (second, _) = spans[:2]
    canonical = whole[start:end]
    # One token is cut into the letters of which it is made.
    odd = []
    for n in canonical:
        letters = [theirs.convert_tokens_to_ids(each) for each in theirs.convert_ids_to_tokens(n)] if n > 258 else [n]
        odd += letters
    conversation = tg.Conversation(ours, talk(1))
    conversation.prompt_ids()
    conversation.append(odd)
    conversation.append(talk(3)[2:])
    assert [int(i) for i in conversation.prompt_ids()] == whole[:start] + odd + whole[end:second]


def test_a_text_that_is_joined_with_what_was_sampled_is_a_finding(tmp_path):
    """The template closes with a letter that the tokenizer joins with the last sampled one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<unk>", "<s>", "</s>", "▁", *"abcx\n]."]
    pairs = [(left, "x") for left in "abc\n]."] + [("a", "b")]
    vocab = {token: n for n, token in enumerate([*tokens, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in ("<s>", "</s>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("<s>{% for m in messages %}{{ m.content }}x{% endfor %}")
    ours = tg.Tokenizer.from_pretrained(tmp_path)
    id_of = vocab
    # b and the x behind it are one token of the whole text; so are each of the texts that could stand in for b.
    assert [int(i) for i in ours.encode("<s>axbx")] == [id_of["<s>"], id_of["ax"], id_of["bx"]]
    turn = {
        "role": "assistant",
        "content": "b",
        "token_ids": [id_of["b"]],
        "logprobs": [-0.5],
        "finish_reason": "length",
    }
    last = {**turn, "content": "c", "token_ids": [id_of["c"]]}
    user = {"role": "user", "content": "a"}
    sequences = tg.align(tg.Traces.from_records([{"reward": 1.0, "messages": [user, turn, user, last]}]), ours)

    assert sequences.alignment_report.table()["R27 normalizer_changed"]["findings"] == 1
    conversation = tg.Conversation(ours, [user])
    conversation.prompt_ids()
    conversation.append([id_of["b"]])
    conversation.append([user])
    assert [int(i) for i in conversation.prompt_ids()] == [int(i) for i in ours.encode("<s>axbxax")]
    assert [fork.reason for fork in conversation.forks] == ["R27 normalizer_changed"]


def test_byte_level_tokenizers_are_encoded_apart():
    """The bundled one is: nothing of it is encoded twice."""
    ours = tg.Tokenizer.from_pretrained("examples/quickstart/model")
    assert ours._core.report["cache_disabled_reason"] is None
    for left, right in pairwise(["<|im_end|>", "\n<|im_start|>user\n", "hello", "<|im_end|>"]):
        assert ours.encode(left + right).tolist() == [*ours.encode(left).tolist(), *ours.encode(right).tolist()]
