"""A conversation that begins with the assistant: its first message was not sampled, it is text of the prompt."""

import tracegrad as tg

MODEL = "examples/quickstart/model"
GREETING = {"role": "assistant", "content": "Hi, I am a bot."}
USER, ANSWER = {"role": "user", "content": "yo"}, {"role": "assistant", "content": "no"}
PROMPT = "<|im_start|>assistant\nHi, I am a bot.<|im_end|>\n<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n"


def parted(record, tokenizer, **options):
    """What is given and what is trained, as texts."""
    sequences = tg.align(tg.Traces.from_records([record]), tokenizer, **options)
    pairs = list(zip(sequences.ids, sequences.trainable, strict=True))
    return tuple(
        tokenizer.decode([int(i) for i, trained in pairs if bool(trained) is which]) for which in (False, True)
    )


def test_a_greeting_is_given_and_the_answer_behind_it_is_trained(tokenizer):
    record = {"reward": 1, "messages": [GREETING, USER, ANSWER]}
    assert parted(record, tokenizer, text_only=True) == (PROMPT, "no<|im_end|>")
    [trace] = tg.Traces.from_records([record])
    assert [turn.message for turn in trace.generations] == [2]


def test_with_tokens_of_the_answer(tokenizer):
    ids = [*map(int, tokenizer.encode("no")), 2]
    answer = {**ANSWER, "token_ids": ids, "logprobs": [-0.1] * len(ids)}
    assert parted({"reward": 1, "messages": [GREETING, USER, answer]}, tokenizer) == (PROMPT, "no<|im_end|>")


def test_as_a_request_and_its_response(tokenizer):
    choice = {"index": 0, "finish_reason": "stop", "message": ANSWER}
    record = {"reward": 1, "request": {"messages": [GREETING, USER]}, "response": {"choices": [choice]}}
    assert parted(record, tokenizer, text_only=True) == (PROMPT, "no<|im_end|>")


def test_two_greetings(tokenizer):
    more = "<|im_start|>assistant\nHi, I am a bot.<|im_end|>\n"
    record = {"reward": 1, "messages": [GREETING, GREETING, USER, ANSWER]}
    assert parted(record, tokenizer, text_only=True) == (more + PROMPT, "no<|im_end|>")


def test_a_greeting_with_tokens_and_no_prompt_is_held(tokenizer):
    ids = [*map(int, tokenizer.encode(GREETING["content"])), 2]
    said = {**GREETING, "token_ids": ids, "logprobs": [-0.1] * len(ids)}
    record = {"reward": 1, "messages": [said, USER, ANSWER]}
    sequences = tg.align(tg.Traces.from_records([record]), tokenizer, text_only=True)
    trained = [int(i) for i, one in zip(sequences.ids, sequences.trainable, strict=True) if one]
    assert tokenizer.decode(trained) == "no<|im_end|>"
    assert sequences.alignment_report.table()["R31 prompt_mismatch"]["tokens"] == len(ids)


def test_what_follows_a_system_message_was_sampled(tokenizer):
    record = {"reward": 1, "messages": [{"role": "system", "content": "s"}, GREETING, USER, ANSWER]}
    assert parted(record, tokenizer, text_only=True)[1] == "Hi, I am a bot.<|im_end|>no<|im_end|>"
