"""Tokenizers and chat templates: messages to text and ids, the same bytes and ids as transformers.

Here are `Tokenizer` (a model directory's tokenizer.json with its chat template), `Template` (a template alone) and
`Rendered` (text with the provenance of every byte). No alignment with recorded tokens; `align` calls this.
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
    """A conversation as text, with which bytes of it are whose content. S spans, sorted and disjoint.

    Offsets count bytes of `text.encode()`. Bytes outside every span are the template's scaffold; roles, ids and
    numbers printed bare count as scaffold.

    Args:
        text: what the model reads.
        start: [S] int64, first byte.
        end: [S] int64, behind the last byte.
        message: [S] int32, index of the message, -1 for tool schemas.
        field: [S] uint8, index into `FIELDS`.
        generation: [G, 2] int64, what `{% generation %}` encloses.
        exact_provenance: False where the template cuts or tests strings so that a span was found by searching, or
            not at all.
    """

    text: str
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    message: NDArray[np.int32]
    field: NDArray[np.uint8]
    generation: NDArray[np.int64]
    exact_provenance: bool

    def pieces(self) -> list[tuple[int, str, str]]:
        """(message, field name, text) of each span; what is no character on its own is replaced."""
        data = self.text.encode()
        rows = zip(self.start, self.end, self.message, self.field, strict=True)
        return [(int(m), FIELDS[f], data[s:e].decode(errors="replace")) for s, e, m, f in rows]


@dataclass(frozen=True)
class TokenizerReport:
    """Which code makes a tokenizer's ids, and why.

    Args:
        backend: "fastokens", used only where it agreed with tokenizers on every probe, else "tokenizers".
        reason: why this one.
        probes: texts that both encoded when the tokenizer was loaded.
        no_memo: why ids of the text between added tokens are not remembered; None where they are.
    """

    backend: str
    reason: str
    probes: int
    no_memo: str | None


class Template:
    """A chat template compiled from its Jinja source, without a tokenizer.

    Args:
        source: Jinja as Hugging Face models carry it.
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
        """Whether the template marks with `{% generation %}` what the assistant wrote."""
        return self._core.has_generation

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """Messages as text with provenance; see `Tokenizer.render`."""
        return Rendered(*self._core.render(*_given(messages, tools, add_generation_prompt, kwargs)))

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """Messages as text alone, at half the cost."""
        return self._core.render_text(*_given(messages, tools, add_generation_prompt, kwargs))


