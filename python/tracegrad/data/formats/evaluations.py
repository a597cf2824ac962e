"""Convert reports of garak and details of lighteval: one trace for each generation of a prompt, as text.

Records of OpenAI's evals, HELM, MT-Bench and alpaca_eval are recognized and refused, with the reason.

Source: garak 0.17.1 `attempt.py` (lines of `*.report.jsonl`; a detector's score of 1 is a successful attack); lighteval
0.13 `logging/info_loggers.py` (Detail: rows of `details/**/*.parquet`) and `models/model_output.py`; evals 3.0
`record.py`, crfm-helm 0.5 `scenario_state.py`, fschat 0.2 `gen_model_answer.py` and `gen_judgment.py`, alpaca_eval 0.6.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import record_fields
from tracegrad.data.formats.record_fields import Converted

GARAK_KEYS, LIGHTEVAL_KEYS = ("entry_type",), ("model_response", "config_general")
_OTHER_ENTRIES = ("start_run setup", "init", "completion", "digest", "eval", "payload_init", "plugin_cache")
_OTHER_ENTRIES += ("probe_summary",)
_COMPLETE = 2
_FIX = 'Leave such records out: on_error="skip"'


def of_garak(record: Any) -> list[dict[str, Any]] | None:
    """Convert a complete attempt to one trace per generation, which form a group; no trace for other lines of a report.

    The rewards are 1 minus the score of each detector, named `DETECTOR.resisted`. None for other records.

    Raises:
        BadValueError: if a message has no text, or a detector does not have one score per generation.
    """
    kind = chat.as_mapping(record).get("entry_type")
    if kind in _OTHER_ENTRIES:
        return []
    if kind != "attempt" or not isinstance(record.get("conversations"), list):
        return None
    converted = Converted()
    if record.get("status") != _COMPLETE:
        converted.left_out["attempts before their detectors; a later line has those that are complete"] += 1
        return converted
    conversations = [_turns(each) for each in record["conversations"]]
    scores = chat.as_mapping(record.get("detector_results"))
    for name, values in scores.items():
        if not isinstance(values, list) or len(values) not in (0, len(conversations)):
            raise record_fields.length_refusal(str(name), values, len(conversations), "generations")
    prompt = _turns(record.get("prompt"))
    shared = {"group": record.get("uuid"), "metadata": chat.pick(record, ("probe_classname", "goal", "intent"))}
    for index, turns in enumerate(conversations):
        answers = turns[len(prompt) :]
        if turns[: len(prompt)] != prompt or not answers or answers[-1]["role"] != "assistant":
            converted.left_out["conversations that do not continue their prompt with an answer"] += 1
            continue
        if answers[-1]["content"] is None:
            converted.left_out["generations without an answer"] += 1
            continue
        if any(turn["content"] is None for turn in turns):
            raise BadValueError(("a turn has no text", "Only texts are read, not files or images", _FIX))
        numbers = {name: values[index] for name, values in scores.items() if values}
        rewards = {f"{name}.resisted": 1.0 - float(each) for name, each in numbers.items() if each is not None}
        messages = [*chat.mark_not_sampled(prompt), *answers]
        converted.append({"id": f"{record.get('uuid')}-{index}", **shared, "rewards": rewards, "messages": messages})
    return converted


def _turns(conversation: Any) -> list[dict[str, Any]]:
    """Return the turns of a conversation. A turn with a file has no content."""
    turns = record_fields.require_list(chat.as_mapping(conversation).get("turns"), "turns")
    contents = [chat.as_mapping(turn["content"]) for turn in turns]
    texts = [None if content.get("data_path") else content.get("text") for content in contents]
    return [{"role": turn["role"], "content": text} for turn, text in zip(turns, texts, strict=True)]


def of_lighteval(record: Any) -> list[dict[str, Any]] | None:
    """Convert a row of details to one trace per generated text, which form a group; None for other records.

    The metrics are rewards if there is one text. Otherwise they are of all texts, and left out.

    Raises:
        BadValueError: if texts were generated for an input that is not a list of messages.
    """
    fields = chat.as_mapping(record)
    if "config_general" in fields and "results" in fields:
        return []
    document, response = fields.get("doc"), fields.get("model_response")
    if not (isinstance(document, Mapping) and isinstance(response, Mapping) and "metric" in fields):
        return None
    converted = Converted()
    texts, messages = record_fields.require_list(response.get("text"), "text"), response.get("input")
    if "GENERATIVE" not in (document.get("sampling_methods") or ()) or not texts:
        converted.left_out["rows without a generated text"] += 1
        return converted
    if not chat.is_messages(messages):
        problem = f"the input of the model is {json_path.describe_type(messages)}, not a list of messages"
        raise BadValueError((problem, "Which messages the text was made from is not known", _FIX))
    prompt = chat.mark_not_sampled([chat.pick(each, each) for each in messages])
    name = f"{document.get('task_name')}-{document.get('id')}"
    metrics = {key: json_path.number(value) for key, value in chat.as_mapping(fields["metric"]).items()}
    rewards = {key: value for key, value in metrics.items() if value is not None}
    if rewards and len(texts) > 1:
        converted.left_out["rows with metrics of all their texts, which are the reward of none"] += 1
        rewards = {}
    for index, text in enumerate(texts):
        shared = {"id": f"{name}-{index}", "group": name, **({"rewards": rewards} if rewards else {})}
        shared |= {"metric": None} if len(texts) > 1 else {}  # It must not be mapped as the reward of each text.
        converted.append({**shared, "messages": [*prompt, {"role": "assistant", "content": text}]})
    return converted


_CONVERT = "Write lines such as {}, and check the result"
_UNREAD: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("event_id", "data.prompt", "data.sampled"),
        "an event of OpenAI's evals: the prompt is in data.prompt, the answer in data.sampled. Calls of a judge "
        "have the same form and differ only in data.model",
        _CONVERT.format('{"prompt": data.prompt, "response": data.sampled[0]} of the events of your model'),
    ),
    (
        ("adapter_spec", "request_states"),
        "a scenario state of HELM: prompts are in request_states[].request.prompt, answers in result.completions[]. It "
        "does not say if a prompt was sent as a text or as a message of the user",
        _CONVERT.format('{"messages": [{"role": "user", "content": prompt}], "response": text} if it was a message'),
    ),
    (
        ("question_id", "model_id", "choices"),
        "answers of MT-Bench: choices[].turns are the answers to the turns of question.jsonl with this question_id",
        _CONVERT.format('{"messages": [question, answer, question, answer], "group": question_id}'),
    ),
    (
        ("question_id", "judge", "judgment"),
        "a judgment of MT-Bench: the prompt and answer in it are those of the judge, and not of the judged model",
        "Take its score as the reward of the answer with this question_id and turn",
    ),
    (
        ("instruction", "output_1", "output_2", "preference"),
        "a comparison of alpaca_eval: output_2 is the answer of generator_2 to instruction, output_1 that of another "
        "model, and preference (1 to 2) is the judge's",
        _CONVERT.format('{"prompt": instruction, "response": output_2, "reward": preference - 1}'),
    ),
)
"""Records of evaluations that are not read: (paths that they have, what they are, what to do)."""


_WITHOUT_CALL = (
    *(("spec.eval_name", "spec.run_id"), ("final_report", "run_id")),
    *(("scenario_spec", "adapter_spec", "metric_specs"), ("definition_path", "description", "tags")),
    *(("name.name", "count", "sum_squared"), ("instance_id", "train_trial_index", "stats")),
    ("question_id", "category", "turns"),
)
"""Paths of other records of evals, HELM and MT-Bench: settings, statistics and questions."""


def of_harness(record: Any) -> list[dict[str, Any]] | None:
    """Return no records for the settings, statistics and questions of a harness; None for records of others.

    Raises:
        BadValueError: for a record whose calls cannot be told from others, with what it is and how to convert it.
    """
    if not isinstance(record, Mapping):
        return None
    for paths, description, fix in _UNREAD:
        if _has_all(record, paths):
            raise BadValueError((f"it is {description}", "It is not read", fix))
    return [] if any(_has_all(record, paths) for paths in _WITHOUT_CALL) else None


def _has_all(record: Mapping[str, Any], paths: tuple[str, ...]) -> bool:
    return all(chat.get_path(record, path) is not None for path in paths)
