"""Every parameter of every public function meets a zoo of hostile values; the answer is a result or our error."""

import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracegrad as tg
from tracegrad import _validation, advantage
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.metrics.off_policy import OffPolicySums
from tracegrad.metrics.training import Rewards
from tracegrad.objective import Reduce
from tracegrad.objective.correction import proximal_alpha

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
NAN = float("nan")


def deep(levels=5000):
    out = []
    for _ in range(levels):
        out = [out]
    return out


def holding_itself():
    out = [1]
    out.append(out)
    return out


def zoo():
    """Name to a function that makes the value, as some are used up by a look."""
    found = {repr(value): (lambda value=value: value) for value in (None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63)}
    for value in (-(2**63), 2**64, 10**400, 0.0, -0.5, 1.5, NAN, float("inf"), -float("inf"), 3e38, 1e308, 1j):
        found[repr(value)[:20]] = lambda value=value: value
    for value in ("", "1.5", "raise", "\x1b[31m\u202e", b"", b"\xff", bytearray(3), [], (), {}, set(), [[]], [None]):
        found[repr(value)] = lambda value=value: value
    for value in (
        [1, 2, 3],
        ["1", "2", "3"],
        [1.0, 2.0, 3.0],
        [True, False, True],
        [None, 1, 2],
        [1j, 2, 3],
        [2**64] * 3,
    ):
        found[repr(value)[:30]] = lambda value=value: value
    for value in (
        [1e308] * 3,
        [3e38, -3e38, 1.0],
        [-1, -2, -3],
        [[1, 2], [3]],
        {"a": 1},
        {1, 2},
        [object()],
        [b"a"] * 3,
    ):
        found[repr(value)[:30]] = lambda value=value: value
    found |= {
        "masked": lambda: np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
        "complex": lambda: np.ones(3, complex),
        "objects": lambda: np.array([object()] * 3),
        "structured": lambda: np.zeros(3, [("a", "i4")]),
        "dates": lambda: np.zeros(3, "M8[s]"),
        "strings": lambda: np.array(["a", "b", "c"]),
        "0-d": lambda: np.array(1.0),
        "3-d": lambda: np.zeros((3, 3, 3)),
        "big-endian": lambda: np.array([0, 1, 2], ">i4"),
        "big-endian floats": lambda: np.array([-1, -2, -3], ">f8"),
        "unaligned": lambda: np.frombuffer(b"\0" * 25, np.uint8)[1:].view(np.float64),
        "strided": lambda: np.zeros(6)[::2],
        "twos as bool": lambda: np.full(3, 2, np.uint8).view(bool),
        "unsigned": lambda: np.full(3, 2**64 - 1, np.uint64),
        "halves": lambda: np.zeros(3, np.float16),
        "long": lambda: np.zeros(3, np.longdouble),
        "too many": lambda: np.zeros(1000),
        "empty": lambda: np.zeros(0),
        "read-only": lambda: np.broadcast_to(np.float32(-1), 3),
        "deep": deep,
        "holds itself": holding_itself,
        "generator": lambda: (n for n in range(3)),
        "function": lambda: zoo,
        "class": lambda: int,
        "module": lambda: np,
        "object": object,
        "slice": lambda: slice(3),
    }
    return found


ZOO = zoo()
TRACES = tg.Traces.from_records(
    [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], "reward": 1}]
)
IDS, CU, LOGPROBS, TRAINABLE = [4, 5, 6], [0, 3], [NAN, -1.0, -1.0], [False, True, True]
SEQUENCES = tg.Sequences.from_arrays(IDS, CU, LOGPROBS, TRAINABLE)
TERM = np.array([-1.0, -2.0, -0.5])


def calls():
    """Name to a public function and arguments that it takes."""
    tokenizer = tg.Tokenizer.from_pretrained(MODEL)
    return {
        "from_arrays": (
            tg.Sequences.from_arrays,
            {"ids": IDS, "cu_seqlens": CU, "rollout_logprobs": LOGPROBS, "trainable": TRAINABLE},
        ),
        "align": (tg.align, {"traces": TRACES, "tokenizer": tokenizer}),
        "pack": (tg.pack, {"sequences": SEQUENCES, "advantages": [1.0], "tokens_per_row": 8}),
        "correct": (tg.correct, {"old": TERM, "rollout": TERM, "trace": np.array([0, 0, 1]), "reduce": Reduce()}),
        "from_records": (tg.Traces.from_records, {"records": [{"messages": []}]}),
        "concatenate": (tg.Traces.concatenate, {"parts": [TRACES]}),
        "take": (TRACES.__getitem__, {"index": [0]}),
        "group_mean": (advantage.group_mean, {"rewards": [0.0, 1.0, 1.0], "groups": [0, 0, 0]}),
        "batch_mean": (advantage.batch_mean, {"rewards": [0.0, 1.0, 1.0]}),
        "rloo": (advantage.rloo, {"rewards": [0.0, 1.0, 1.0], "groups": [0, 0, 0]}),
        "group_counts": (advantage.group_counts, {"rewards": [0.0, 1.0, 1.0], "groups": [0, 0, 0]}),
        "proximal_alpha": (proximal_alpha, {"version": [0, 1, 2], "proximal": 1, "current": 2}),
        "OffPolicy": (OffPolicySums.of, {"old": TERM, "rollout": TERM, "trace": np.array([0, 0, 1])}),
        "Rewards": (Rewards.of, {"rewards": [0.0, 1.0, 1.0], "group": [0, 0, 1]}),
        "decode": (tokenizer.decode, {"ids": [1, 2]}),
        "Conversation": (
            lambda tokenizer, messages, tools: tg.Conversation(tokenizer, messages, tools).prompt_ids(),
            {"tokenizer": tokenizer, "messages": [{"role": "user", "content": "a"}], "tools": None},
        ),
        "append": (
            lambda said, message: tg.Conversation(tokenizer).append(said, message).prompt_ids(),
            {"said": [5], "message": {"role": "assistant", "content": "a"}},
        ),
    }


