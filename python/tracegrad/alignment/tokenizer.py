"""Tokenizers and chat templates: convert messages to text and ids, with the same bytes and ids as transformers.

`Tokenizer` is a model directory's tokenizer.json with its chat template. `Template` is a template without tokenizer.
`Rendered` is text with the provenance of every byte.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _core, _validation
from tracegrad.alignment.template_probe import TemplateProbe, probe
from tracegrad.errors import ArgumentError, TokenizerError
from tracegrad.storage.cache import tokenizers

CONTENT, TOOL_CALL, REASONING, TOOL_SCHEMA = 0, 1, 2, 3
FIELDS = ("content", "tool_call", "reasoning", "tool_schema")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with S spans of message content, sorted and disjoint.

    Offsets count bytes of `text.encode()`. Bytes outside of all spans are the template's scaffold, and so are roles,
    ids and bare numbers.

    Args:
        text: the text that the model reads.
        start: [S] int64, first byte of each span.
        end: [S] int64, end of each span (exclusive).
        message: [S] int32, index of the message, -1 for tool schemas.
        field: [S] uint8, index into `FIELDS`.
        generation: [G, 2] int64, start and end of each `{% generation %}` block.
        exact_provenance: False if the template cuts or tests strings, so that a span was found by a search or not
            found.
    """

    text: str
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    message: NDArray[np.int32]
    field: NDArray[np.uint8]
    generation: NDArray[np.int64]
    exact_provenance: bool

    def pieces(self) -> list[tuple[int, str, str]]:
        """Return (message, field name, text) of each span; incomplete characters are replaced."""
        data = self.text.encode()
        rows = zip(self.start, self.end, self.message, self.field, strict=True)
        return [(int(m), FIELDS[f], data[s:e].decode(errors="replace")) for s, e, m, f in rows]


@dataclass(frozen=True)
class TokenizerReport:
    """The code that computes a tokenizer's ids.

    Args:
        backend: "fastokens" if it agreed with tokenizers on every probe, else "tokenizers".
        reason: why this backend is used.
        probes: number of texts that both backends encoded when the tokenizer was loaded.
        cache_disabled_reason: why the ids of text between added tokens are not cached; None if they are.
    """

    backend: str
    reason: str
    probes: int
    cache_disabled_reason: str | None


