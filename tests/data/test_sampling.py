"""Which options of a request the trainer cannot follow: one rule, for the doctor and for the online loop."""

import ast
from pathlib import Path

import pytest

from tracegrad.data.sampling import MASKS, NEUTRAL, NEUTRAL_VALUES, mismatch, multiple_answers

NO_MATTER = {
    *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "temperature", "repetition_detection"),
    *("logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
    *("flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
    *("include_stop_str_in_output", "stream_interval", "skip_clone", "output_text_buffer_length"),
    *("skip_reading_prefix_cache", "routed_experts_prompt_start"),
}
"""vLLM's sampling parameters that end, list or hand over tokens, and leave alone how the next one is drawn."""


@pytest.mark.parametrize(
    "request_",
    [
        {"temperature": 1, "top_p": 1.0, "top_k": 0, "min_p": 0, "presence_penalty": 0.0, "n": 1},
        {"temperature": None, "top_k": -1, "logit_bias": {}, "bad_words": [], "structured_outputs": None},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "min_tokens": 0},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": False}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "tool_choice": "none"},
        {"seed": 3, "stop": ["x"], "max_tokens": 9, "ignore_eos": True, "user": "top_k"},
        NEUTRAL,
    ],
)
def test_what_does_nothing_to_the_distribution_passes(request_):
    assert mismatch(request_, "raw") == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("top_p", 0.8), ("top_k", 3), ("top_k", 1), ("min_p", 0.1), ("typical_p", 0.9), ("min_tokens", 2)],
        *[("presence_penalty", -0.5), ("frequency_penalty", 1.5), ("repetition_penalty", 1.05)],
        *[("logit_bias", {"5": -100}), ("allowed_token_ids", [1]), ("bad_words", ["no"]), ("guided_regex", "a+")],
        *[("response_format", {"type": "json_object"}), ("response_format", "json"), ("thinking_token_budget", 0)],
        *[("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "f"}})],
        *[("tools", [{"type": "function", "function": {"name": "f", "strict": True}}]), ("tools", [{"strict": True}])],
        *[("top_p", "0.8"), ("vllm_xargs", {"a": 1})],
    ],
)
@pytest.mark.parametrize("kind", ["raw", "processed", "unknown"])
def test_what_cuts_off_favours_or_forces_tokens_is_named_whatever_the_logprobs_are_of(name, value, kind):
    assert mismatch({"temperature": 1, name: value}, kind) == {name: value}


@pytest.mark.parametrize(
    ("heat", "kind", "wrong"),
    [
        *[(0.7, "processed", False), (0.7, "raw", True), (0.7, "unknown", True), (1, "raw", False)],
        # vLLM takes 0 as greedy and samples 0.001 at 0.01, so that 1/temperature is not what the trainer takes.
        *[(0, "processed", True), (0.001, "processed", True), (0.01, "processed", False), ("0.7", "processed", True)],
    ],
)
def test_a_temperature_is_followed_where_the_logprobs_are_processed(heat, kind, wrong):
    assert mismatch({"temperature": heat}, kind) == ({"temperature": heat} if wrong else {})


def test_answers_of_several_continuations_are_named():
    assert multiple_answers({"n": 1, "best_of": 1, "use_beam_search": False, "echo": None, "prompt": [5, 6]}) == {}
    assert multiple_answers({"prompt": ["one"]}) == multiple_answers({"prompt": [[5, 6]]}) == {}
    for told in ({"n": 2}, {"n": 0}, {"best_of": 4}, {"use_beam_search": True}, {"echo": True}, {"prompt": [[5], [6]]}):
        assert multiple_answers(told) == told


@pytest.mark.vllm
def test_each_of_vllms_sampling_parameters_is_known(request):
    python = Path(request.config.getoption("--vllm-python"))
    [path] = python.parent.parent.glob("lib/python3*/site-packages/vllm/sampling_params.py")
    [found] = [each for each in ast.parse(path.read_text()).body if getattr(each, "name", "") == "SamplingParams"]
    fields = {each.target.id for each in found.body if isinstance(each, ast.AnnAssign)}
    public = {name for name in fields if not name.startswith("_")}
    assert public - NO_MATTER - {*NEUTRAL_VALUES, *MASKS} == set()
