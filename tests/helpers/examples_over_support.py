"""Compare the logprobs of an example's padded rows with those of packed rows, for tokens with a support.

python tests/helpers/examples_over_support.py skyrl_batch_from_traces examples/quickstart

It runs in a process of its own, because ART patches transformers in those that import it.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

import tracegrad as tg
from truncated import restricted

TRACES = 8


def packed_logprobs(sequences, model):
    """Return [T]: logprobs of the trained tokens on packed rows, over their support."""
    [step] = tg.pack(sequences, np.zeros(sequences.traces), tokens_per_row=4096)
    logprobs = np.full(sequences.tokens, np.nan, np.float32)
    for batch in step.batches:
        with torch.no_grad():
            logprobs[step.origin[batch.term]] = tg.model.logprobs(model, batch).numpy()
    return logprobs


def compare(name: str, example: Path) -> float:
    """Return the largest difference of the trained tokens. Rows end with the last token, or are padded after it."""
    sys.path.insert(0, str(example.parent / "trainers"))
    script = importlib.import_module(name)
    traces, folder = str(example / "traces.jsonl.zst"), str(example / "model")
    data = restricted(tg.align(tg.read(traces, limit=TRACES), tg.Tokenizer.from_pretrained(folder)), vocabulary=600)
    model, rows = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    compute = script.token_logprobs

    def token_logprobs(model, ids, attention, *arguments):
        logprobs = compute(model, ids, attention, *arguments)
        rows.append((attention.numpy() > 0, logprobs.detach().numpy()))
        return logprobs

    script.token_logprobs, tg.align = token_logprobs, lambda *_: data
    script.train(traces, folder, 1, rows_per_step=data.branches)
    expected, (attention, found) = packed_logprobs(data, model), rows[0]
    gaps = []
    for branch in range(data.branches):
        start, end = data.cu_seqlens[branch : branch + 2]
        terms = np.flatnonzero(data.trainable[start:end])
        first = int(np.argmax(attention[branch])) - (attention.shape[1] - found.shape[1])
        gaps.append(np.abs(found[branch, first + terms] - expected[start + terms]))
    return float(np.concatenate(gaps).max())


if __name__ == "__main__":
    print(compare(sys.argv[1], Path(sys.argv[2])))
