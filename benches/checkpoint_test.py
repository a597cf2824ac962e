"""How often `tracegrad fill` refuses a file: 300 files of 64 turns of each writer, and the checkpoint of the example.

    python benches/checkpoint_test.py --out benches/results/checkpoint_test.json --page docs/explanation/benchmarks.md

The checkpoint is the bundled model. A writer is that model, the model after 1 and 4 more updates of a run on the
bundled traces, another model, the model at another temperature, with another chat template, or with greedy decoding.
Each file is tested as `fill` tests it, once without other checkpoints, and once beside the checkpoints of the run after
4 and 8 updates (`--compare-with`). Writers in the file are not run again; a writer takes about eight minutes on one
core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

import tracegrad as tg
from tracegrad import trainer
from tracegrad.config import load
from tracegrad.missing_logprobs import SampledTokens, check_checkpoint
from tracegrad.missing_logprobs.model_scorer import ModelScorer
from tracegrad.missing_logprobs.predictions import LISTED
from tracegrad.objective import presets
from tracegrad.trainer.checkpoint import list_checkpoints

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import rollout  # noqa: E402
import task  # noqa: E402
from page_table import put_table  # noqa: E402

COMMAND = "python benches/checkpoint_test.py --out benches/results/checkpoint_test.json"
FILES, TURNS = 300, 64
BESIDE = (4, 8)
Turn = tuple[list[int], list[int]]
"""Ids of the prompt as the checkpoint's template writes it, and sampled ids."""


@dataclass(frozen=True)
class Writer:
    """Who writes the files.

    Args:
        updates: of the run after the bundled model; None for another model.
        temperature: of the sampler; the files say 1. 0 is greedy.
        without_tools: whether the writer's template leaves out the tools.
    """

    updates: int | None = 0
    temperature: float = 1.0
    without_tools: bool = False


WRITERS = {
    "the checkpoint itself": Writer(),
    "four versions later": Writer(updates=4),
    "another model": Writer(updates=None),
    "temperature 0.8": Writer(temperature=0.8),
    "temperature 1.2": Writer(temperature=1.2),
    "another template": Writer(without_tools=True),
    "greedy": Writer(temperature=0.0),
    "one version later": Writer(updates=1),
}
WRONG = (
    ("four versions later",),
    ("another model",),
    ("temperature 0.8", "temperature 1.2"),
    ("another template",),
    ("greedy",),
)
"""The kinds of wrong writers, whose rates of refusals are averaged."""


def make_models(folder: Path, needs_other: bool) -> dict[int | None, Path]:
    """Train 8 updates on the bundled traces, and another model from scratch if needed; return their folders."""
    run, other = folder / "run", folder / "other"
    if not (run / "checkpoints").exists():
        traces = tg.read(QUICKSTART / "traces.jsonl.zst")
        sequences = tg.align(traces, tg.Tokenizer.from_pretrained(QUICKSTART / "model"))
        changes = {"train.max_steps": 8, "checkpoint.every_steps": 1, "checkpoint.keep": 8, "optimizer.lr": 4e-4}
        config = load(QUICKSTART / "run.toml", list(changes.items()))
        model, _ = rollout.load(QUICKSTART / "model")
        options = {"config": config, "out": run, "tokenizer": QUICKSTART / "model", "sinks": ()}
        trainer.train(sequences, model, objective=presets.DAPO_DIRECT, log=lambda _: None, **options)
    if needs_other and not (other / "model.safetensors").exists():
        steps = ["--steps", "100", "600", "125", "--seed", "1"]
        subprocess.run([sys.executable, QUICKSTART / "make_model.py", "--out", other, *steps], check=True)
    saved = {int(path.name.rpartition("-")[2]): path for path in list_checkpoints(run)}
    return {0: QUICKSTART / "model", None: other, **saved}


def render(tokenizer, messages: list[dict], without_tools: bool) -> str:
    """The prompt text of the next turn."""
    tools = None if without_tools else list(task.TOOLS)
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


