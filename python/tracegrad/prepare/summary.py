"""Summarize how exactly traces were aligned, over all shards, for alignment_report.json and the terminal."""

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.mismatch import count_inexact
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.store import hashes
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.config import FieldMap
from tracegrad.data import infer_fields
from tracegrad.data.codes import ASSUMED_LEVELS, LEVEL_TEXT
from tracegrad.data.field_map import describe_reward_choice, distinct_rewards
from tracegrad.data.trace import ReadReport, add_reports

_COUNTS = ("traces", "branches", "tokens", "terms", "recorded", "exact", "image_positions", "traces_with_images")


@dataclass
class IngestSummary:
    """Counts of reading and aligning, added up over shards.

    Args:
        source, inputs: the inputs as text for one line, and as a list of names.
        read, mapping_lines: counts of the reader, and lines about mapped, joined and converted fields.
        candidate_lines: if no reward or group is known, likely fields as flags to type.
        traces, groups, branches, tokens, terms: counts of the aligned sequences.
        levels: alignment level to numbers of sampled tokens, trainable tokens and generations.
        alignment_report: mismatch reason to numbers of findings, traces and tokens.
        recorded, exact: tokens recorded as sampled, and those of them with an exact id and a logprob.
        group_keys: per shard, a [groups] uint64 array of hashed group names.
        image_positions, traces_with_images: number of positions with an image, and of traces with an image.
        picture_keys: per shard, a [images] uint64 array from the digests of its distinct images.
        parts, reason_not_cut: number of parts of the input, and the reason if a large input stayed in one part.
        rewards, reward: names of the rewards that any trace has, without copies of the total, and of those selected for
            training.
        profiles: server profile to number of traces whose prompts were rendered by its rules.
        errors: one line for each trace that could not be aligned and was left out.
        template: result of probing the chat template, with its `warnings`.
    """

    source: str
    inputs: list[str] = field(default_factory=list)
    read: ReadReport = field(default_factory=ReadReport)
    mapping_lines: list[str] = field(default_factory=list)
    candidate_lines: list[str] = field(default_factory=list)
    traces: int = 0
    branches: int = 0
    tokens: int = 0
    terms: int = 0
    levels: dict[str, dict[str, int]] = field(default_factory=dict)
    alignment_report: dict[str, dict[str, int]] = field(default_factory=dict)
    recorded: int = 0
    exact: int = 0
    template: dict[str, Any] = field(default_factory=dict)
    profiles: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    group_keys: list[NDArray[np.uint64]] = field(default_factory=list)
    image_positions: int = 0
    traces_with_images: int = 0
    picture_keys: list[NDArray[np.uint64]] = field(default_factory=list)
    parts: int = 1
    reason_not_cut: str | None = None
    rewards: list[str] = field(default_factory=list)
    reward: tuple[str, ...] = ()

    @property
    def groups(self) -> int:
        """Return the number of distinct groups."""
        return len(np.unique(self._keys))

    @property
    def images(self) -> dict[str, int]:
        """Return the numbers of image positions, distinct images, and traces with images. Empty without images."""
        if not self.image_positions:
            return {}
        distinct = len(np.unique(np.concatenate(self.picture_keys)))
        return {"places": self.image_positions, "pictures": distinct, "traces": self.traces_with_images}

    @property
    def cut_groups(self) -> int:
        """Return the number of groups with traces in several shards."""
        return int(np.count_nonzero(np.unique(self._keys, return_counts=True)[1] > 1))

    @property
    def _keys(self) -> NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, np.uint64), *self.group_keys])

    @property
    def has_only_single_trace_groups(self) -> bool:
        """Return whether there are several traces and no two share a group."""
        return self.traces > 1 and self.groups == self.traces

    def add(self, sequences: Sequences) -> None:
        """Add the counts of one shard."""
        self.traces += sequences.traces
        self.branches += sequences.branches
        self.tokens += sequences.tokens
        self.terms += len(sequences.terms)
        self.recorded += sequences.alignment_report.recorded
        self.exact += sequences.alignment_report.exact
        self.errors += sequences.alignment_report.errors
        self.group_keys.append(np.unique(hashes(sequences.group_names)[:, 0]))
        if (images := sequences.images) is not None and len(images):
            self.image_positions += len(images)
            self.traces_with_images += len(np.unique(sequences.trace[np.diff(images.cu_images) > 0]))
            digests = np.ascontiguousarray(images.pictures.digest[np.unique(images.image), :8])
            self.picture_keys.append(digests.view("<u8").reshape(-1).astype(np.uint64))
        names = distinct_rewards(sequences.reward_names, sequences.rewards)
        self.rewards += [name for name in names if name not in self.rewards]
        self._add_profiles(sequences.alignment_report.server_profiles)
        _add(self.levels, sequences.levels())
        _add(self.alignment_report, sequences.alignment_report.table())

    def counts(self) -> dict[str, Any]:
        """Return the counts that `join` adds to another summary, as JSON values."""
        counts = {
            name: getattr(self, name)
            for name in (*_COUNTS, "errors", "rewards", "levels", "alignment_report", "profiles")
        }
        counts |= {name: _encoded(getattr(self, name)) for name in ("group_keys", "picture_keys")}
        return {**counts, "read": asdict(self.read)}

    def merge(self, counts: Mapping[str, Any]) -> None:
        """Add the output of `counts` of a part.

        Raises:
            KeyError, TypeError, ValueError: if it is invalid.
        """
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + int(counts[name]))
        self.errors += counts["errors"]
        for name in ("group_keys", "picture_keys"):
            keys = np.frombuffer(base64.b64decode(counts[name]), "<u8").astype(np.uint64)
            getattr(self, name).append(keys)
        self.rewards += [name for name in counts["rewards"] if name not in self.rewards]
        self._add_profiles(counts["profiles"])
        _add(self.levels, counts["levels"])
        _add(self.alignment_report, counts["alignment_report"])
        formats = {name: (count, sign) for name, (count, sign) in counts["read"]["formats"].items()}
        self.read = add_reports(self.read, ReadReport(**{**counts["read"], "formats": formats}))

    def infer_fields(self, inputs: Any, field_map: FieldMap) -> None:
        """Search for likely fields if no trace has a reward, or if every group has one trace."""
        missing = ["reward"] * (not self.rewards) + ["group"] * (
            self.has_only_single_trace_groups and not field_map.group
        )
        if missing:
            candidates = infer_fields.infer(inputs, field_map)
            self.candidate_lines = candidates.lines([*missing, *(["session"] if not field_map.session else [])])

    def probe(self, tokenizer: Tokenizer) -> None:
        """Store the result of probing the tokenizer's chat template with a conversation."""
        result = tokenizer.probe()
        self.template = {**result.as_dict(), "warnings": result.warnings()}

    def as_dict(self) -> dict[str, Any]:
        """Return the content of alignment_report.json."""
        counts = {name: getattr(self, name) for name in ("source", "traces", "groups", "branches", "tokens", "terms")}
        alignment = {
            "levels": self.levels,
            "recorded": self.recorded,
            "exact": self.exact,
            "alignment_report": self.alignment_report,
        }
        return {
            **counts,
            **alignment,
            **({"pictures": self.images} if self.images else {}),
            **({"server_profiles": self.profiles} if self.profiles else {}),
            "errors": self.errors,
            "template": self.template,
            "read": asdict(self.read),
            "mapped": self.mapping_lines,
            "parts": self.parts,
            "groups_in_several_shards": self.cut_groups,
        }

    def lines(self) -> list[str]:
        """Return the summary as lines for a terminal."""
        groups = f"{self.groups:,} group{'s' * (self.groups != 1)}"
        bad = f", {self.read.bad:,} bad records left out" if self.read.bad else ""
        out = [
            f"read     {self.traces:,} traces in {groups} from {self.source}{bad}",
            *(f"         {count:,} as {name}: {sign}" for name, (count, sign) in self.read.formats.items()),
            *self.mapping_lines,
            *self._cut(),
            *self.candidate_lines,
            *describe_reward_choice(self.rewards, self.reward),
            f"aligned  {self.tokens:,} tokens in {self.branches:,} branches, {self.terms:,} of them trainable",
            *self._pictured(),
            *self._rendered(),
        ]
        if self.errors:
            out.append(f"         {len(self.errors):,} traces could not be aligned, the first: {self.errors[0]}")
        out += [f"template {warning}" for warning in self.template.get("warnings", ())]
        out += _table("level", ("tokens", "trainable", "generations"), self.levels, LEVEL_TEXT)
        out += self._guessed()
        if self.recorded and self.levels.keys() - {"T6"}:
            inexact, filled = count_inexact(self.recorded, self.exact, self.levels)
            share = inexact / self.recorded
            out.append(f"align    {share:.3%} of {self.recorded:,} recorded tokens could not be matched exactly")
            if filled:
                out.append(f"filled   {filled:,} more have no recorded logprob: tracegrad fill measured it afterwards")
        out += _table("reason", ("findings", "traces", "tokens"), self.alignment_report, {})
        return out

    def _cut(self) -> list[str]:
        """Return lines about the number of parts, and about groups that were split over shards."""
        out = [f"parts    {self.parts:,}"] if self.parts > 1 else []
        out += [f"parts    1: {self.reason_not_cut}"] if self.reason_not_cut else []
        if cut := self.cut_groups:
            out.append(
                f"groups   {cut:,} of {self.groups:,} have traces in several shards, under the same name: `train` on "
                "the "
                "folder joins them, but a single shard has only some of their traces"
            )
        return out

    def _add_profiles(self, more: Mapping[str, int]) -> None:
        for name, traces in more.items():
            self.profiles[name] = self.profiles.get(name, 0) + traces

    def _rendered(self) -> list[str]:
        """Return a line with the server profiles by which unrecorded prompts were rendered."""
        profiles = ", ".join(f"{traces:,} as {name}" for name, traces in sorted(self.profiles.items()))
        return [f"prompts  rendered for traces without recorded prompt ids: {profiles}"] if profiles else []

    def _pictured(self) -> list[str]:
        """Return a line with the numbers of image positions, images and traces with images."""
        if not (counts := self.images):
            return []
        places, pictures, traces = (f"{counts[name]:,} {name[:-1]}{'s' * (counts[name] != 1)}" for name in counts)
        return [f"pictures {places} of {pictures} in {traces}"]

    def _guessed(self) -> list[str]:
        """Return lines about generations whose ids are guessed from their text and number of logprobs."""
        guessed = [self.levels[name] for name in ASSUMED_LEVELS if name in self.levels]
        generations, tokens, trained = (
            sum(row[name] for row in guessed) for name in ("generations", "tokens", "trainable")
        )
        if not tokens:
            return []
        fate = "they are trained" if trained else "they are not trained (tg.align(..., assume_canonical=True) does)"
        return [
            f"guessed  {generations:,} turns ({tokens:,} tokens) list logprobs and no tokens: their ids are guessed,",
            f"         {fate}. Record token ids (return_token_ids on vLLM and SGLang)",
        ]


def _encoded(keys: list[NDArray[np.uint64]]) -> str:
    return base64.b64encode(np.concatenate([np.zeros(0, "<u8"), *keys]).astype("<u8").tobytes()).decode()


def _add(into: dict[str, dict[str, int]], more: dict[str, dict[str, int]]) -> None:
    for name, counts in more.items():
        row = into.setdefault(name, dict.fromkeys(counts, 0))
        for key, value in counts.items():
            row[key] += value


def _table(head: str, columns: tuple[str, ...], rows: dict[str, dict[str, int]], texts: dict[str, str]) -> list[str]:
    if not rows:
        return []
    width = max(len(name) for name in [head, *rows])
    out = ["         " + "  ".join([head.ljust(width), *(name.rjust(11) for name in columns)])]
    for name, counts in rows.items():
        cells = [name.ljust(width), *(f"{counts[column]:,}".rjust(11) for column in columns)]
        out.append(("         " + "  ".join(cells) + "  " + texts.get(name, "")).rstrip())
    return out
