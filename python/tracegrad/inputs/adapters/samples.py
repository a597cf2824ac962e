"""One prompt with several answers: lists of answers, and of rewards and whatever else stands beside them.

Each answer is a trace of one group. Of a list beside the answers that is as long as they are, each takes its own value.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat, paths
from tracegrad.inputs.adapters import fitting, pairs

ANSWERS = ("completions", "responses", "outputs", "answers", "generations", "samples", "candidates", "choices")
_TEXTS = ("text", "content", "completion", "response", "output", "answer", "generation")


def of_samples(record: Any) -> list[dict[str, Any]] | None:
    """One trace for each answer of a prompt with a list of them; None of others.

    Raises:
        Unfit: if what stands beside them fits no answer, or they share too much.
    """
    answers = _of(record) if isinstance(record, Mapping) else ""
    if not answers or (asked := _asked(record, answers)) is None:
        return None
    prompt = chat.under(record.get("system"), pairs.messages_of(record[asked], "user"))
    told = rows(record, len(record[answers]), (asked, answers, "system"), prompt)
    group, given = pairs.group_of(record, prompt), chat.given(prompt)
    made = []
    for (row, of_answer), answer in zip(told, record[answers], strict=True):
        if answer is None:
            made.append(fitting.failed_call(row, "null stands where an answer of the model should be"))
            continue
        own, text = {}, answer
        if isinstance(answer, Mapping) and "role" not in answer:
            key = next(name for name in _TEXTS if pairs.is_said(answer.get(name)))
            own, text = chat.without(answer, key), answer[key]
        said = pairs.messages_of(text, "assistant")
        of_own = {name: own.pop(name) for name in chat.OF_ANSWER if name in own}
        said[-1:] = [{**of_answer, **said[-1], **of_own}]
        made.append({"group": group, **row, **_rewarded(own), "messages": [*given, *said]})
    return made


def _asked(record: Mapping[str, Any], answers: str) -> str | None:
    """The key of the prompt: messages where there are any, and they end before an answer."""
    if "messages" in record:
        return "messages" if pairs.asks(record["messages"], answers) else None
    return next((name for name in (*pairs.PROMPTS, "prompts") if pairs.is_said(record.get(name))), None)


def _of(record: Mapping[str, Any]) -> str:
    """The key of the answers, "" where there are none."""
    for name in ANSWERS:
        answers = record.get(name)
        answers = answers if isinstance(answers, list) else []
        known = [each for each in answers if each is not None]
        if not known or not all(map(_is_answer, known)):
            continue
        if name != "choices" or _are_sampled(record, answers):
            return name
    return ""


def _are_sampled(record: Mapping[str, Any], choices: list[Any]) -> bool:
    """Whether choices are what a model gave, and not those of a question: they are objects, or each has a reward."""
    rewards = (record.get(key) for key in ("reward", "rewards", "score", "scores"))
    are_objects = all(isinstance(each, Mapping) for each in choices)
    return are_objects or any(is_of_each("reward", each, len(choices)) for each in rewards)


def _is_answer(value: Any) -> bool:
    if isinstance(value, Mapping) and "role" not in value:
        return any(pairs.is_said(value.get(name)) for name in _TEXTS)
    return pairs.is_said(value)


def rows(
    record: Mapping[str, Any], count: int, used: tuple[str, ...], given: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the record says of each answer, and what of it goes on the answer: its own values of lists, and all else.

    Args:
        used: keys that the caller takes.
        given: what each trace has of these.
    """
    of_answers = _of_answers(record, count)
    rest = chat.without(record, *used, *chat.OF_ANSWER)
    lists = {key for key, value in rest.items() if is_of_each(key, value, count)}
    lists |= {"id"} if isinstance(rest.get("id"), list) and len(rest["id"]) == count else set()
    for key in ("reward", "rewards"):
        if isinstance(rest.get(key), list) and key not in lists:
            raise fitting.unequal(key, rest[key], count)
    fitting.bounded(count, (given, chat.without(rest, *lists)))
    told = []
    for at in range(count):
        row = {key: value[at] if key in lists else part(value, at, count) for key, value in rest.items()}
        name = {"id": f"{row['id']}-{at}"} if isinstance(row.get("id"), (str, int)) and "id" not in lists else {}
        told.append((_rewarded({**row, **name}), of_answers[at]))
    return told


def part(value: Any, at: int, count: int, depth: int = 0) -> Any:
    """An object with, of lists in it that have one value for each of so many answers, the value of one.

    >>> part({"by": "x", "right": [True, False]}, 1, 2)
    {'by': 'x', 'right': False}
    """
    if not isinstance(value, Mapping) or depth == paths.DEEPEST:
        return value
    made = {
        key: each[at] if is_of_each(key, each, count) else part(each, at, count, depth + 1)
        for key, each in value.items()
    }
    return made if any(made[key] is not each for key, each in value.items()) else value


def _of_answers(record: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """What goes on the message of each answer: its ids, their logprobs, why it ended."""
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in chat.OF_ANSWER:
        value = record.get(name)
        if value is None:
            continue
        if (name == "finish_reason" and isinstance(value, str)) or (name == "prompt_token_ids" and _are_ids(value)):
            fitting.bounded(count, value)
            values = [value] * count
        elif _has_each(name, value) and len(value) == count:
            values = value
        elif count == 1 and not _has_each(name, value):
            values = [value]
        else:
            raise fitting.unequal(name, value, count)
        for said, each in zip(found, values, strict=True):
            said |= {} if each is None else {name: each}
    return found


def _has_each(name: str, value: Any) -> bool:
    """Whether a value is a list of what answers have, and not what one of them has."""
    if not isinstance(value, list) or not value:
        return False
    wanted = str if name == "finish_reason" else (list, Mapping)
    return all(each is None or (isinstance(each, wanted) and "logprob" not in chat.table(each)) for each in value)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def is_of_each(key: str, value: Any, count: int) -> bool:
    """Whether a value is a list of as many numbers, or of words that are ones, or under a name of rewards of objects
    that have these; null stands for one that is not known.
    """
    if not isinstance(value, list) or len(value) != count:
        return False
    known = [each for each in value if each is not None]
    if paths.REWARD.search(str(key)) and all(isinstance(each, Mapping) for each in known):
        return bool(known) and all(any(map(_is_verdict, each.values())) for each in known)
    return bool(known) and all(map(_is_verdict, known))


def _is_verdict(value: Any) -> bool:
    return paths.verdict(value) is not None


def _rewarded(row: dict[str, Any]) -> dict[str, Any]:
    """With `reward` as a number, where `reward` or `rewards` is one, or a number as text."""
    for key in ("reward", "rewards"):
        if key in row and (found := paths.number(row[key])) is not None:
            row = {**chat.without(row, key), "reward": found}
    return row