class Tokenizer:
    """A model's tokenizer.json, with its chat template and its end-of-sequence ids. Safe to share between threads.

    Made by `Tokenizer.from_pretrained`. `len(tokenizer)` and `vocab_size` are one more than the largest id. A pickle
    holds the files' contents, so that another process or machine loads the same without them; a copy is the tokenizer
    itself, which never changes.
    """

    def __init__(self, core: _core.Tokenizer, folder: Path | None = None) -> None:
        self._core = core
        self.folder = folder

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, vocab_size: int | None = None, cache: bool = True
    ) -> "Tokenizer":
        """Loads a model directory, or a hub name that is in the local Hugging Face cache already.

        Nothing is downloaded. Where there is no tokenizer.json, a tiktoken file of Qwen, o200k_base, cl100k_base,
        p50k_base or r50k_base is taken; added tokens that tokenizer_config.json lists take the place of Qwen's
        extras. `eos_ids` come from generation_config.json, else config.json, else the eos_token of
        tokenizer_config.json; the chat template from chat_template.jinja, else tokenizer_config.json.

        Args:
            path: the directory, or the name.
            vocab_size: rows of the model's embedding; default what config.json says, else `len(tokenizer)`. A recorded
                id from there on is refused where it would be used.
            cache: whether what is found out about the files is kept by the hash of their bytes, in the system's cache
                folder or TRACEGRAD_CACHE: the next load reads it, and builds an encoder when a text needs one. The
                folder may be deleted at any time.

        Raises:
            ReadError: if there is no tokenizer.json and no tiktoken file.
            TokenizerError: if it is not a tokenizer, its added tokens would be renumbered, or its ranks are of no known
                family.
            TemplateError: if the chat template does not compile.

        Warns:
            UserWarning: if transformers 5 would build the tokenizer anew from `tokenizer_class` and give other ids.
                With both ids of a text.
        """
        directory = Path(path)
        if not directory.exists():
            directory = _cached(os.fspath(path)) or directory
        if vocab_size is not None and not (isinstance(vocab_size, int) and 0 < vocab_size < 1 << 31):
            raise ArgumentError(
                f"vocab_size is {vocab_size!r}. It is the number of rows of the model's embedding, an integer from 1. "
                "Leave it out where config.json says it."
            )
        loaded = cls(_core.Tokenizer.from_dir(directory, vocab_size, tokenizers() if cache else None), directory)
        if rebuilt := loaded._core.rebuilt:
            warnings.warn(_rebuilt(directory, *rebuilt), stacklevel=2)
        return loaded

    def __reduce__(self) -> tuple[Any, tuple[bytes, bytes, Path | None]]:
        return _from_source, (*self._core.source(), self.folder)

    def __copy__(self) -> "Tokenizer":
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Tokenizer":
        return self

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`, [T] int32. Added tokens in the text become their ids; none is put around it."""
        return self._core.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of all texts, on all cores.

        Returns:
            ids [T] int32, end to end, and cu_seqlens [N+1] int64: text n is ids[cu_seqlens[n]:cu_seqlens[n+1]].
        """
        return self._core.encode_batch(list(texts))

    def encode_with_ends(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids [T] int32, and ends [T] int64: the byte of `text.encode()` behind each token."""
        return self._core.encode_with_ends(text)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The bytes of `ids`, end to end, special tokens included.

        Raises:
            TokenizerError: for an id that is not in the vocabulary, with its index.
        """
        return self._core.decode_bytes(_validation.integers(ids, "ids"))

    def decode(self, ids: ArrayLike) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """Messages as the model reads them, byte for byte what `apply_chat_template` gives, with provenance.

        Messages are normalised as servers do: keys whose value is None are left out, `arguments` of a tool call that
        are a JSON string of an object become that object, reasoning under any of its names is given under all.

        Args:
            messages: dicts with role, content, tool_calls, ...
            tools: JSON schemas.
            add_generation_prompt: whether to open the assistant's turn.
            kwargs: further template variables; `strftime_now="2025-03-07"` pins the date a template prints.

        Raises:
            TemplateError: if the template raises (its message is quoted), fails, or does not end.
            ArgumentError: if messages or tools are not what JSON can say.
        """
        return Rendered(*self._core.render(*_given(messages, tools, add_generation_prompt, kwargs)))

    def render_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> NDArray[np.int32]:
        """Ids of the rendered messages, [T] int32. Arguments as for `render`."""
        return self._core.render_ids(*_given(messages, tools, add_generation_prompt, kwargs))

    def probe(self, **kwargs: Any) -> TemplateProbe:
        """What the chat template does to a conversation: what it trims, drops, inserts, and whether turns can go on."""
        return probe(self, **kwargs)

    @property
    def report(self) -> TokenizerReport:
        """Which code makes the ids, and why."""
        return TokenizerReport(*self._core.report)

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
        """Every id is below this; the model's embedding may be wider."""
        return len(self._core)

    @property
    def model_vocab_size(self) -> int:
        """Every id that the model takes is below this: rows of its embedding, or `vocab_size` where nothing says."""
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
    """The tokenizer that was pickled; its folder, where it is there too, has the image processor."""
    return Tokenizer(_core.Tokenizer.from_source(json, config), folder)


def _given(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
) -> tuple[list[Message], list[Mapping[str, Any]] | None, bool, dict[str, Any]]:
    return list(messages), None if tools is None else list(tools), add_generation_prompt, kwargs


def _cached(name: str) -> Path | None:
    """The directory of a hub name in the local cache, or None where `name` is no hub name."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or not name:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    if isinstance(found, str):
        return Path(found).parent
    raise TokenizerError(
        f"'{name}' is no directory, and no model of that name with a tokenizer.json is in the local Hugging Face "
        f"cache. Nothing is downloaded here. Run `hf download {name}` first, or name a directory."
    )


def _rebuilt(folder: Path, name: str, text: str, ids: list[int], other: list[int]) -> str:
    return (
        f"{folder}: transformers 5 builds this tokenizer anew as {name} and gives {text!r} the ids {other}; "
        f"tokenizer.json gives {ids}, which are used here. A server with transformers 5 reads other prompts. Set "
        '"tokenizer_class": "TokenizersBackend" in tokenizer_config.json, or save the tokenizer with transformers 5.'
    )
