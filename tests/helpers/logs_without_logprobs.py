"""Logs of the example without logprobs or without ids, and logs that the example's model samples otherwise."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import safetensors.numpy

import rollout
import task
import tracegrad as tg


def records_of(example, limit, skip=0):
    """Return the first records of the example's log."""
    return [json.loads(trace.record) for trace in tg.read(example / "traces.jsonl.zst", limit=skip + limit)[skip:]]


def entries_of(record):
    """Return the entries of all sampled tokens of a record."""
    calls = [call["response"]["choices"][0] for call in record.get("calls", ())]
    outputs = calls + [message for message in record.get("messages", ()) if message.get("logprobs")]
    return [entry for output in outputs for entry in output["logprobs"]["content"]]


def without_logprobs(record):
    """Return a copy with null for each logprob; the ids stay."""
    record = copy.deepcopy(record)
    for entry in entries_of(record):
        entry["logprob"] = None
    return record


def text_only(record):
    """Return a copy with the text of the messages alone."""
    record = copy.deepcopy(record)
    for call in record.get("calls", ()):
        del call["response"]["choices"][0]["logprobs"]
        for holder in call["response"], call["response"]["choices"][0]:
            holder.pop("token_ids", None)
            holder.pop("prompt_token_ids", None)
    for message in record.get("messages", ()):
        message.pop("logprobs", None)
    return record


def write_records(path: Path, records) -> Path:
    """Write records as JSONL, and return the path."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def sampled_log(loaded, count, *, temperature=1.0, top_p=1.0, seed=0, recorded=None):
    """Sample one turn for each of some prompts, and return (records without logprobs, sampled turns).

    Args:
        loaded: the model and tokenizer.
        count: number of prompts.
        temperature, top_p: of the sampler.
        seed: of the prompts and the sampler.
        recorded: sampling options of the requests, in place of those of the sampler; None leaves one out.
    """
    model, tokenizer = loaded
    prompts = list(itertools.islice(task.prompts("evaluation", seed), count))
    texts = [rollout.render(tokenizer, prompt.messages()) for prompt in prompts]
    generator = rollout.torch.Generator().manual_seed(seed)
    turns = rollout.sample(model, tokenizer, texts, temperature, generator, top_p=top_p)
    options = {"temperature": temperature, "top_p": top_p} | (recorded or {})
    options = {name: value for name, value in options.items() if value is not None}
    records = []
    for number, (prompt, turn) in enumerate(zip(prompts, turns, strict=True)):
        message = rollout.assistant_message(tokenizer.decode(turn.text_ids), turn.ended, 0)
        finish = message.pop("finish_reason")
        choice = {"index": 0, "message": message, "token_ids": turn.ids, "finish_reason": finish}
        request = {"model": "clerk", "messages": prompt.messages(), "tools": list(task.TOOLS), **options}
        call = {"request": request, "response": {"choices": [choice]}}
        records.append({"id": f"sampled-{number}", "reward": 1.0, "calls": [call]})
    return records, turns


def other_weights(source: Path, folder: Path, factor: float) -> Path:
    """Copy a model with the weights of its last norm multiplied, which scales its logits, and return the folder."""
    shutil.copytree(source, folder)
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * factor
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
