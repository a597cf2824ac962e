"""Tiny image-text models with random weights, and rows with pictures for them."""

import io
import json
from pathlib import Path

import blake3
import numpy as np
import torch
from PIL import Image

import vocabulary
from tracegrad.images import ImageRule, Images, RowImages
from tracegrad.packing import Batch

PAD, START, END, VIDEO = 90, 91, 92, 93
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
IDS = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}


def qwen3_vl(*, ids=IDS, dtype=torch.float64, sections=(2, 1, 1), hidden=32, spread=0.2, **text):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), "mrope_interleaved": True}
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1], "initializer_range": 0.2,
    }  # fmt: skip
    told = {**TEXT, "hidden_size": hidden, "head_dim": 2 * sum(sections), "rope_parameters": rope, **text}
    config = Qwen3VLConfig(text_config=told, vision_config=vision, **ids)
    return made(Qwen3VLForConditionalGeneration, config, dtype, spread)


def qwen2_5_vl(dtype=torch.float64):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "window_size": 56,
        "fullatt_block_indexes": [1], "initializer_range": 0.2,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **IDS)
    return made(Qwen2_5_VLForConditionalGeneration, config, dtype)


def smolvlm(*, ids=None, dtype=torch.float64, **text):
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 56, "patch_size": 14, "initializer_range": 0.2}
    told = {**TEXT, "model_type": "llama", **text}
    how = {
        "text_config": told,
        "vision_config": vision,
        "scale_factor": 2,
        "image_token_id": PAD if ids is None else ids,
    }
    config = SmolVLMConfig(**how, tie_word_embeddings=False)
    return made(SmolVLMForConditionalGeneration, config, dtype)


def gemma3(dtype=torch.float64):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 56, "patch_size": 14}
    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 64, "layer_types": ["full_attention"] * 3}, vision_config=vision,
        mm_tokens_per_image=4, image_token_index=PAD, boi_token_index=START, eoi_token_index=END,
    )  # fmt: skip
    return made(Gemma3ForConditionalGeneration, config, dtype)


def made(kind, config, dtype, spread=0.2):
    """The same weights wherever and whenever it is made: recordings of a server are of them."""
    model, draws = kind(config).to(dtype).eval(), np.random.default_rng(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.from_numpy(spread * draws.standard_normal(parameter.shape)))
    return model


def processor_folder(path: Path, merge: int = 2, patch: int = 14) -> Path:
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl import image_processing_qwen2_vl as qwen

    path.mkdir(parents=True, exist_ok=True)
    size = {"shortest_edge": (patch * merge) ** 2, "longest_edge": 512 * 512}
    own = qwen.Qwen2VLImageProcessor(patch_size=patch, merge_size=merge, size=size)
    own.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(IDS))
    AutoImageProcessor.from_pretrained(path)
    return path


TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{% if p.type == 'image' or 'image' in p or 'image_url' in p %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def folder(path: Path) -> Path:
    """A whole model: random Qwen3-VL in float32, the example's tokenizer with marks of pictures, image processor."""
    vocabulary.model(path, TEMPLATE, SPECIAL, tokenizer_class="PreTrainedTokenizerFast")
    start, end, pad, video = range(640, 644)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": pad, "video_token_id": video}
    processor_folder(path)
    stop = json.loads((vocabulary.EXAMPLE / "config.json").read_text())["eos_token_id"]
    # vLLM's attention on a CPU takes heads of 32 and more.
    sizes = {"hidden": 64, "sections": (8, 4, 4), "num_attention_heads": 2, "num_key_value_heads": 1}
    model = qwen3_vl(dtype=torch.float32, ids=ids, vocab_size=656, eos_token_id=stop, spread=0.1, **sizes)
    model.save_pretrained(path)
    options = json.loads((path / "preprocessor_config.json").read_text())
    (path / "video_preprocessor_config.json").write_text(json.dumps(options))
    return path


MARKS = ["<fake_token_around_image>", "<image>", "<global-img>"]
MARKS += [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]


def split_folder(path: Path) -> Path:
    """A whole model that cuts pictures into parts, with marks of rows and columns between them: random SmolVLM."""
    from transformers import Idefics3ImageProcessor, Idefics3Processor, PreTrainedTokenizerFast

    template = TEMPLATE.replace(
        "".join(f"<|{name}|>" for name in ("vision_start", "image_pad", "vision_end")), "<image>"
    )
    vocabulary.model(path, template, MARKS, tokenizer_class="PreTrainedTokenizerFast")
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    own = Idefics3ImageProcessor(**sizes, do_image_splitting=True)
    # SmolVLM's own processor needs a package to spell numbers in videos; they write pictures alike.
    Idefics3Processor(own, PreTrainedTokenizerFast.from_pretrained(path), image_seq_len=4).save_pretrained(path)
    smolvlm(ids=641, dtype=torch.float32, vocab_size=656, eos_token_id=2).save_pretrained(path)
    return path


def picture(width: int, height: int, seed: int, mode: str = "RGB", kind: str = "PNG") -> bytes:
    """A file of soft noise: colours that run into one another, as in photographs."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, channels), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise.squeeze()).resize((width, height), Image.Resampling.BICUBIC).save(out, kind)
    return out.getvalue()


class Files:
    """Pictures in memory."""

    def __init__(self, files):
        self.files = {blake3.blake3(file).digest(): file for file in files}

    def has_picture(self, digest):
        return digest in self.files

    def picture_bytes(self, digest):
        return self.files[digest]

    def pictures(self) -> Images:
        images = [Image.open(io.BytesIO(file)) for file in self.files.values()]
        return Images(
            np.array([list(digest) for digest in self.files], np.uint8).reshape(-1, 32),
            np.array([image.size[0] for image in images], np.int32),
            np.array([image.size[1] for image in images], np.int32),
            tuple(f"image/{image.format.lower()}" for image in images),
            (self,),
        )


def row(branches: list[list], files: Files, rule: ImageRule, *, shared: int = 0) -> Batch:
    """A row of branches, each a list of ids and of pictures ("p", number); the first `shared` items of all once."""
    pictures = files.pictures()
    expansions = rule.expansions(pictures.width, pictures.height) if rule else {}
    sizes = list(zip(pictures.width.tolist(), pictures.height.tolist(), strict=True))
    ids, positions, ends, at, cu, rows = [], [], [], [], [0], []

    def lay(items, depth):
        for item in items:
            if isinstance(item, tuple):
                run = expansions[sizes[item[1]]]
                at.extend(range(len(ids), len(ids) + len(run)))
                cu.append(len(at))
                rows.append(item[1])
            else:
                run = [item]
            positions.extend(range(depth, depth + len(run)))
            ids.extend(run)
            depth += len(run)
        return depth

    depth = lay(branches[0][:shared], 0)
    stem = len(ids)
    for branch in branches:
        start = len(ids)
        lay(branch[shared:], depth)
        ends += [len(ids)] * (len(ids) - start)
    ends = [len(ids)] * stem + ends
    read = np.arange(len(ids) - 1)
    images = RowImages(np.array(at, np.int64), np.array(cu, np.int64), np.array(rows, np.int32), rule, pictures)
    none = np.arange(0)
    return Batch(
        np.array(ids, np.int32), np.array(positions, np.int32), np.array(ends, np.int32), read.astype(np.int32),
        np.array(ids[1:], np.int32), np.ones(len(read), np.float32), none, none, images=images,
    )  # fmt: skip
