"""Tokenizers of the kinds that write, or do not write, a space before a text."""

import json

# What is before a text: as transformers 5 has Llama, as newer conversions had it, as Llama 2's own files, as T5.
KINDS = ["first", "always", "prepend", "never", "unigram", "gpt2 prefix space"]


def alphabet():
    return ["▁", *"abcdefghijklmnopqrstuvwxyzWTISNA0123456789+?[]/.,<>|\n", "▁It", "▁is", "It", "▁4", "te", "▁te"]


def built(kind, folder, rstrip=False):
    """A tokenizer of `kind` beside whatever template, as a model folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    head = ["<unk>", "<s>", "</s>"]
    if kind == "unigram":
        entries = [(token, -1.0 - len(token) / 100) for token in head + alphabet()]
        tokenizer = Tokenizer(models.Unigram(entries, unk_id=0, byte_fallback=False))
    elif kind == "gpt2 prefix space":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(head + letters)}, merges=[]))
    else:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        vocab = {token: n for n, token in enumerate(head + bytes_ + alphabet())}
        merges = [("I", "t"), ("▁", "It"), ("t", "e"), ("▁", "te"), ("▁", "4")]
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
    if kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "gpt2 prefix space":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        scheme = "first" if kind == "unigram" else kind
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=scheme, split=kind == "unigram"
        )
    if kind != "gpt2 prefix space":
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    special = [
        AddedToken(each, special=True, normalized=False, rstrip=rstrip and each == "</s>") for each in ("<s>", "</s>")
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": tokenizer.get_vocab_size(), "model_type": "llama", "eos_token_id": 2})
    )
    return tokenizer
