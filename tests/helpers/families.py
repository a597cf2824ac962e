"""A tiny model with random weights of every causal LM family of transformers, made from its config class alone."""

from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "dropout": 0.0,
    "is_decoder": True,
    # other names for the same sizes
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256, "n_inner": 48, "rotary_dim": 4,
    "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "dim": 32, "emb_dim": 32, "hidden_dim": 32,
    "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "ffn_dim": 48, "num_layers": 2, "num_heads": 4, "attention_heads": 4,
    "word_embed_proj_dim": 32, "num_decoder_layers": 2, "num_encoder_layers": 2, "window_size": 5, "embedding_size": 32,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_num_experts": 4, "moe_k": 2,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    # recurrent layers
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "state_size": 4, "expand": 2, "time_step_rank": 4, "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_dt_rank": 4, "lru_width": 32,
}  # fmt: skip
"""Sizes by the names that configs give them; a family takes those that it has."""
_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash"), _LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid"), _HYBRID),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONV),
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "falcon": {"alibi": True},
    "prophetnet": {"num_hidden_layers": None},
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "mamba2": {"num_heads": 8, "head_dim": 8},
}
"""What a family needs beyond that, None what it does not take; hybrid ones get a layer of each kind."""
_OF_ONE_TOWER = {"mpt", "dbrx", "moshi"}  # their nested configs are parts of the decoder


def config_of(kind: str, **changes: Any) -> Any:
    """A tiny config of a family, by its `model_type`."""
    config = _tiny(CONFIG_MAPPING[kind], {**OWN.get(kind, {}), **changes})
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class
    return config if isinstance(config, wanted) else config.get_text_config()


def _tiny(cls: Any, own: dict[str, Any]) -> Any:
    known = cls()
    towers = {name: getattr(known, name, None) for name in cls.sub_configs or {}}
    if cls.model_type in _OF_ONE_TOWER:
        towers = {}
    nested = {
        name: _tiny(type(tower), OWN.get(tower.model_type, {})) for name, tower in towers.items() if tower is not None
    }
    names = ["vocab_size"] if nested else [name for name in SMALL if not _fixed(cls, name)]
    told = {**{name: SMALL[name] for name in names if hasattr(known, name)}, **nested, **own}
    return cls(**{name: value for name, value in told.items() if value is not None})


def _fixed(cls: Any, name: str) -> bool:
    found = getattr(cls, name, None)
    return isinstance(found, property) and found.fset is None


def families() -> dict[str, Any]:
    """Every class of the mapping once, by the first `model_type` that leads to it."""
    found: dict[Any, str] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind in CONFIG_MAPPING:
            found.setdefault(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]], kind)
    return {kind: cls for cls, kind in found.items()}


def model_of(kind: str, **changes: Any) -> Any:
    """The model of a family in float32, with random weights large enough to tell."""
    torch.manual_seed(3)
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]](config_of(kind, **changes)).float().eval()