class Template:
    """A chat template compiled from its Jinja source, without a tokenizer.

    Args:
        source: Jinja source, as in Hugging Face models.
        special_tokens: variables such as `bos_token` and `eos_token`.

    Raises:
        TemplateError: if the source does not compile.

    >>> template = Template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}]).pieces()
    [(0, 'content', 'Hi')]
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._core = _core.Template(source, list((special_tokens or {}).items()))

    @property
    def has_generation(self) -> bool:
        """Whether the template marks the assistant's text with `{% generation %}`."""
        return self._core.has_generation

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """Render messages as text with provenance; see `Tokenizer.render`."""
        return Rendered(**self._core.render(*_render_arguments(messages, tools, add_generation_prompt, kwargs)))

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render messages as text without provenance, at half the cost."""
        return self._core.render_text(*_render_arguments(messages, tools, add_generation_prompt, kwargs))


class Tokenizer:
    """A model's tokenizer.json, with its chat template and its end-of-sequence ids. Safe to share between threads.

    `Tokenizer.from_pretrained` creates it. `len(tokenizer)` and `vocab_size` are one more than the largest id. A pickle
    contains the contents of the files, so that another process or machine can load it without the files. A copy is the
    same object, because tokenizers are immutable.

    >>> tokenizer = Tokenizer.from_pretrained("examples/quickstart/model")
    >>> tokenizer.decode(tokenizer.encode("2+2?"))
    '2+2?'
    >>> tokenizer.render([{"role": "user", "content": "2+2?"}], add_generation_prompt=True).text
    '<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, core: _core.Tokenizer, folder: Path | None = None) -> None:
        self._core = core
        self.folder = folder

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, vocab_size: int | None = None, cache: bool = True
    ) -> "Tokenizer":
        """Load a model directory, or a hub name that is in the local Hugging Face cache.

        Nothing is downloaded. If there is no tokenizer.json, a tiktoken file of Qwen, o200k_base, cl100k_base,
        p50k_base or r50k_base is used. Added tokens in tokenizer_config.json replace Qwen's extra tokens. `eos_ids`
        come from generation_config.json, else config.json, else the eos_token of tokenizer_config.json. The chat
        template comes from chat_template.jinja, else tokenizer_config.json.

        Args:
            path: the directory, or the name.
            vocab_size: rows of the model's embedding; default: the value in config.json, else `len(tokenizer)`. Using a
                recorded id that is not below it is an error.
            cache: whether to cache facts about the files by the hash of their bytes, in the system's cache folder or
                TRACEGRAD_CACHE. The next load reads them, and builds an encoder only when a text needs one. The folder
                can be deleted at any time.

        Raises:
            ArgumentError: if vocab_size is not a positive integer.
            ReadError: if there is no tokenizer.json and no tiktoken file.
            TokenizerError: if the name is not in the cache, the file is not a tokenizer, its added tokens would be
                renumbered, or its ranks belong to no known family.
            TemplateError: if the chat template does not compile.

        Warns:
            UserWarning: if transformers 5 would rebuild the tokenizer from `tokenizer_class` and return other ids. The
                warning contains both ids of a text.
        """
        directory = Path(path)
        if not directory.exists():
            directory = _cached_directory(os.fspath(path)) or directory
        if vocab_size is not None and not (isinstance(vocab_size, int) and 0 < vocab_size < 1 << 31):
            raise ArgumentError(
                f"TG-ALIGN-027: vocab_size is {vocab_size!r}. It is the number of rows of the model's embedding, an "
                "integer from 1. Leave it out where config.json says it."
            )
        loaded = cls(_core.Tokenizer.from_dir(directory, vocab_size, tokenizers() if cache else None), directory)
        if rebuilt := loaded._core.rebuilt:
            warnings.warn(_rebuilt_warning(directory, rebuilt), stacklevel=2)
        return loaded

    def __reduce__(self) -> tuple[Any, tuple[bytes, bytes, Path | None]]:
        return _from_source, (*self._core.source(), self.folder)

    def __copy__(self) -> "Tokenizer":
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Tokenizer":
        return self

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of `text`, [T] int32. Added tokens in the text become their ids; none are added around it."""
        return self._core.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Encode all texts on all cores.

        Returns:
            ids [T] int32, concatenated, and cu_seqlens [N+1] int64: text n is ids[cu_seqlens[n]:cu_seqlens[n+1]].
        """
        return self._core.encode_batch(list(texts))

    def encode_with_ends(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return ids [T] int32 and ends [T] int64: the end of each token in `text.encode()`, in bytes (exclusive)."""
        return self._core.encode_with_ends(text)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Return the concatenated bytes of `ids`, special tokens included.

        Raises:
            TokenizerError: for an id that is not in the vocabulary, with its index.
        """
        return self._core.decode_bytes(_validation.integers(ids, "ids"))

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """Render messages to the text of `apply_chat_template`, byte for byte, with provenance.

        Messages are normalised as on servers: keys with the value None are left out, `arguments` of a tool call that
        are a JSON string of an object become that object, and reasoning is set under all of its names.

        Args:
            messages: dicts with role, content, tool_calls, ...
            tools: JSON schemas.
            add_generation_prompt: whether to open the assistant's turn.
            kwargs: further template variables; `strftime_now="2025-03-07"` pins the date a template prints.

        Raises:
            TemplateError: if the template raises (its message is quoted), fails, or does not terminate.
            ArgumentError: if JSON cannot represent messages or tools.
        """
        return Rendered(**self._core.render(*_render_arguments(messages, tools, add_generation_prompt, kwargs)))

    def render_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> NDArray[np.int32]:
        """Return the ids of the rendered messages, [T] int32. Arguments as for `render`."""
        return self._core.render_ids(*_render_arguments(messages, tools, add_generation_prompt, kwargs))

    def probe(self, **kwargs: Any) -> TemplateProbe:
        """Find out what the chat template trims, drops and inserts, and whether later turns keep earlier ones."""
        return probe(self, **kwargs)

    @property
    def report(self) -> TokenizerReport:
        """The code that computes the ids, and why it is used."""
        return TokenizerReport(**self._core.report)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self._core.name

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return self._core.eos_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's embedding may have more rows."""
        return len(self._core)

    @property
    def model_vocab_size(self) -> int:
        """Number of rows of the model's embedding, or `vocab_size` if it is unknown."""
        return self._core.model_vocab_size

    def __len__(self) -> int:
        return len(self._core)

    def __repr__(self) -> str:
        template = "with" if self._core.has_template else "without"
        return (
            f"Tokenizer({self.name!r}, {self.vocab_size} ids, {self._core.spelling}, "
            f"{template} chat template, eos {list(self.eos_ids)})"
        )


def _from_source(json: bytes, config: bytes, folder: Path | None) -> Tokenizer:
    """Create a tokenizer from its pickle. Its folder, if it exists, has the image processor."""
    return Tokenizer(_core.Tokenizer.from_source(json, config), folder)


def _render_arguments(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
) -> tuple[list[Message], list[Mapping[str, Any]] | None, bool, dict[str, Any]]:
    return list(messages), None if tools is None else list(tools), add_generation_prompt, kwargs


def _cached_directory(name: str) -> Path | None:
    """Return the directory of a hub name in the local cache, or None if `name` is not a hub name."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or not name:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        path = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    if isinstance(path, str):
        return Path(path).parent
    raise TokenizerError(
        f"TG-ALIGN-028: '{name}' is no directory, and no model of that name with a tokenizer.json is in the local "
        f"Hugging Face cache. Nothing is downloaded here. Run `hf download {name}` first, or name a directory."
    )


def _rebuilt_warning(folder: Path, rebuilt: "_core.RebuiltTokenizer") -> str:
    return (
        f"{folder}: transformers 5 builds this tokenizer as {rebuilt['class']} and encodes {rebuilt['text']!r} as "
        f"{rebuilt['other']}; tokenizer.json encodes it as {rebuilt['ids']}, and these ids are used here. A server "
        "with transformers 5 reads other prompts. Set "
        '"tokenizer_class": "TokenizersBackend" in tokenizer_config.json, or save the tokenizer with transformers 5.'
    )