def meet(function, valid, parameter, made):
    """Calls with one argument replaced; anything but a result or an error of ours is a failure."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            function(**{**valid, parameter: made()})
    except TracegradError:
        pass
    except IndexError:
        assert function.__name__ == "__getitem__"


CALLS = calls()
ARRAYS_OF = {
    "from_arrays": (
        "ids",
        "cu_seqlens",
        "rollout_logprobs",
        "trainable",
        "trace",
        "group",
        "rewards",
        "turn",
        "version",
    ),
    "correct": ("old", "rollout", "ref", "trace", "turn", "group", "advantages", "mask", "group_terms", "group_traces"),
    "pack": ("advantages",),
    "OffPolicy": ("old", "rollout", "trace", "keep", "weight", "turn", "staleness"),
}
PAIRS = [
    (name, parameter)
    for name, (function, _) in CALLS.items()
    for parameter in inspect.signature(function).parameters
    if parameter not in ("self", "reward_names", "all_reduce")
]


@settings(max_examples=400)
@given(st.sampled_from(PAIRS), st.sampled_from(sorted(ZOO)))
def test_a_hostile_value_is_answered_with_words(pair, value):
    meet(*CALLS[pair[0]], pair[1], ZOO[value])


@pytest.mark.nightly
@pytest.mark.parametrize("value", ZOO)
@pytest.mark.parametrize(("name", "parameter"), PAIRS)
def test_the_whole_zoo_at_every_parameter(name, parameter, value):
    meet(*CALLS[name], parameter, ZOO[value])


MEANINGLESS = ("masked", "complex", "strings", "objects", "structured", "['1', '2', '3']", "generator", "twos as bool")


@pytest.mark.parametrize("value", MEANINGLESS)
def test_what_means_no_numbers_is_refused_wherever_numbers_are_taken(value):
    for name, parameters in ARRAYS_OF.items():
        function, valid = CALLS[name]
        for parameter in parameters:
            with pytest.raises(ArgumentError):
                function(**{**valid, parameter: ZOO[value]()})


def test_the_examples_of_the_review_are_refused_in_words():
    cases = [
        (tg.Sequences.from_arrays, ([], [0], [], []), "TG-ALIGN-009"),
        (tg.correct, (1, 2), "TG-OBJ-008"),
        (tg.align, (TRACES, "dir"), "TG-ARGS-018"),
        (tg.Sequences.from_arrays, ([2**64, 1, 2], CU, LOGPROBS, TRAINABLE), "TG-ARGS-010"),
        (tg.Sequences.from_arrays, ([1.0, 2.0, 3.0], CU, LOGPROBS, TRAINABLE), "TG-ARGS-010"),
    ]
    for function, arguments, code in cases:
        with pytest.raises(ArgumentError, match=code):
            function(*arguments)
    with pytest.raises(TracegradError):
        tg.Traces.from_records([deep(100_000)])
    one = type("Totals", (), {"terms": 3.0, "traces": 2, "groups": 1})
    with pytest.raises(ArgumentError, match=r"TG-ARGS-005.*totals\.terms.*3\.0"):
        tg.correct(TERM, TERM, trace=[0, 0, 1], totals=one)
    with pytest.raises(TracegradError):
        tg.correct(np.float32([3e38]), np.float32([-3e38]), trace=[0])
    with pytest.raises(ArgumentError, match="TG-ARGS-003"):
        tg.correct(TERM.astype("f4"), TERM.astype("f4"), trace=[0, 0, 1], advantages=[1e300, 0, 0])


def test_what_stands_otherwise_in_memory_gives_the_same_numbers():
    whole = tg.correct(TERM, TERM - 0.5, trace=np.array([0, 0, 1])).metrics
    unaligned = np.frombuffer(b"\0" + TERM.tobytes(), np.uint8)[1:].view(np.float64)
    for old in (TERM.astype(">f8"), np.repeat(TERM, 2)[::2], unaligned, TERM.tolist()):
        assert tg.correct(old, TERM - 0.5, trace=np.array([0, 0, 1], ">i4")).metrics == whole
    assert _validation.floats(unaligned, "x").flags.aligned
