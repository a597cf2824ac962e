"""Sampling options that records say: read from each format, kept, and refused where a ratio would be wrong."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tracegrad as tg
from spoil import diagnosed, names
from tracegrad.config import Config, Data, load
from tracegrad.data import sampling
from tracegrad.data.infer_fields import infer
from tracegrad.doctor.checks_logprobs import kept_mass as by_tops
from tracegrad.errors import ArgumentError, FormatError
from tracegrad.integrations.vllm import traces_from_outputs
from tracegrad.objective import presets
from tracegrad.trainer.steps import check_ratios

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
USER = [{"role": "user", "content": "2+2?"}]
SAID = {"role": "assistant", "content": "4"}
CHOICE = {"index": 0, "finish_reason": "stop", "message": SAID, "token_ids": [19, 2], "logprobs": [-0.1, -0.2]}
CHAT = {"prompt_token_ids": [1, 5], "choices": [{**CHOICE, "logprobs": {"content": [
    {"token": "token_id:19", "logprob": -0.1}, {"token": "token_id:2", "logprob": -0.2}]}}]}  # fmt: skip
LISTED = {"content": [{"token_id": 19, "logprob": -0.1}]}
SPAN = {
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}]),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "4"}]}]),
}


def call(request, response):
    return {"request": request, "response": response}


FORMATS = {
    "chat": ({"messages": [*USER, SAID], "top_k": 5, "logit_bias": {"5": -9}}, {"top_k": 5, "logit_bias": {"5": -9}}),
    "native": (
        {"format": "tracegrad/1", "top_k": 9,
         "messages": [*USER, {**SAID, "generation": {"token_ids": [19], "top_k": 5}}]},
        {"top_k": 5},
    ),
    "call": (
        call({"messages": USER, "min_p": 0.1,
              "extra_body": {"top_k": 7, "min_p": 0.2, "repetition_penalty": 1.1}}, CHAT),
        {"min_p": 0.1, "top_k": 7, "repetition_penalty": 1.1},
    ),
    "calls": ({"calls": [call({"messages": USER, "use_beam_search": True, "best_of": 4}, CHAT)]},
              {"use_beam_search": True, "best_of": 4}),
    "completions": (
        call({"prompt": "2+2=", "best_of": 3, "presence_penalty": 0.5}, {"object": "text_completion", "choices": [
            {"index": 0, "text": "4", "finish_reason": "stop",
             "logprobs": {"tokens": ["4"], "token_logprobs": [-0.1], "top_logprobs": None, "text_offset": [0]}}]}),
        {"best_of": 3, "presence_penalty": 0.5},
    ),
    "vllm_generate": (
        call({"token_ids": [1, 5], "sampling_params": {"top_k": 5, "bad_words": ["no"]}},
             {"request_id": "r", "choices": [
                 {"index": 0, "token_ids": [19], "finish_reason": "stop", "logprobs": LISTED}]}),
        {"top_k": 5, "bad_words": ["no"]},
    ),
    "sglang": (
        call({"input_ids": [1, 5], "sampling_params": {"temperature": 0.7, "top_k": 5, "frequency_penalty": 0.2}},
             {"text": "4", "output_ids": [19], "meta_info": {"finish_reason": {"type": "stop", "matched": 2},
              "output_token_logprobs": [[-0.1, 19, None]]}}),
        {"top_k": 5, "frequency_penalty": 0.2},
    ),
    "tgi": (
        call({"inputs": "2+2=",
              "parameters": {"top_k": 5, "typical_p": 0.9, "repetition_penalty": 1.2, "watermark": True}},
             {"generated_text": "4", "details": {"finish_reason": "eos_token", "prefill": [],
              "tokens": [{"id": 19, "text": "4", "logprob": -0.1, "special": False}]}}),
        {"top_k": 5, "typical_p": 0.9, "repetition_penalty": 1.2, "watermark": True},
    ),
    "llama_cpp": (
        call({"prompt": "2+2=", "repeat_penalty": 1.1},
             {"content": "4", "tokens": [19], "stop_type": "eos", "generation_settings": {"top_k": 40, "min_p": 0.05,
              "repeat_penalty": 1.0, "mirostat": 0, "logit_bias": []},
              "completion_probabilities": [{"id": 19, "token": "4", "bytes": [52], "logprob": -0.1}]}),
        {"repetition_penalty": 1.1, "top_k": 40, "min_p": 0.05, "mirostat": 0, "logit_bias": []},
    ),
    "ollama": (
        call({"model": "m", "messages": USER, "options": {"repeat_penalty": 1.1, "top_k": 40, "typical_p": 0.7}},
             {"model": "m", "message": SAID, "done": True, "done_reason": "stop",
              "logprobs": [{"token": "4", "logprob": -0.1, "bytes": [52]}]}),
        {"repetition_penalty": 1.1, "top_k": 40, "typical_p": 0.7},
    ),
    "gemini": (
        call({"contents": [{"role": "user", "parts": [{"text": "2+2?"}]}],
              "generationConfig": {"topK": 5, "presencePenalty": 0.5}},
             {"candidates": [{"content": {"role": "model", "parts": [{"text": "4"}]}, "finishReason": "STOP"}]}),
        {"top_k": 5, "presence_penalty": 0.5},
    ),
    "langfuse": (
        {"id": "o4", "traceId": "t4", "type": "GENERATION", "startTime": "2026-01-01T00:00:00Z", "model": "m",
         "modelParameters": {"temperature": 0.7, "top_k": 5}, "input": USER, "output": SAID},
        {"top_k": 5},
    ),
    "litellm_log": (
        {"id": "c1", "call_type": "completion", "status": "success", "model": "m", "messages": USER,
         "model_parameters": {"temperature": 0.7, "frequency_penalty": 0.3}, "response": CHAT},
        {"frequency_penalty": 0.3},
    ),
    "span": (
        {"name": "chat m", "context": {"trace_id": "0x1"}, "attributes": {"gen_ai.request.top_k": 5, **SPAN}},
        {"top_k": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_the_options_of_each_format_are_read_by_one_name(form):
    record, expected = FORMATS[form]
    [generation] = tg.Trace.from_dict(record).generations
    assert generation.sampling == expected


def test_a_request_that_says_none_has_none_and_null_is_none():
    generation = tg.Trace.from_dict(call({"messages": USER, "top_k": None, "seed": 3}, CHAT)).generations[0]
    assert (generation.sampling, generation.temperature, generation.top_p) == ({}, 1.0, 1.0)


def test_what_a_request_that_is_not_known_whole_leaves_out_is_unknown():
    for record in (
        {"sampling_defaults": "unknown", **call({"messages": USER}, CHAT)},
        {"calls": [{"sampling_defaults": "unknown", **call({"messages": USER}, CHAT)}]},
        {
            "sampling_defaults": "unknown",
            **call({"messages": USER}, [{"choices": [{"index": 0, "delta": {"content": "4"}}]}]),
        },
    ):
        assert tg.Trace.from_dict(record).generations[0].temperature is None
    told = {"sampling_defaults": "unknown", **call({"messages": USER, "temperature": 0.3}, CHAT)}
    assert tg.Trace.from_dict(told).generations[0].temperature == pytest.approx(0.3)
    with pytest.raises(FormatError, match="TG-FORMAT-026"):
        tg.Trace.from_dict({"sampling_defaults": "none", **call({"messages": USER}, CHAT)})


@pytest.fixture(scope="module")
def tokenizer():
    return tg.Tokenizer.from_pretrained(MODEL)


def rows(tokenizer, count=48, kind="raw", **request):
    """Calls of the bundled tokenizer, four to a group."""
    made = []
    for number in range(count):
        asked = [{"role": "user", "content": f"what is {number // 4}?"}]
        ids = [*map(int, tokenizer.encode(f"it is {number * 7 % 99}")), 2]
        listed = [{"token": f"token_id:{each}", "logprob": -0.1 - (number + at) % 5 / 7} for at, each in enumerate(ids)]
        said = {"role": "assistant", "content": tokenizer.decode(ids[:-1])}
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": said,
            "token_ids": ids,
            "logprobs": {"content": listed},
        }
        prompt = tokenizer.render_ids(asked, add_generation_prompt=True).tolist()
        answer = {"prompt_token_ids": prompt, "choices": [choice]}
        record = {"group": f"g{number // 4}", "reward": number % 2, "logprob_kind": kind}
        made.append({**record, **call({"messages": asked, **request}, answer)})
    return made


def aligned(tokenizer, records, **options):
    return tg.align(tg.Traces.from_records(records), tokenizer, **options)


@pytest.mark.parametrize(
    ("request_", "on"),
    [
        ({}, ()),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "best_of": 1}, ()),
        ({"top_p": 0.8}, ("top_p",)),
        (
            {"top_k": 5, "repetition_penalty": 1.3, "logit_bias": {"5": -100}},
            ("top_k", "repetition_penalty", "logit_bias"),
        ),
        ({"min_p": 0.1, "use_beam_search": True}, ("min_p", "use_beam_search")),
    ],
)
@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_a_ratio_of_two_supports_is_refused_and_named_unless_it_is_accepted(tokenizer, request_, on, kind):
    sequences = aligned(tokenizer, rows(tokenizer, 4, kind, temperature=1.0, **request_))
    if kind == "processed":  # processed logprobs include penalties, which the trainer replays
        on = tuple(name for name in on if name not in ("repetition_penalty", "logit_bias"))
    assert [sampling.options_on(int(bits)) for bits in sequences.reshaped] == [on] * 4
    accepted = Config(data=Data(accept_truncated_sampling=True))
    assert check_ratios(sequences, presets.TOPR_POSITIVE, Config()) == []
    if not on:
        assert check_ratios(sequences, presets.DAPO, Config()) == check_ratios(sequences, presets.DAPO, accepted) == []
        return
    with pytest.raises(ArgumentError, match=rf"TG-TRAIN-091.*{', '.join(on)}"):
        check_ratios(sequences, presets.DAPO, Config())
    [note] = check_ratios(sequences, presets.DAPO, accepted)
    assert note.startswith("4 of 4 traces")
    assert "--accept-truncated-sampling" in note


def test_one_turn_of_a_trace_is_enough_and_one_without_logprobs_is_not(tokenizer):
    one, two = rows(tokenizer, 2, temperature=1.0)
    two["request"]["messages"] = [*one["request"]["messages"], one["response"]["choices"][0]["message"], *USER]
    cut = {**two, "request": {**two["request"], "top_k": 3}}
    bare = json.loads(json.dumps(cut))
    del bare["response"]["choices"][0]["logprobs"]
    for second, bits in ((two, 0), (cut, 1 << sampling.OPTIONS.index("top_k")), (bare, 0)):
        log = {
            "id": "t",
            "calls": [{"request": each["request"], "response": each["response"]} for each in (one, second)],
        }
        assert aligned(tokenizer, [log]).reshaped.tolist() == [bits]


def test_of_turns_that_differ_the_temperature_is_not_taken_as_1(tokenizer):
    one, two = rows(tokenizer, 2)
    for heats, expected in (((1.0, 0.5), 0.5), ((0.5, 1.0), 0.5), ((1.0, 1.0), 1.0)):
        calls = [{"request": {**each["request"], "temperature": heat}, "response": each["response"]}
                 for each, heat in zip((one, two), heats, strict=True)]  # fmt: skip
        assert aligned(tokenizer, [{"id": "t", "calls": calls}]).temperature.tolist() == [expected]
    calls = [{"request": one["request"], "response": one["response"]},
             {"sampling_defaults": "unknown", "request": two["request"], "response": two["response"]}]  # fmt: skip
    assert np.isnan(aligned(tokenizer, [{"id": "t", "calls": calls}]).temperature[0])


def test_the_column_goes_through_files_and_selections(tokenizer, tmp_path):
    records = [*rows(tokenizer, 4, temperature=1.0), *rows(tokenizer, 4, temperature=1.0, top_k=5)]
    records = [{**each, "id": f"t{number}"} for number, each in enumerate(records)]
    sequences = aligned(tokenizer, records)
    sequences.save(tmp_path / "kept")
    again = tg.Sequences.load(tmp_path / "kept")
    assert again.reshaped.tolist() == sequences.reshaped.tolist() == [0] * 4 + [2] * 4


def test_what_requests_leave_out_is_read_as_the_model_says_only_if_asked(tokenizer):
    told = {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.0}
    half = rows(tokenizer, 1, "processed", top_k=-1, top_p=1.0)
    bare, spoken = rows(tokenizer, 1, "processed"), rows(tokenizer, 1, "processed", temperature=1.0)
    found = aligned(tokenizer, [*bare, *spoken, *half], sampling_defaults=told)
    assert found.temperature.tolist() == [0.5, 1.0, 0.5]
    assert [sampling.options_on(int(bits)) for bits in found.reshaped] == [("top_p", "top_k"), ("top_p", "top_k"), ()]
    first = found.inv_temperature[: found.cu_seqlens[1]][found.trainable[: found.cu_seqlens[1]]]
    assert set(first.tolist()) == {2.0}
    plain = aligned(tokenizer, [*bare, *spoken, *half])
    assert plain.temperature.tolist() == [1.0] * 3
    assert plain.reshaped.tolist() == [0] * 3
    ours = {**bare[0], "sampling_defaults": "unknown"}  # a request that is not known whole is not filled in
    assert aligned(tokenizer, [ours], sampling_defaults=told).reshaped.tolist() == [0]


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory):
    """The bundled model with a generation_config.json that says how to sample."""
    folder = tmp_path_factory.mktemp("m") / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    told = {"eos_token_id": 2, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.05}
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(told))
    return folder


def test_the_models_own_sampling_is_what_its_file_sets_and_does_something(opinionated, tmp_path):
    assert sampling.model_defaults(opinionated) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling.model_defaults(MODEL) == sampling.model_defaults(tmp_path) == {}
    for text in ("[1]", "{", '{"top_k": null, "temperature": 1.0}'):
        (tmp_path / "generation_config.json").write_text(text)
        assert sampling.model_defaults(tmp_path) == {}


def test_the_doctor_compares_requests_with_the_models_file(tokenizer, opinionated, tmp_path):
    told = {"temperature": 1.0, "top_k": -1, "repetition_penalty": 1}
    assert names(diagnosed(rows(tokenizer, **told), tmp_path, model=opinionated)) == {}
    found = diagnosed(rows(tokenizer, temperature=1.0), tmp_path, model=opinionated)
    assert names(found) == {"server_defaults": "COSTS"}
    assert found.findings[0].hits.description == "top_k=20, repetition_penalty=1.05"
    assert names(diagnosed(rows(tokenizer), tmp_path, model=opinionated, sampling_defaults="neutral")) == {}
    model = diagnosed(rows(tokenizer), tmp_path, model=opinionated, sampling_defaults="model")
    assert names(model) == {"raw_at_temperature": "WRONG", "reshaped_sampling": "WRONG"}
    assert model.findings[0].hits.description.startswith("temperature 0.6, logprobs raw")
    assert "--sampling-defaults model" in model.next_command


def test_the_fix_for_raw_logprobs_does_not_lead_to_processed_ones_of_a_cut_distribution(tokenizer, tmp_path):
    raw = diagnosed(rows(tokenizer, temperature=0.7, top_p=0.8), tmp_path)
    assert names(raw) == {"raw_at_temperature": "WRONG", "reshaped_sampling": "WRONG"}
    cure = next(each.check.fix for each in raw.findings if each.name == "raw_at_temperature")
    assert "top_p, top_k, min_p and penalties were off" in cure
    assert "kept mass" in cure
    processed = diagnosed(rows(tokenizer, kind="processed", temperature=0.7, top_p=0.8), tmp_path)
    assert names(processed) == {"reshaped_sampling": "WRONG"}
    assert processed.findings[0].hits.description == "top_p=0.8, logprobs processed; the kept mass S is not measured"


def test_the_kept_mass_is_p_over_the_processed_probability():
    # 0.3 of 0.6 that were kept is 0.5 of what was sampled from; 0.2 of 0.8 is 0.25.
    p, recorded = np.log([0.3, 0.2, 0.3, np.nan]), np.log([0.5, 0.25, 0.5, 0.5])
    cut, penalty = 1 << sampling.OPTIONS.index("top_k"), 1 << sampling.OPTIONS.index("repetition_penalty")
    yes = np.ones(4, bool)
    assert sampling.kept_mass(p, recorded, np.full(4, cut), yes) == pytest.approx(((0.6 + 0.8 + 0.6) / 3, 0.6))
    assert sampling.kept_mass(p, recorded, np.array([0, cut, cut | penalty, cut]), yes) == pytest.approx((0.8, 0.8))
    assert sampling.kept_mass(p, recorded, np.full(4, cut), ~yes) is None
    assert sampling.kept_mass(p, p, np.full(4, cut), yes) is None  # of the uncut distribution: S is not in it


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"top_k": 2}, 0.8),
        ({"top_p": 0.7}, 0.8),  # 0.5 is not enough, 0.5 + 0.3 is
        ({"top_p": 0.4}, 0.5),
        ({"min_p": 0.3}, 0.8),  # 0.15 and what is below lies under 0.3 * 0.5
        ({"top_k": 2, "top_p": 0.6}, 0.5),  # 0.5 of the 0.8 that top_k leaves is 0.625
        ({"top_k": 9}, None),
        ({"top_p": 0.99}, None),
        ({"min_p": 0.01}, None),
    ],
)
def test_alternatives_say_the_kept_mass_if_they_reach_to_the_cut(told, expected):
    tops = [{"token": str(each), "logprob": math.log(each)} for each in (0.3, 0.5, 0.1)]
    record = json.dumps({"content": [{"token": "a", "logprob": -1.0, "top_logprobs": tops}]}).encode()
    found = by_tops(record, told)
    assert found is None if expected is None else found == pytest.approx((expected, expected))


def test_advice_names_the_cut_and_its_mass(tokenizer):
    sequences = aligned(tokenizer, rows(tokenizer, 4, "processed", temperature=1.0, top_k=5))
    now = sequences.rollout_logprobs + np.float32(math.log(0.9))
    found = tg.recipes.for_data(sequences, now)
    assert (found.name, found.measured.reshaped) == ("TOPR_POSITIVE", ("top_k",))
    assert found.evidence == "sampled with top_k; kept mass S: mean 0.900, minimum 0.900"
    whole = replace(sequences, reshaped=np.zeros(4, np.uint32))
    assert tg.recipes.for_data(whole, sequences.rollout_logprobs).name == "DAPO"


OWN = {"messages": USER, "response": CHAT}


@pytest.mark.parametrize(
    ("record", "flags"),
    [
        ({**OWN, "kwargs": {"temperature": 0.3, "top_k": 5}}, ("sampling", "kwargs")),
        ({**OWN, "params": {"temperature": 0.3}}, ("sampling", "params")),
        ({**OWN, "config": {"sampling_params": {"temperature": 0.3}}}, ("sampling", "config.sampling_params")),
        ({**OWN, "metadata": {"temp": 0.3}}, ("temperature", "metadata.temp")),
    ],
)
def test_a_temperature_that_is_not_read_is_unknown_and_offered_as_a_flag(record, flags, tmp_path):
    path = tmp_path / "logs.jsonl"
    path.write_text("".join(json.dumps({**record, "n": number}) + "\n" for number in range(4)))
    assert {each.generations[0].temperature for each in tg.read(path)} == {None}
    found = infer([str(path)], names=["sampling"])
    name, where = flags
    assert f"--map.{name} {where}" in " ".join(found.flags(["sampling"]))
    told = tg.read(path, map={name: where})[0].generations[0]
    assert told.temperature == pytest.approx(0.3)
    assert told.sampling == ({"top_k": 5} if where == "kwargs" else {})


def test_an_accepted_run_prints_the_kept_mass_and_keeps_the_option_in_its_files(tokenizer, tmp_path):
    from tracegrad.doctor.rescore import _recomputed
    from tracegrad.trainer import train
    from tracegrad.trainer.lora import load_model

    sequences = aligned(tokenizer, rows(tokenizer, 8, "processed", temperature=1.0, top_p=0.8))
    # As if 0.9 of each distribution had been kept: the recorded probability is p / 0.9.
    recorded = np.where(sequences.trainable, _recomputed(sequences, MODEL) - math.log(0.9), np.nan)
    sequences = replace(sequences, rollout_logprobs=recorded.astype(np.float32))
    assert (sequences.rollout_logprobs[sequences.trainable] < 0).all()
    options = {"optimizer.lr": 1e-6, "data.holdout": 0.0, "train.groups_per_step": 1, "train.device": "cpu"}
    said: list[str] = []
    config = load(overrides=[*options.items(), ("data.accept_truncated_sampling", True)])
    train(sequences, load_model(MODEL), objective=presets.DAPO, out=tmp_path / "run", config=config, log=said.append)
    assert "note     kept mass S at the first step: mean 0.900, minimum 0.900." in said
    assert sum(line.startswith("note     kept mass S") for line in said) == 1
    assert "accept_truncated_sampling = true" in (tmp_path / "run" / "config.toml").read_text()
    config = load(overrides=[*options.items()])
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-091.*--accept-truncated-sampling"):
        train(sequences, load_model(MODEL), objective=presets.DAPO, out=tmp_path / "other", config=config, sinks=[])


def test_rescoring_measures_the_kept_mass_of_processed_logprobs(tokenizer, tmp_path):
    from tracegrad.doctor.rescore import _recomputed

    records = rows(tokenizer, 8, "processed", temperature=1.0, top_k=5)
    sequences = aligned(tokenizer, records)
    [terms] = np.nonzero(sequences.trainable)
    kept = iter((_recomputed(sequences, MODEL)[terms] - math.log(0.9)).tolist())
    for record in records:
        for entry in record["response"]["choices"][0]["logprobs"]["content"]:
            entry["logprob"] = next(kept)
    found = diagnosed(records, tmp_path, check_logprobs=8)
    assert found.findings[0].hits.description == (
        "top_k=5, logprobs processed; kept mass S 0.900 on average, 0.900 at least, by --check-logprobs"
    )
    assert found.advice.name == "TOPR_POSITIVE"
    assert "kept mass S: mean 0.900, minimum 0.900" in found.advice.evidence


def logged(tokenizer, number, **record):
    """A call as a logger keeps it: messages and response side by side, what was asked of the sampling elsewhere."""
    [row] = rows(tokenizer, 1)
    asked = [{"role": "user", "content": f"what is {number // 2}?"}]
    response = {**row["response"], "prompt_token_ids": tokenizer.render_ids(asked, add_generation_prompt=True).tolist()}
    return {"messages": asked, "response": response, "score": number % 2, "task": f"t{number // 2}", **record}


@pytest.mark.parametrize(
    ("more", "holder"),
    [
        ({"prompt": None, "kwargs": {"temperature": 0.3, "max_tokens": 9}, "outputs": ["x"], "cost": 0.1}, "kwargs"),
        ({"type": "LLMCall", "create_args": {"temperature": 0.5}, "prompt_tokens": 3}, "create_args"),
        ({"optional_params": {"temperature": 0.4, "top_p": 0.9}}, "optional_params"),
    ],
    ids=["dspy", "autogen", "litellm"],
)
def test_the_doctor_looks_again_with_the_temperature_that_it_found(tokenizer, tmp_path, more, holder):
    records = [logged(tokenizer, number, **more) for number in range(8)]
    found = diagnosed(records, tmp_path)
    assert found.next_command.startswith("tracegrad doctor ")
    assert f"--map.sampling {holder}" in found.next_command
    assert "--logprob-kind" not in found.next_command
    again = diagnosed(records, tmp_path, map=tg.data.FieldMap(sampling=holder, reward="score", group="task"))
    assert names(again)["raw_at_temperature"] == "WRONG"
    assert ("reshaped_sampling" in names(again)) == ("top_p" in more[holder])


def test_score_names_no_kind_of_logprobs_that_nobody_gave(tokenizer, tmp_path):
    from tracegrad.cli.score import _next_command
    from tracegrad.doctor.next_command import RecordTotals

    path = tmp_path / "scored.jsonl"

    def proposed():
        totals = RecordTotals()
        list(totals.counting([tg.read(path)]))
        return _next_command(path, MODEL, totals)[0]

    records = [{**logged(tokenizer, number), "reward": number % 2, "group": f"g{number // 4}"} for number in range(8)]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert proposed() == f"tracegrad doctor {path} --model {MODEL}"
    for each in records:
        each["logprob_kind"], each["temperature"] = "raw", 1.0
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert proposed().startswith("tracegrad train ")


@pytest.mark.parametrize("value", [5, "hot", {"temperature": -1}, {"top_p": "x"}])
def test_what_is_no_object_of_options_is_a_bad_record(tmp_path, value):
    path = tmp_path / "logs.jsonl"
    path.write_text(json.dumps({**OWN, "kwargs": value}) + "\n")
    with pytest.raises(FormatError, match=r"TG-READ-006.*map\.sampling"):
        tg.read(path, map={"sampling": "kwargs"})


def test_a_view_shows_the_options(tokenizer):
    from tracegrad.view.detail import of_trace

    cut, plain = tg.Traces.from_records(rows(tokenizer, 1, top_k=5) + rows(tokenizer, 1, top_p=None))
    assert dict(of_trace(cut))["sampling"] == "top_p=1.0, top_k=5"
    assert dict(of_trace(plain))["sampling"] == "top_p=1.0"


def test_objects_of_vllm_take_the_options_that_they_do_not_hold():
    step = {7: SimpleNamespace(logprob=-0.5)}
    said = {"text": " b", "finish_reason": "length", "stop_reason": None, "cumulative_logprob": -0.5}
    completion = SimpleNamespace(index=0, token_ids=[7], logprobs=[step], **said)
    request = SimpleNamespace(request_id="0", prompt="a", prompt_token_ids=[5, 6], outputs=[completion])
    told = {"temperature": 1.0, "top_p": 0.9, "sampling": {"top_k": 20, "repetition_penalty": 1.0}}
    [generation] = traces_from_outputs([request], **told)[0].generations
    assert (generation.top_p, generation.sampling) == (pytest.approx(0.9), {"top_k": 20, "repetition_penalty": 1.0})
