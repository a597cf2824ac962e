"""Makes `model/`: a byte-level BPE tokenizer, a ChatML template with tools and a small Qwen3 pretrained from scratch.

The task is in task.py, the demonstrations in demonstrations.py. Run it as a script; record.py makes the traces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import demonstrations
import rollout
import task

VOCABULARY = 640
CONTEXT = 1024
BATCH = 32
LEARNING_RATE = 2e-3
CORRUPTED_LEARNING_RATE = 3e-4
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{% if messages[0].role == 'system' or tools %}{{ '<|im_start|>system\\n' }}\
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}\
{% if tools %}{{ '\\n\\n# Tools\\n<tools>' }}\
{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools>' }}{% endif %}\
{{ '<|im_end|>\\n' }}{% endif %}\
{% for message in messages %}\
{% if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}\
{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + (message.content or '') }}\
{% for call in message.tool_calls or [] %}\
{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}\
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{% if call.function.arguments is string %}{{ call.function.arguments }}\
{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}{% endfor %}\
{{ '<|im_end|>\\n' }}\
{% elif message.role == 'tool' %}\
{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}\
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\
{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

Dialogue = list[tuple[str, str]]


def dialogues(seed: int, corrupted: float) -> Iterator[Dialogue]:
    """Endless demonstrations of pretraining prompts, a share of them corrupted."""
    generator = random.Random(f"dialogues/{seed}")
    for pass_number in itertools.count():
        for prompt in itertools.islice(task.prompts("pretrain", seed + 1000 * pass_number), 100_000):
            maker = demonstrations.corrupted if generator.random() < corrupted else demonstrations.clean
            yield maker(prompt, generator)


def batches(stream: Iterator[Dialogue], seed: int) -> Iterator[list[Dialogue]]:
    """Batches of dialogues of like length, so that little is padded."""
    generator = random.Random(f"batches/{seed}")
    while True:
        pool = sorted(itertools.islice(stream, 8 * BATCH), key=lambda dialogue: sum(len(text) for _, text in dialogue))
        starts = list(range(0, len(pool), BATCH))
        generator.shuffle(starts)
        yield from (pool[start : start + BATCH] for start in starts)


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on clean demonstrations without the rare names, and save it with the template."""
    lines: list[str] = [task.SYSTEM, *map(json.dumps, task.TOOLS)] * 2000
    for dialogue in itertools.islice(dialogues(0, 0.0), 6000):
        text = "\n".join(part for _, part in dialogue)
        if not any(name in text for name in task.RARE_NAMES):
            lines.append(text)
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    marks = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(marks),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = [piece for line in lines for piece in _outside_marks(line, marks)]
    bpe.train_from_iterator(pieces, trainer)
    bpe.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"  # transformers 5 writes a class name that version 4 does not know
    settings.write_text(settings.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def _outside_marks(text: str, marks: list[str]) -> list[str]:
    for mark in marks:
        text = text.replace(mark, "\0")
    return [piece for piece in text.split("\0") if piece]


def make_network(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh network of about 0.67 M parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


class Trainer:
    """Network, optimiser and the ids of the system block, which every dialogue shares."""

    def __init__(self, network: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
        empty = [{"role": "system", "content": task.SYSTEM}]
        self.system_text = tokenizer.apply_chat_template(empty, tools=list(task.TOOLS), tokenize=False)
        self.system_ids = self.encode([self.system_text])[0]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def dialogue_ids(self, batch: list[Dialogue]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids after the system block and the labels: the assistant's text with its end token. Both [B, T]."""
        segments: list[str] = []
        for dialogue in batch:
            segments += [segment for role, text in dialogue for segment in segments_of(role, text)]
        encoded = iter(self.encode(segments))
        rows, labels = [], []
        for dialogue in batch:
            ids: list[int] = []
            targets: list[int] = []
            for role, _ in dialogue:
                for trainable in (False, role == "assistant", False):
                    part = next(encoded)
                    ids += part
                    targets += part if trainable else [-100] * len(part)
            rows.append(torch.tensor(ids))
            labels.append(torch.tensor(targets))
        pad = self.tokenizer.pad_token_id
        return (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad),
            torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
        )

    def dialogue_loss(self, batch: list[Dialogue]) -> torch.Tensor:
        """Mean loss of the assistant's tokens; the system block is computed once and its cache repeated."""
        ids, labels = self.dialogue_ids(batch)
        cache = DynamicCache()
        self.network(torch.tensor([self.system_ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(len(batch))
        logits = self.network(ids, past_key_values=cache, use_cache=True).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )

    def lines_loss(self, texts: list[str], length: int = 128) -> torch.Tensor:
        """Return the mean loss of dense lines, each text truncated to `length` tokens."""
        ids = torch.tensor([row[:length] for row in self.encode(texts)])
        logits = self.network(ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def step(self, loss: torch.Tensor, rate: float) -> float:
        """One optimiser step at learning rate `rate`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def segments_of(role: str, text: str) -> tuple[str, str, str]:
    """A turn as the chat template writes it: header, the sampled text (with the end token), and the line's end."""
    if role == "tool":
        return "<|im_start|>user\n<tool_response>\n", f"{text}\n</tool_response><|im_end|>", "\n"
    return f"<|im_start|>{role}\n", f"{text}<|im_end|>", "\n"


def pretrain(trainer: Trainer, dense: int, clean: int, seed: int) -> None:
    """Dense lines, then clean demonstrations with some lines among them; cosine fall of the learning rate."""
    generator = random.Random(f"lines/{seed}")
    good = batches(dialogues(seed, 0.0), seed)
    started = time.monotonic()
    for number in range(dense + clean):
        if number < dense:
            loss = trainer.lines_loss([demonstrations.dense_lines(generator, 24) for _ in range(BATCH)])
        else:
            loss = trainer.dialogue_loss(next(good))
            loss = loss + 0.5 * trainer.lines_loss([demonstrations.dense_lines(generator, 24) for _ in range(4)])
        fall = 0.51 + 0.49 * math.cos(math.pi * number / (dense + clean))
        value = trainer.step(loss, LEARNING_RATE * min(1.0, (number + 1) / 50) * fall)
        if number % 50 == 0:
            print(f"step {number} of {dense + clean}: loss {value:.4f}, {time.monotonic() - started:.0f} s", flush=True)


def spoil(trainer: Trainer, steps: int, share: float, seed: int) -> None:
    """A share of corrupted demonstrations, at a lower rate that falls to nothing: the model learns to fail at times."""
    mixed = batches(dialogues(seed + 1, share), seed + 1)
    for number in range(steps):
        value = trainer.step(trainer.dialogue_loss(next(mixed)), CORRUPTED_LEARNING_RATE * (1 - number / steps))
        if number % 50 == 0:
            print(f"corrupted step {number} of {steps}: loss {value:.4f}", flush=True)


def main() -> None:
    """Make the tokenizer, pretrain the network, save both and print the success rates."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, nargs=3, default=(200, 1200, 250), metavar=("DENSE", "CLEAN", "CORRUPTED"))
    parser.add_argument("--corrupted", type=float, default=0.58, help="share of corrupted demonstrations at the end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(options.out)
    network = make_network(tokenizer)
    print(f"{sum(parameter.numel() for parameter in network.parameters())} parameters")
    trainer = Trainer(network, tokenizer)
    print(f"{len(trainer.system_ids)} tokens in the system block")
    dense, clean, spoiled = options.steps
    pretrain(trainer, dense, clean, options.seed)
    spoil(trainer, spoiled, options.corrupted, options.seed)
    network.eval()
    network.save_pretrained(options.out)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        rate, (low, high), count = rollout.success(network, tokenizer, temperature=temperature)
        print(f"{name}: success {rate:.1%} [{low:.1%}, {high:.1%}] on {count} prompts")


if __name__ == "__main__":
    main()
