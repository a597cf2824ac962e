"""The tables of producers and of kinds of logprobs name what the readers do."""

import json
import re

import pytest

import tracegrad as tg
from doc_blocks import ROOT
from tracegrad.data.formats.registry import ADAPTERS, convert_first_match
from tracegrad.errors import ArgumentError, TracegradError

REFERENCE = ROOT / "docs" / "reference"
PRODUCERS = (REFERENCE / "producers.md").read_text(encoding="utf-8")
KINDS = (REFERENCE / "logprob-kinds.md").read_text(encoding="utf-8")
FORMATS = (REFERENCE / "trace-format.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^### (.+?)\n+```json\n(.*?)^```", PRODUCERS, re.MULTILINE | re.DOTALL))
NO_ROW = {"parent_row", "failed_call", "span"}
"""Adapters without a producer: they count failed calls, and spans without a call."""


def rows(page, columns):
    """The rows of all tables of a page with this many columns, by cells; without their heads."""
    found = [re.split(r"(?<!\\) \| ", f" {line[1:-1]} ") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found if len(row) == columns]


def forms():
    """The names that `format=` takes."""
    with pytest.raises(TracegradError) as refused:
        tg.read([{"messages": []}], format="nothing")
    return set(re.findall(r"[a-z_]+(?:/1)?", str(refused.value).split("one of ")[-1]))


def test_every_reader_has_a_row():
    named = {name for row in rows(PRODUCERS, 5) for name in re.findall(r"^`(.+)`$", row[1])}
    adapters = {each.name for each in ADAPTERS} | {each.messages_name for each in ADAPTERS} - {None}
    assert forms() >= {"tracegrad/1", "chat", "call", "stream", "tgi", "slime", "swe_agent"}
    assert named == (forms() | adapters) - NO_ROW


@pytest.mark.parametrize("row", [row for row in rows(PRODUCERS, 5) if "](#" in row[0]], ids=lambda row: row[1])
def test_an_example_of_a_converted_record_is_read_by_the_reader_of_its_row(row, tmp_path):
    title = re.findall(r"\[(.+?)\]", row[0])[0]
    record = json.loads(EXAMPLES[title])
    assert EXAMPLES[title].count("\n") <= 4
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    traces = tg.read(path)
    assert len(traces) >= 1
    assert all(trace.generations for trace in traces)
    if title == "LangSmith root runs only":
        return  # recognized by the other records of its file
    conversion = convert_first_match(record)
    assert conversion is not None
    assert f"`{conversion.name}`" == row[1]


def test_every_example_has_a_row():
    titles = {re.findall(r"\[(.+?)\]", row[0])[0] for row in rows(PRODUCERS, 5) if "](#" in row[0]}
    assert titles == EXAMPLES.keys()


def example(form):
    """The first example of a form on the page of formats."""
    block = re.search(rf"^### `{form}`.*?```json\n(.*?)```", FORMATS, re.MULTILINE | re.DOTALL)[1]
    return json.JSONDecoder().raw_decode(block)[0]


@pytest.mark.parametrize("row", rows(KINDS, 6)[1:], ids=lambda row: row[0])
def test_a_record_is_read_as_the_kind_of_its_row(row):
    for form in re.findall(r"`(\w+)`", row[1]):
        [generation] = tg.Traces.from_records([example(form)])[0].generations
        assert generation.logprob_kind == re.split(r"\W", row[4])[0], form


def test_the_other_kinds_of_fireworks_and_llama_cpp_are_those_of_the_table():
    fireworks, llama = example("fireworks"), example("llama_cpp")
    del fireworks["response"]["choices"][0]["raw_output"]["completion_logprobs"]["content"][0]["sampling_logprob"]
    entry = llama["response"]["completion_probabilities"][0]
    entry["prob"] = 0.9
    del entry["logprob"]
    found = [tg.Traces.from_records([record])[0].generations[0].logprob_kind for record in (fireworks, llama)]
    assert found == ["raw", "processed"]


@pytest.mark.parametrize(
    ("kind", "temperature", "result"),
    [
        ("raw", 1.0, 1.0),
        ("raw", 0.5, 1.0),
        ("raw", None, 1.0),
        ("processed", 1.0, 1.0),
        ("processed", 0.5, 2.0),
        ("processed", None, 1.0),
        ("unknown", 1.0, 1.0),
        ("unknown", 0.5, "TG-TRAIN-092"),
        ("unknown", None, "TG-TRAIN-092"),
    ],
)
def test_a_kind_is_trained_at_the_temperature_of_the_table(kind, temperature, result):
    from tracegrad.config import Config
    from tracegrad.trainer.validate import check_ratios

    tokenizer = tg.Tokenizer.from_pretrained(ROOT / "examples" / "quickstart" / "model")
    ids = [int(each) for each in tokenizer.encode("4")]
    sampled = {"role": "assistant", "content": "4", "token_ids": ids, "logprobs": [-0.5] * len(ids)}
    record = {"reward": 1.0, "logprob_kind": kind, "messages": [{"role": "user", "content": "2+2?"}, sampled]}
    record |= {} if temperature is None else {"temperature": temperature}
    sequences = tg.align(tg.Traces.from_records([record]), tokenizer)
    if isinstance(result, str):
        with pytest.raises(ArgumentError, match=result):
            check_ratios(sequences, tg.presets.DAPO, Config())
        return
    notes = check_ratios(sequences, tg.presets.DAPO, Config())
    assert len(notes) == int((kind, temperature) == ("raw", 0.5))
    assert sequences.inv_temperature[sequences.trainable].tolist() == [result] * len(ids)
