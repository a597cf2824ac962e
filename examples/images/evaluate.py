"""Sample answers to fresh pictures with transformers on CPU, and print the success rate with its 95 % interval.

No server and no logprobs here: record.py does that. Called by make_model.py, and before and after training.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import torch

import shapes

HERE = Path(__file__).parent
MAX_NEW_TOKENS = 4


def load(folder: Path) -> tuple[Any, Any, Any]:
    """Model in float32, tokenizer and image processor of a folder."""
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    return (
        model,
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        AutoImageProcessor.from_pretrained(folder, trust_remote_code=False),
    )


def inputs(tokenizer: Any, processor: Any, asked: list[shapes.Scene]) -> dict[str, torch.Tensor]:
    """Return the model inputs for these scenes: prompts of one length, pixels, and which tokens are pictures."""
    pictures = processor([scene.picture() for scene in asked], return_tensors="pt")
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": shapes.QUESTION}]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    texts = [text.replace("<|image_pad|>", "<|image_pad|>" * 4)] * len(asked)
    ids = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return {"input_ids": ids, "pixel_values": pictures["pixel_values"], "image_grid_thw": pictures["image_grid_thw"]}


def forward(model: Any, given: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """[B, T, V] logits of `ids`, which start with the prompts of `given`."""
    kinds = (ids == model.config.image_token_id).int()
    kinds[:, given["input_ids"].shape[1] :] = 0
    return model(**{**given, "input_ids": ids}, mm_token_type_ids=kinds, use_cache=False).logits


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, processor: Any, asked: list[shapes.Scene], temperature: float, seed: int
) -> list[tuple[str, bool]]:
    """Return each answer's text, and whether it ended; a temperature of 0 selects the likeliest token."""
    generator = torch.Generator().manual_seed(seed)
    given = inputs(tokenizer, processor, asked)
    ids = given["input_ids"]
    for _ in range(MAX_NEW_TOKENS):
        logits = forward(model, given, ids)[:, -1]
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, drawn], 1)
    found = []
    for row in ids[:, given["input_ids"].shape[1] :].tolist():
        ended = tokenizer.eos_token_id in row
        found.append((tokenizer.decode(row[: row.index(tokenizer.eos_token_id)] if ended else row), ended))
    return found


def wilson(right: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share: E. B. Wilson, 1927."""
    rate, spread = right / count, z * z / count
    middle = rate + spread / 2
    half = z * math.sqrt(rate * (1 - rate) / count + spread / (4 * count))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


def success(
    model: Any, tokenizer: Any, processor: Any, count: int = 512, seed: int = 0, temperature: float = 1.0
) -> tuple[float, tuple[float, float], int]:
    """The share of right answers to `count` scenes of the split `evaluation`, its 95 % interval, and `count`."""
    asked = list(itertools.islice(shapes.scenes("evaluation", seed), count))
    given = []
    for start in range(0, count, 128):
        part = asked[start : start + 128]
        given += answers(model, tokenizer, processor, part, temperature, seed * 1000 + start)
    right = sum(shapes.check(scene, *answer) for scene, answer in zip(asked, given, strict=True))
    return right / count, wilson(right, count), count


def main() -> None:
    """Print the success rate of a model's folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    rate, (low, high), count = success(*load(options.model), options.count, options.seed, options.temperature)
    print(f"success {rate:.1%} [{low:.1%}, {high:.1%}] on {count} fresh pictures")


if __name__ == "__main__":
    main()
