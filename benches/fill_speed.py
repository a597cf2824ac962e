"""Tokens per second of `tracegrad fill` beside transformers' forward pass over the same conversations, on one core.

    python benches/fill_speed.py --out benches/results/fill_speed.json --page docs/explanation/benchmarks.md

Both compute the logprob of every sampled token of the bundled conversations (groups of 8 with one prompt), with the
bundled model and with a random Qwen3 of 43 M parameters and 32,000 ids. transformers gets batches of conversations of
similar length, padded, of as many tokens as a packed row, and computes logits at the sampled tokens alone. The rows
alternate, and the median of the repeats counts. `fill` computes a common prefix of a row once; tokens are counted as
the conversations have them. The last column is the whole command, with reading twice,
the test, aligning and writing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tracegrad as tg
from tracegrad.missing_logprobs.model_scorer import ModelScorer

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
from page_table import put_table  # noqa: E402

COMMAND = "python benches/fill_speed.py --out benches/results/fill_speed.json"
ROW = 8192


def larger(folder: Path) -> Path:
    """Make a random model of 43 M parameters with the example's tokenizer."""
    torch.manual_seed(0)
    size = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=32_000, tie_word_embeddings=True, max_position_embeddings=1024, **size, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for path in QUICKSTART.joinpath("model").glob("*"):
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def padded_batches(sequences: tg.Sequences) -> list[np.ndarray]:
    """Branches in batches of similar length, of at most ROW tokens with padding."""
    lengths = np.diff(sequences.cu_seqlens)
    batches, current = [], []
    for branch in np.argsort(lengths, kind="stable").tolist():
        if current and lengths[branch] * (len(current) + 1) > ROW:
            batches.append(np.array(current))
            current = []
        current.append(branch)
    return [*batches, np.array(current)]


@torch.no_grad()
def by_transformers(model: torch.nn.Module, sequences: tg.Sequences) -> np.ndarray:
    """Logprobs of the trainable tokens by padded batches."""
    out = np.full(sequences.tokens, np.nan, np.float32)
    cu = sequences.cu_seqlens
    for batch in padded_batches(sequences):
        longest = int(max(cu[branch + 1] - cu[branch] for branch in batch))
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, branch in enumerate(batch):
            ids[row, : cu[branch + 1] - cu[branch]] = torch.from_numpy(sequences.ids[cu[branch] : cu[branch + 1]])
        hidden = model.model(ids).last_hidden_state
        for row, branch in enumerate(batch):
            own = np.flatnonzero(sequences.trainable[cu[branch] : cu[branch + 1]])
            logits = model.lm_head(hidden[row, own - 1])
            out[cu[branch] + own] = logits.log_softmax(-1).gather(1, ids[row, own][:, None])[:, 0].numpy()
    return out[sequences.terms]


def measure(folder: Path, traces: tg.Traces, repeats: int) -> dict:
    """Tokens per second of both, and of the command."""
    sequences = tg.align(traces, tg.Tokenizer.from_pretrained(folder), text_only=True)
    scorer = ModelScorer(folder, tokens_per_row=ROW)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    seconds: dict[str, list[float]] = {"fill": [], "transformers": []}
    for _ in range(repeats):
        for name, run in (
            ("fill", lambda: scorer.predict(sequences, sequences.terms, 0).logprobs),
            ("transformers", lambda: by_transformers(model, sequences)),
        ):
            started = time.perf_counter()
            values = run()
            seconds[name].append(time.perf_counter() - started)
            if name == "fill":
                ours = values
            else:
                assert np.abs(ours - values).max() < 1e-3, "the logprobs differ"
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "in.jsonl"
        source.write_text("\n".join(json.dumps(stripped(trace.to_dict())) for trace in traces) + "\n")
        options = {"accept_undecided": True, "tokens_per_row": ROW}
        started = time.perf_counter()
        try:
            tg.fill(source, folder, out=Path(temporary) / "out.jsonl", **options)
            command = sequences.tokens / (time.perf_counter() - started)
        except tg.missing_logprobs.CheckpointRefused:
            command = None  # A random model did not write the conversations.
    rates = {name: sequences.tokens / statistics.median(values) for name, values in seconds.items()}
    return {
        **{f"{name}_tokens_per_s": round(rate) for name, rate in rates.items()},
        "command": command and round(command),
    }


def stripped(value: object) -> object:
    """A record without its logprobs."""
    if isinstance(value, dict):
        return {key: stripped(item) for key, item in value.items() if key not in ("logprobs", "logprob_kind")}
    return [stripped(item) for item in value] if isinstance(value, list) else value


def table(rows: dict[str, dict]) -> str:
    """The rates and their ratio."""
    lines = ["| model | fill, tokens/s | transformers, tokens/s | ratio | whole command |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        ours, theirs = row["fill_tokens_per_s"], row["transformers_tokens_per_s"]
        command = f"{row['command']:,}" if row["command"] else ""
        lines.append(f"| {name} | {ours:,} | {theirs:,} | {ours / theirs:.2f} | {command} |")
    return "\n".join(lines)


def main() -> None:
    """Measure both models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = tg.read(QUICKSTART / "traces.jsonl.zst")
    with_ids = [row for row, trace in enumerate(every) if trace.metadata["shape"] == "token_ids"]
    traces = every[with_ids[: 2 * options.groups * 4]]
    with tempfile.TemporaryDirectory() as temporary:
        rows = {
            "bundled, 0.67 M parameters, 640 ids": measure(QUICKSTART / "model", traces, options.repeats),
            "random, 43 M parameters, 32,000 ids": measure(larger(Path(temporary)), traces[:64], options.repeats),
        }
    options.out.write_text(json.dumps({"command": COMMAND, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    if options.page:
        put_table(options.page, "fill-speed", table(rows).splitlines())


if __name__ == "__main__":
    sys.exit(main())
