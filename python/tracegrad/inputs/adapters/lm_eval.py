"""lm-evaluation-harness's samples: one line for each document, with what was asked and what the model gave.

Source: lm-eval 0.4 `evaluator_utils.py`, `evaluator.py` (rows of samples_TASK.jsonl). What was scored and not generated
(log-likelihoods) holds no call. Metrics stand in the row under the names in `metrics`.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat
from tracegrad.inputs.adapters import fitting
from tracegrad.inputs.adapters.loggers import opened
from tracegrad.inputs.adapters.pairs import is_said, messages_of


def of_sample(record: Any) -> list[dict[str, Any]] | None:
    """One trace for each answer of each request of a row of samples, asked by the messages of the chat template or by
    text as a user's; None of what is no such row.
    """
    if not (isinstance(record, Mapping) and all(sign in record for sign in ("doc_id", "arguments", "resps"))):
        return None
    asked = record["arguments"]
    requests = [*asked.values()] if isinstance(asked, Mapping) else fitting.listed(asked, "arguments")
    group = f"{record.get('task_name', 'doc')}-{record.get('prompt_hash', record['doc_id'])}"
    rest = {"group": group, **chat.without(record, "arguments", "resps", "filtered_resps")}
    made = []
    for request, answers in zip(requests, fitting.listed(record["resps"], "resps"), strict=False):
        parts = [*request.values()] if isinstance(request, Mapping) else fitting.listed(request, "arguments")
        prompt = _prompt(parts[0]) if parts else None
        told = chat.sampling(parts[1]) if len(parts) > 1 else {}
        texts = [text for text in fitting.listed(answers, "resps") if prompt is not None and isinstance(text, str)]
        made += [{**rest, **told, "messages": [*(prompt or []), messages_of(text, "assistant")[0]]} for text in texts]
    return made


def _prompt(value: Any) -> list[dict[str, Any]] | None:
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    value = opened(value)
    return messages_of(value, "user") if is_said(value) else None
