"""Makes `model/`: a byte-level BPE tokenizer, a ChatML template with pictures and a small Qwen3-VL, pretrained here.

The task is in shapes.py. Run it as a script; record.py makes the traces.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

import evaluate
import shapes

CONTEXT = 256
VOCABULARY = 320
BATCH = 64
LEARNING_RATE = 2e-3
CORRUPTED_LEARNING_RATE = 4e-4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

CHAT_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' or 'image' in part or 'image_url' in part %}\
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}\
{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on questions and answers, and save it with the template."""
    lines = [f"{shapes.QUESTION}\nassistant\nuser\n", *shapes.NUMBERS]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(lines * 100, trainer)
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


def make_processor(directory: Path) -> Qwen2VLImageProcessor:
    """Save the processor of pictures: 4 x 4 patches of 14 pixels, four of them one token."""
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=size).save_pretrained(directory)
    # vLLM also needs a processor of videos, although they are disabled.
    told = json.loads((directory / "preprocessor_config.json").read_text())
    told["video_processor_type"] = "Qwen3VLVideoProcessor"
    (directory / "video_preprocessor_config.json").write_text(json.dumps(told, indent=2) + "\n")
    return AutoImageProcessor.from_pretrained(directory, trust_remote_code=False)


def make_network(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Return a new network; vLLM's attention on a CPU needs heads of at least 32."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.06,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.06,
    }
    names = ("vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(t) for name, t in zip(names, SPECIAL[3:], strict=True)}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32", **ids)
    return Qwen3VLForConditionalGeneration(config)


Demonstration = tuple[shapes.Scene, str]


def demonstrations(seed: int, share: float) -> Iterator[Demonstration]:
    """Endless scenes of the split `pretrain` with answers, a share of them wrong."""
    generator = random.Random(f"demonstrations/{seed}")
    for scene in shapes.scenes("pretrain", seed):
        fails = generator.random() < share
        yield scene, shapes.wrong(scene, generator) if fails else scene.answer


class Trainer:
    """Network, tokenizer, processor and optimiser."""

    def __init__(self, network, tokenizer, processor) -> None:
        self.network, self.tokenizer, self.processor = network, tokenizer, processor
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def loss(self, batch: list[Demonstration]) -> torch.Tensor:
        """Mean loss of the answers with their end tokens; each is one token to the tokenizer, so no row is padded."""
        given = evaluate.inputs(self.tokenizer, self.processor, [scene for scene, _ in batch])
        texts = [answer + self.tokenizer.eos_token for _, answer in batch]
        said = torch.tensor(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        ids = torch.cat([given["input_ids"], said], 1)
        logits = evaluate.forward(self.network, given, ids)[:, -said.shape[1] - 1 : -1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), said.flatten())

    def step(self, loss: torch.Tensor, rate: float) -> float:
        """One optimiser step at learning rate `rate`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def pretrain(trainer: Trainer, steps: tuple[int, int], share: float, seed: int) -> None:
    """Right answers with a cosine fall of the rate, then a share of wrong ones: the model learns to fail at times."""
    first, second = steps
    good, mixed = demonstrations(seed, 0.0), demonstrations(seed + 1, share)
    started = time.monotonic()
    for number in range(first + second):
        batch = list(itertools.islice(good if number < first else mixed, BATCH))
        fall = 0.51 + 0.49 * math.cos(math.pi * number / first)
        rate = LEARNING_RATE * min(1.0, (number + 1) / 50) * fall
        if number >= first:
            rate = CORRUPTED_LEARNING_RATE * (1 - (number - first) / second)
        value = trainer.step(trainer.loss(batch), rate)
        if number % 50 == 0:
            print(
                f"step {number} of {first + second}: loss {value:.4f}, {time.monotonic() - started:.0f} s", flush=True
            )


def main() -> None:
    """Make tokenizer and processor, pretrain the network, save all and print the success rates."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, nargs=2, default=(600, 100), metavar=("CLEAN", "CORRUPTED"))
    parser.add_argument("--corrupted", type=float, default=0.55, help="share of wrong answers at the end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer, processor = make_tokenizer(options.out), make_processor(options.out)
    network = make_network(tokenizer)
    print(f"{sum(parameter.numel() for parameter in network.parameters())} parameters, {len(tokenizer)} tokens")
    trainer = Trainer(network, tokenizer, processor)
    pretrain(trainer, options.steps, options.corrupted, options.seed)
    network.eval()
    network.save_pretrained(options.out)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        rate, (low, high), count = evaluate.success(network, tokenizer, processor, temperature=temperature)
        print(f"{name}: success {rate:.1%} [{low:.1%}, {high:.1%}] on {count} pictures")


if __name__ == "__main__":
    main()