class Sampler:
    """Samples turns, with the system block computed once.

    Args:
        writer: its temperature, and whether its template leaves out the tools.
        folder: of its model.
        seed: of the draws.
    """

    def __init__(self, writer: Writer, folder: Path, seed: int) -> None:
        self.model, self.tokenizer = rollout.load(folder)
        self.writer, self.random = writer, torch.Generator().manual_seed(seed)
        start = render(self.tokenizer, task.Prompt("price", "a", "b", 2, None, "").messages(), writer.without_tools)
        self.system = start[: start.index("<|im_start|>user")]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that contain their special tokens."""
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def sample(self, texts: list[str]) -> list[list[int]]:
        """Sample one continuation of every text, its end token included."""
        system = torch.tensor(self.encode([self.system]))
        inputs = self.tokenizer(
            [text.removeprefix(self.system) for text in texts],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
        cache = DynamicCache()
        self.model(system, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(len(texts))
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        mask = torch.cat([mask.new_ones(len(texts), system.shape[1]), mask], 1)
        sampled: list[list[int]] = [[] for _ in texts]
        rows = torch.arange(len(texts))
        for _ in range(rollout.MAX_NEW_TOKENS):
            positions = (mask.cumsum(-1) - 1)[:, -ids.shape[1] :]
            options = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            logits = self.model(ids, attention_mask=mask, **options).logits[:, -1]
            if self.writer.temperature:
                p = torch.softmax(logits / self.writer.temperature, -1)
                chosen = torch.multinomial(p, 1, generator=self.random)[:, 0]
            else:
                chosen = logits.argmax(-1)
            for row, id_ in zip(rows.tolist(), chosen.tolist(), strict=True):
                sampled[row].append(id_)
            alive = (chosen != self.tokenizer.eos_token_id).nonzero()[:, 0]
            if not len(alive):
                break
            if len(alive) < len(rows):
                cache.batch_select_indices(alive)
                rows, mask, chosen = rows[alive], mask[alive], chosen[alive]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            ids = chosen[:, None]
        return sampled


def turns_of(writer: Writer, folder: Path, seed: int) -> Iterator[Turn]:
    """Play fresh prompts without end, and yield each sampled turn."""
    sampler = Sampler(writer, folder, seed)
    tokenizer = sampler.tokenizer
    prompts = task.prompts("traces", 1000 + seed)
    while True:
        going = [(prompt, prompt.messages()) for prompt in itertools.islice(prompts, 384)]
        by_turn: list[list[Turn]] = []
        for number in range(rollout.MAX_TURNS):
            sampled = sampler.sample([render(tokenizer, messages, writer.without_tools) for _, messages in going])
            shown = sampler.encode([render(tokenizer, messages, False) for _, messages in going])
            by_turn.append(list(zip(shown, sampled, strict=True)))
            onward = []
            for (prompt, messages), ids in zip(going, sampled, strict=True):
                ended = ids[-1] == tokenizer.eos_token_id
                message = rollout.assistant_message(tokenizer.decode(ids[:-1] if ended else ids), ended, number)
                messages.append(message)
                if message.get("tool_calls") and ended:
                    messages += rollout.tool_messages(prompt, message)
                    onward.append((prompt, messages))
            going = onward
            if not going:
                break
        yield from itertools.chain.from_iterable(by_turn)


def sequences_of(turns: list[Turn]) -> tg.Sequences:
    """A file's turns, each a branch of its own, all sampled tokens without a logprob."""
    ids = [id_ for prompt, sampled in turns for id_ in prompt + sampled]
    trainable = [flag for prompt, sampled in turns for flag in [False] * len(prompt) + [True] * len(sampled)]
    ends = np.cumsum([0] + [len(prompt) + len(sampled) for prompt, sampled in turns])
    return tg.Sequences.from_arrays(ids, ends, np.full(len(ids), np.nan), trainable)


