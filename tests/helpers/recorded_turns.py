"""Make records of drawn turns over the example's vocabulary."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from vocabulary import EXAMPLE, load, record, said, user

EOS = 2

TOKENIZER = load(EXAMPLE)

QUIET = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))

TOKENS = st.integers(3, 633)

BYTES = st.integers(3, 258)

turns = st.lists(st.lists(st.one_of(TOKENS, BYTES), max_size=12).map(lambda ids: [*ids, EOS]), min_size=1, max_size=4)


def content(ids):
    """What a server's text is: without special tokens, cut characters as U+FFFD, none waiting at the end."""
    return TOKENIZER.decode([i for i in ids if i != EOS])


def trace(generated, **changes):
    """A chat of these turns with their ids, and the prompt ids of each."""
    messages, history = [], []
    for number, ids in enumerate(generated):
        messages.append(user(f"question {number}"))
        opening = "<|im_start|>user\n" + f"question {number}<|im_end|>\n<|im_start|>assistant\n"
        history += [*(TOKENIZER.encode("\n") if number else []), *TOKENIZER.encode(opening)]
        prompt = [int(i) for i in history]
        messages.append(said(content(ids), ids, prompt_token_ids=prompt, logprobs=values(number, ids)))
        history += ids
    return record(*messages, **changes)


def values(number, ids):
    """A logprob that names its token: turn, place and id."""
    return [-(number + 1) - k / 64 - i / 65536 for k, i in enumerate(ids)]
