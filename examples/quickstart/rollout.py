"""Batched episodes of the clerk's task with a transformers model on CPU, and the success rate with its interval.

No server and no logprobs here: record.py does that. Called by make_model.py, and before and after training.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import task

MAX_NEW_TOKENS = 64
MAX_TURNS = 4


@dataclass
class Turn:
    """The tokens of one sampled turn, the end token included, in the order of their sampling.

    Args:
        ids: sampled ids.
        logprobs: of each, in the distribution from which it was drawn.
        kept: the ids from which each was drawn; empty if top_p is 1.
        ended: whether the last id is the end token.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    ended: bool = False

    @property
    def text_ids(self) -> list[int]:
        """The ids without the end token."""
        return self.ids[:-1] if self.ended else self.ids


@dataclass
class Episode:
    """One conversation: the prompt, the messages so far, each sampled turn, and the reward at its end."""

    prompt: task.Prompt
    messages: list[dict] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0


def load(directory: str | Path):
    """The model in float32, set to evaluation, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
    return model, AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def wilson(successes: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval, 95 % by default, of a rate measured as `successes` out of `count`."""
    rate = successes / count
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    spread = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return centre - spread, centre + spread


def truncate(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Scores [B, V] with -inf for the ids that vLLM's top_p leaves out; the most probable id always stays."""
    ascending, order = scores.sort(dim=-1, stable=True)
    out = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    out[:, -1] = False
    return scores.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)


@torch.no_grad()
def sample(
    model,
    tokenizer,
    texts: list[str],
    temperature: float,
    generator: torch.Generator,
    limit: int = MAX_NEW_TOKENS,
    top_p: float = 1.0,
) -> list[Turn]:
    """Sample one continuation of every text, at most `limit` tokens; temperature 0 is greedy."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    rows = torch.arange(len(texts))
    turns = [Turn() for _ in texts]
    cache = DynamicCache()
    for _ in range(limit):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        scores = logits if temperature == 0 else logits / temperature
        scores = truncate(scores, top_p) if top_p < 1 else scores
        if temperature == 0:
            chosen = scores.argmax(-1)
        else:
            chosen = torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator)[:, 0]
        logprobs = scores.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        alive = chosen != tokenizer.eos_token_id
        draws = zip(rows.tolist(), chosen.tolist(), logprobs.tolist(), alive.tolist(), scores, strict=True)
        for row, token, logprob, going, kept in draws:
            turns[row].ids.append(token)
            turns[row].logprobs.append(logprob)
            turns[row].kept.append(kept.isfinite().nonzero()[:, 0].tolist() if top_p < 1 else [])
            turns[row].ended = not going
        if not alive.any():
            break
        if not alive.all():
            kept = alive.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows, mask, chosen = rows[kept], mask[kept], chosen[kept]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        ids = chosen[:, None]
    return turns


def assistant_message(text: str, ended: bool, number: int) -> dict:
    """The message that a server with a tool parser would make of sampled text."""
    content, calls = task.parse_tool_calls(text)
    message: dict = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call-{number}-{index}", "type": "function", "function": call} for index, call in enumerate(calls)
        ]
    message["finish_reason"] = "length" if not ended else "tool_calls" if calls else "stop"
    return message


def tool_messages(prompt: task.Prompt, message: dict) -> list[dict]:
    """The answers to the tool calls of an assistant message."""
    answers = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        result = task.execute(prompt, function["name"], task.arguments_of(function))
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return answers


def render(tokenizer, messages: list[dict]) -> str:
    """The prompt text of the next assistant turn."""
    return tokenizer.apply_chat_template(messages, tools=list(task.TOOLS), tokenize=False, add_generation_prompt=True)


def play(
    model,
    tokenizer,
    prompts: list[task.Prompt],
    seed: int,
    temperature: float = 1.0,
    batch: int = 128,
    top_p: float = 1.0,
) -> list[Episode]:
    """Play every prompt to its end, at most MAX_TURNS assistant turns, and check the outcome."""
    generator = torch.Generator().manual_seed(seed)
    episodes = [Episode(prompt, prompt.messages()) for prompt in prompts]
    going = episodes
    for number in range(MAX_TURNS):
        onward = []
        for start in range(0, len(going), batch):
            part = going[start : start + batch]
            texts = [render(tokenizer, episode.messages) for episode in part]
            turns = sample(model, tokenizer, texts, temperature, generator, top_p=top_p)
            for episode, turn in zip(part, turns, strict=True):
                message = assistant_message(tokenizer.decode(turn.text_ids), turn.ended, number)
                episode.messages.append(message)
                episode.turns.append(turn)
                if message.get("tool_calls") and turn.ended and number + 1 < MAX_TURNS:
                    episode.messages += tool_messages(episode.prompt, message)
                    onward.append(episode)
        going = onward
    for episode in episodes:
        episode.reward = task.check(episode.prompt, episode.messages)
    return episodes


def success(
    model, tokenizer, count: int = 512, seed: int = 0, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[float, tuple[float, float], int]:
    """The success rate on `count` prompts of the split `evaluation`, its 95 % Wilson interval, and `count`."""
    prompts = list(itertools.islice(task.prompts("evaluation", seed), count))
    right = sum(episode.reward for episode in play(model, tokenizer, prompts, seed, temperature, top_p=top_p))
    return right / count, wilson(right, count), count


def main() -> None:
    """Print the success rate of a model directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    rate, (low, high), count = success(*load(options.model), options.count, options.seed, options.temperature)
    print(f"success {rate:.1%} [{low:.1%}, {high:.1%}] on {count} prompts")


if __name__ == "__main__":
    main()