def judge(turns: list[Turn], scorer: ModelScorer, beside: dict[str, ModelScorer], seed: int) -> dict:
    """Test one file, without and with other checkpoints."""
    sequences = sequences_of(turns)
    tokens = sequences.terms
    none = np.full(len(tokens), np.nan, np.float32)
    tested = SampledTokens(scorer.predict(sequences, tokens, LISTED), sequences.ids[tokens - 1], none)
    at = tested.predictions.ids
    others = {name: other.predict(sequences, tokens, 0, at).top_logprobs for name, other in beside.items()}
    alone, compared = check_checkpoint(tested, seed=seed), check_checkpoint(tested, others, seed=seed)
    refused = {"alone": alone.verdict == "refused", "beside": compared.verdict == "refused"}
    return {**refused, "undecided": alone.verdict == "undecided", "p": alone.p_value, "tokens": alone.tokens}


def run(name: str, models: dict[int | None, Path], files: int, log: Callable[[str], None]) -> dict:
    """Test the files of one writer."""
    writer = WRITERS[name]
    scorer = ModelScorer(models[0])
    beside = {f"update {number}": ModelScorer(models[number]) for number in BESIDE}
    stream = turns_of(writer, models[writer.updates], seed=list(WRITERS).index(name))
    rows = []
    for number in range(files):
        rows.append(judge(list(itertools.islice(stream, TURNS)), scorer, beside, seed=number))
        if number % 50 == 49:
            log(f"{name}: {number + 1} files, {sum(row['alone'] for row in rows)} refused alone")
    return {
        "writer": name,
        "files": files,
        "refused": sum(row["alone"] for row in rows),
        "refused_beside": sum(row["beside"] for row in rows),
        "tokens": round(float(np.mean([row["tokens"] for row in rows])), 1),
        "median_p": float(np.median([row["p"] for row in rows])),
    }


def table(rows: list[dict]) -> str:
    """The refusals of each writer, and of all wrong files."""
    lines = ["| written by | files | refused | refused with `--compare-with` |", "|---|---|---|---|"]

    def line(name: str, chosen: list[dict]) -> str:
        files = sum(row["files"] for row in chosen)
        shares = [f"{sum(row[key] for row in chosen) / files:.1%}" for key in ("refused", "refused_beside")]
        return f"| {name} | {files:,} | {shares[0]} | {shares[1]} |"

    lines += [line(row["writer"], [row]) for row in rows]
    kinds = [[row for row in rows if row["writer"] in kind] for kind in WRONG]
    kinds = [kind for kind in kinds if kind]
    means = [
        np.mean([sum(row[key] for row in kind) / sum(row["files"] for row in kind) for kind in kinds])
        for key in ("refused", "refused_beside")
    ]
    files = sum(row["files"] for kind in kinds for row in kind)
    lines += (
        [f"| **mean over the kinds of wrong files** | {files:,} | {means[0]:.1%} | {means[1]:.1%} |"] if kinds else []
    )
    return "\n".join(lines)


def main() -> None:
    """Test the writers that are not in the file, write each when it is done, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    parser.add_argument("--models", type=Path, help="folder for the trained models (default: a temporary one)")
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--writer", choices=WRITERS, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(options.out.read_text())["writers"] if options.out.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        names = [name for name in options.writer or WRITERS if not any(row["writer"] == name for row in rows)]
        needs_other = any(WRITERS[name].updates is None for name in names)
        models = make_models(options.models or Path(temporary), needs_other) if names else {}
        for name in names:
            rows.append(run(name, models, options.files, lambda line: print(line, flush=True)))
            rows.sort(key=lambda row: list(WRITERS).index(row["writer"]))
            options.out.write_text(json.dumps({"command": COMMAND, "writers": rows}, indent=1) + "\n")
    print(table(rows))
    if options.page:
        put_table(options.page, "checkpoint-test", table(rows).splitlines())


if __name__ == "__main__":
    main()
