"""The prompts of conversations that are being played: beside transformers' on real templates, and what align makes of
the calls that were recorded with them."""

import copy
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import tracegrad as tg
from template_cases import CONVERSATIONS, TOKENS, TOOLS, theirs
from tracegrad.errors import ArgumentError, TemplateError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
FOLDERS = [Path(__file__).parents[up] / "shared" / "data" / "templates" for up in (3, 4)]
TEMPLATES = next((sorted(folder.glob("*/*.jinja")) for folder in FOLDERS if folder.is_dir()), [])
# What templates write as special tokens: <|im_end|>, <｜User｜>, <start_of_turn>, [INST], </s>.
SPECIAL = re.compile(
    r"<[|｜][^|｜<>\s]{1,40}[|｜]>|</?\|?[A-Za-z_][\w:]{0,20}\|?>|\[/?[A-Z_]{3,20}\]|\]~b\]|\]~!b\[|\[e~\["
)
BODY = "what the assistant says"
PLAYED = {name: talk for name, talk in CONVERSATIONS.items() if any(one["role"] == "assistant" for one in talk)}
DATE = {"strftime_now": "2025-03-07", "date_string": "2025-03-07"}


def folder_of(source, folder):
    """The example's tokenizer with a template and the special tokens that the template writes."""
    told = json.loads((MODEL / "tokenizer.json").read_text())
    texts = {*SPECIAL.findall(source), *TOKENS.values()} - {one["content"] for one in told["added_tokens"]}
    first = 1 + max(told["model"]["vocab"].values(), default=0)
    first = max(first, *(one["id"] + 1 for one in told["added_tokens"]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    told["added_tokens"] += [{"id": first + n, "content": text, **flags} for n, text in enumerate(sorted(texts))]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    (folder / "chat_template.jinja").write_text(source)
    return folder


def play(talk, messages, sampled):
    """Messages appended one by one, those of the assistant with the ids that `sampled` gives; the prompts."""
    prompts = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            talk.append([message])
            continue
        prompts.append((at, talk.prompt_ids().tolist()))
        talk.append(sampled(at, prompts[-1][1]), message)
    prompts.append((len(messages), talk.prompt_ids().tolist()))
    return prompts


@pytest.mark.skipif(not TEMPLATES, reason="shared/data/templates is not there")
@pytest.mark.parametrize("one_of", [8, pytest.param(1, marks=pytest.mark.nightly)])
def test_prompts_are_those_of_transformers_where_what_was_sampled_is_canonical(tmp_path, one_of):
    outcomes = Counter()
    for number, path in enumerate(TEMPLATES[::one_of]):
        source = path.read_text(encoding="utf-8")
        (folder := tmp_path / str(number)).mkdir()
        folder_of(source, folder)
        hf = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **TOKENS)
        try:
            ours = tg.Tokenizer.from_pretrained(folder)
        except TemplateError:
            outcomes["no template"] += 1
            continue
        for name, messages in PLAYED.items():
            tools = TOOLS if any(one["role"] == "tool" for one in messages) else None
            outcomes[compared(hf, ours, source, copy.deepcopy(messages), tools, f"{path.stem}, {name}")] += 1
    print(dict(outcomes))
    assert outcomes["equal"] > 1000 // one_of
    assert outcomes["equal, forked"] > 100 // one_of


def compared(hf, ours, source, messages, tools, what):
    """Whether all prompts of a conversation are those that transformers makes of the messages before them."""

    def whole(count, prompt):
        text = theirs(hf, source, messages[:count], tools=tools, add_generation_prompt=prompt, **DATE)
        return None if text is None else hf(text, add_special_tokens=False)["input_ids"]

    said = theirs(hf, source, [{"role": "user", "content": "a"}, {"role": "assistant", "content": BODY}], **DATE) or ""
    closer = [] if BODY not in said else ours.encode(said[said.rindex(BODY) + len(BODY) :]).tolist()
    if not closer or not ours._core.is_special(closer[0]):
        return "no closing token"
    canonical = True

    def sampled(at, prompt):
        """The ids of the turn as the template writes it, with its closing token."""
        nonlocal canonical
        finished = whole(at + 1, False)
        if finished is None or finished[: len(prompt)] != prompt or closer[0] not in finished[len(prompt) :]:
            canonical = False
            return [*ours.encode(str(messages[at]["content"])).tolist(), closer[0]]
        return finished[len(prompt) : len(finished) - finished[::-1].index(closer[0])]

    try:
        talk = tg.Conversation(ours, [], tools, **DATE)
        prompts = play(talk, messages, sampled)
    except TemplateError:
        # Where ours cannot render a prefix of it, neither can they: PARITY.md says so for whole conversations.
        return "refused"
    expected = [whole(at, True) for at, _ in prompts]
    if canonical:
        assert [ids for _, ids in prompts] == expected, what
        return "equal, forked" if talk.forks else "equal"
    return "not canonical"


words = st.text(alphabet="ab e1€李\n{}", max_size=8)


@settings(max_examples=40)
@given(data=st.data())
def test_recorded_with_these_prompts_a_trace_is_one_branch_of_exactly_these_ids(tokenizer, data):
    stop = tokenizer.eos_ids[0]
    talk = tg.Conversation(tokenizer, [{"role": "user", "content": data.draw(words)}])
    calls, ids = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        prompt = talk.prompt_ids().tolist()
        assert prompt[: len(ids)] == ids
        # Any ids that are no special tokens, whatever bytes they spell; cut, or stopped by one of two tokens.
        drawn = data.draw(st.lists(st.integers(3, 639), max_size=6))
        drawn += data.draw(st.sampled_from([[], [stop], [0]])) or ([] if drawn else [stop])
        call = {"messages": talk.messages, "temperature": 1.0}
        talk.append(drawn)
        choice = {"message": talk.messages[-1], "token_ids": drawn, "finish_reason": "length"}
        choice["logprobs"] = {"content": [{"token": f"token_id:{one}", "logprob": -1.0} for one in drawn]}
        calls.append({"request": call, "response": {"prompt_token_ids": prompt, "choices": [choice]}})
        ids = prompt + drawn
        talk.append({"role": "user", "content": data.draw(words)})
    assert talk.forks == ()
    sequences = tg.align(tg.Traces.from_records([{"calls": calls}]), tokenizer)
    assert sequences.branches == 1
    assert sequences.ids.tolist() == ids
    assert set(sequences.alignment_report.table()) <= {
        "R01 noncanonical_bpe",
        "R03 lossy_text",
        "R07 stop_token_differs",
    } | {"R09 length_truncated", "R12 whitespace_trimmed"}
    # The same from the sampled ids alone: it is one splice.
    for call in calls:
        del call["response"]["prompt_token_ids"]
    spliced = tg.align(tg.Traces.from_records([{"calls": calls}]), tokenizer)
    assert (spliced.branches, spliced.ids.tolist()) == (1, ids)
    assert np.array_equal(spliced.source, sequences.source)


def test_a_template_that_drops_thoughts_forks_and_says_so(tmp_path):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tg.Tokenizer.from_pretrained(folder_of(source, tmp_path))
    talk = tg.Conversation(tokenizer, [{"role": "user", "content": "2+2?"}])
    [stop] = tokenizer.encode("<|im_end|>").tolist()
    talk.append([*tokenizer.encode("<think>two and two</think>4").tolist(), stop])
    talk.append([{"role": "user", "content": "Sure?"}])
    assert talk.prompt_ids().tolist() == tokenizer.render_ids(talk.messages, add_generation_prompt=True).tolist()
    assert [(fork.turn, fork.reason) for fork in talk.forks] == [(1, "R10 think_stripped")]
    talk.append([*tokenizer.encode("Yes").tolist(), stop]).append([{"role": "user", "content": "Ok"}])
    before = talk.prompt_ids().tolist()
    assert len(talk.forks) == 1
    assert tokenizer.decode(before).endswith("user\nOk<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "ids", [[5, -1], [5, 640], [5, 2**31], [5, 2**32 + 5], [5, -(2**40)], np.array([5, 2**63 - 1])]
)
def test_an_id_that_the_model_does_not_have_is_refused_where_it_stands(tokenizer, ids):
    talk = tg.Conversation(tokenizer, [{"role": "user", "content": "a"}])
    before = talk.prompt_ids().tolist()
    for message in (None, {"role": "assistant", "content": "b"}):
        with pytest.raises(ArgumentError) as caught:
            talk.append(ids, message)
        assert (caught.value.turn, caught.value.token) == (0, 1)
    assert (talk.prompt_ids().tolist(), len(talk)) == (before, 1)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("a text", "TG-ALIGN-006"),
        ([5.5], "TG-ARGS-010"),
        ([[5]], r"TG-ARGS-001.*\(1, 1\)"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], r"TG-ALIGN-504.*2"),
        ([{"role": "user", "content": "x"}, 7], r"TG-ALIGN-503.*2"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "TG-ALIGN-505.*image_url"),
        ([{"role": "user", "content": float("nan")}], "TG-BORDER-010"),
    ],
)
def test_what_is_neither_ids_nor_messages_is_refused_and_nothing_is_kept(tokenizer, said, words):
    talk = tg.Conversation(tokenizer, [{"role": "user", "content": "a"}])
    with pytest.raises(ArgumentError, match=words):
        talk.append(said)
    assert (len(talk), len(talk.messages)) == (1, 1)
    assert talk.prompt_ids().tolist() == tg.Conversation(tokenizer, talk.messages).prompt_ids().tolist()


def test_a_copy_goes_its_own_way(tokenizer):
    talk = tg.Conversation(tokenizer, [{"role": "user", "content": "a"}])
    other = copy.copy(talk).append([*tokenizer.encode("b").tolist(), *tokenizer.eos_ids])
    assert (len(talk), len(other)) == (1, 2)
    assert len(other.prompt_ids()) > len(talk.prompt_ids())


def test_tools_and_template_variables_are_the_templates(tokenizer):
    tools = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "a"}]
    with_tools = tg.Conversation(tokenizer, messages, tools).prompt_ids().tolist()
    assert with_tools == tokenizer.render_ids(messages, tools, add_generation_prompt=True).tolist()
    assert with_tools != tg.Conversation(tokenizer, messages).prompt_ids().tolist()


def test_a_template_that_raises_is_told_with_its_turn(tmp_path):
    source = (
        "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}{{ messages[0].content }}<|im_end|>"
    )
    tokenizer = tg.Tokenizer.from_pretrained(folder_of(source, tmp_path))
    talk = (
        tg.Conversation(tokenizer, [{"role": "user", "content": "a"}])
        .append([5])
        .append({"role": "user", "content": "b"})
    )
    with pytest.raises(TemplateError, match=r"TG-TEMPLATE-003.*long") as caught:
        talk.prompt_ids()
    assert caught.value.turn == 1
