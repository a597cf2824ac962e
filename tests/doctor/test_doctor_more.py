"""Findings of the doctor about histories, gaps and bad records, from real recordings spoiled in one way each."""

import json
import shutil

import numpy as np
import pytest

import tracegrad as tg
from spoil import MODEL, answers, diagnosed, entries, first, names, recorded, responses, save, spoiled
from tracegrad.doctor import diagnose
from tracegrad.doctor.stats import Hashes

THOUGHT = "<think>\nA price is asked for.\n</think>\n"


def several_turns(shape):
    """Records of several turns in one of the example's four shapes."""
    records = [record for record in recorded() if record["metadata"]["shape"] == shape]
    records = [record for record in records if len(list(answers(record))) > 1]
    for at, record in enumerate(records):
        record["group"], record["reward"] = "one", float(at % 2)
    return records


def with_template(tmp_path, change):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    path = model / "chat_template.jinja"
    path.write_text(change(path.read_text()))
    return model


def think(record, tokenizer):
    """Gives the first turn a thought, as content and as tokens, as a reasoning model without a parser would."""
    answer = next(answers(record))
    ids = tokenizer.encode(THOUGHT).tolist()
    pieces = [tokenizer.decode_bytes([i]) for i in ids]
    new = [{"token": piece.decode(), "logprob": -0.5, "bytes": list(piece)} for piece in pieces]
    answer["logprobs"]["content"][:0] = new
    if answer.get("token_ids"):
        answer["token_ids"][:0] = ids
    message = answer.get("message", answer)
    message["content"] = THOUGHT.removesuffix("\n") if message.get("tool_calls") else THOUGHT + message["content"]
    for call in record.get("calls", ())[1:]:
        for said in call["request"]["messages"]:
            if said["role"] == "assistant":
                said["content"] = message["content"]
                break
    return record


def test_reasoning_that_the_template_drops_from_later_turns_is_found(tmp_path):
    tokenizer = tg.Tokenizer.from_pretrained(MODEL)
    records = [think(record, tokenizer) for record in several_turns("messages")]
    assert "dropped_reasoning" not in names(diagnosed(records, tmp_path))
    drops = "(message.content or '').split('</think>')[-1] if not loop.last else (message.content or '')"
    model = with_template(tmp_path, lambda text: text.replace("(message.content or '')", f"({drops})"))
    found = diagnosed(records, tmp_path, model=model)
    assert names(found)["dropped_reasoning"] == "COSTS"
    assert "history_rewritten" not in names(found)
    assert (first(found).turn, found.exit_code) == (0, 0)


def test_reasoning_that_recorded_prompts_no_longer_have_is_found(tmp_path):
    tokenizer = tg.Tokenizer.from_pretrained(MODEL)
    records = [think(record, tokenizer) for record in several_turns("token_ids")]
    found = diagnosed(records, tmp_path)
    assert names(found)["dropped_reasoning"] == "COSTS"
    assert "history_rewritten" not in names(found)
    assert "next recorded prompt" in {f.name: f.hits.description for f in found.findings}["dropped_reasoning"]


def test_a_history_that_the_caller_rewrote_is_found_with_its_turn(tmp_path):
    records = several_turns("token_id_strings")
    assert names(diagnosed(records, tmp_path)) == {}
    for record in records:
        record["calls"][1]["request"]["messages"][1]["content"] += " Thank you."
    found = diagnosed(records, tmp_path)
    assert names(found) == {"history_rewritten": "COSTS"}
    assert first(found).turn == 1
    for record in records[1:]:
        before, after = (call["request"]["messages"] for call in record["calls"][:2])
        after[1]["content"] = before[1]["content"]
    assert names(diagnosed(records, tmp_path)) == {"history_rewritten": "NOTE"}


def test_prompt_ids_that_the_template_does_not_give_are_a_note(tmp_path):
    model = with_template(tmp_path, lambda text: text.replace("# Tools", "# Functions"))
    assert names(diagnosed(recorded(), tmp_path, model=model)) == {"other_prompt": "NOTE"}


def test_turns_without_logprobs_are_found_and_a_file_without_any_is_wrong(tmp_path):
    def strip(record):
        for answer in answers(record):
            if answer.get("token_ids"):
                answer["logprobs"] = None

    assert names(diagnosed(spoiled(strip), tmp_path))["no_logprobs"] == "COSTS"
    bare = [tg.strip_logprobs(record) for record in recorded()]
    found = diagnosed(bare, tmp_path)
    assert names(found) == {"no_logprobs": "WRONG"}
    assert found.exit_code == 1


def test_missing_and_impossible_logprobs_are_found(tmp_path):
    def put(record, value):
        for content in entries(record):
            content[3]["logprob"] = value

    assert names(diagnosed(spoiled(lambda record: put(record, None), every=9), tmp_path)) == {
        "missing_logprobs": "COSTS"
    }
    found = diagnosed(spoiled(lambda record: put(record, 0.7)), tmp_path)
    assert names(found)["impossible_logprobs"] == "WRONG"
    found = diagnosed(spoiled(lambda record: put(record, -9999.0), every=4), tmp_path)
    assert names(found)["impossible_logprobs"] == "WRONG"


def test_a_list_of_logprobs_that_is_shorter_than_the_ids_is_found(tmp_path):
    def drop(record):
        for answer in answers(record):
            if answer.get("token_ids"):
                answer["logprobs"] = [entry["logprob"] for entry in answer["logprobs"]["content"]][1:]

    found = diagnosed(spoiled(drop), tmp_path)
    assert names(found)["count_mismatch"] == "WRONG"
    assert found.findings[0].hits.description == "20 tokens but 19 logprobs"


def test_logprobs_that_do_not_add_up_to_the_servers_sum_are_found(tmp_path):
    def native(record, lost):
        messages = record["messages"]
        for message in messages:
            if "logprobs" in message:
                content = message.pop("logprobs")["content"]
                logprobs = [entry["logprob"] for entry in content]
                generation = {"bytes": [entry["bytes"] for entry in content], "logprobs": logprobs}
                message["generation"] = {**generation, "cumulative_logprob": sum(logprobs) - lost}
        return {**record, "format": "tracegrad/1"}

    records = [record for record in recorded() if "messages" in record]
    for record in records:
        record["group"] = "one"
    fine = diagnosed([native(json.loads(json.dumps(record)), 0.0) for record in records], tmp_path)
    assert names(fine) == {}
    found = diagnosed([native(record, 0.25) for record in records], tmp_path)
    assert names(found) == {"wrong_sum": "WRONG"}


def test_traces_without_rewards_are_found(tmp_path):
    def strip(record):
        record.pop("reward"), record.pop("rewards")

    assert names(diagnosed(spoiled(strip, every=9), tmp_path)) == {"no_rewards": "COSTS"}
    found = diagnosed(spoiled(strip), tmp_path)
    assert names(found) == {"no_rewards": "WRONG"}


def test_bad_records_are_found_with_their_line(tmp_path):
    path = save(recorded(), tmp_path / "traces.jsonl")
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:100]
    path.write_text("\n".join(lines))
    found = diagnose(str(path), MODEL)
    assert names(found) == {"bad_records": "COSTS"}
    assert (first(found).line, found.findings[0].hits.count, found.findings[0].hits.total) == (5, 1, 120)


def test_traces_that_the_template_refuses_are_found(tmp_path):
    refuse = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    model = with_template(tmp_path, lambda text: refuse + text)
    found = diagnosed(recorded(), tmp_path, model=model)
    assert names(found)["unaligned"] in ("COSTS", "WRONG")
    said = {finding.name: finding for finding in found.findings}["unaligned"].hits
    assert "no tools here" in said.description
    assert said.first is not None
    assert said.first.line is not None


def test_mismatches_beyond_their_threshold_are_found(tmp_path):
    def blind(record):
        for content in entries(record):
            for entry in content[6:9]:
                entry["token"], entry["bytes"] = "", []

    records = [record for record in spoiled(blind) if record["metadata"]["shape"] == "strings"]
    for record in records:
        record["group"] = "one"
    assert names(diagnosed(records, tmp_path)).get("mismatches") == "COSTS"


@pytest.mark.parametrize("lag", [1, -1])
def test_rescoring_finds_the_same_shift_and_a_right_file_right(tmp_path, lag):
    pytest.importorskip("torch")
    records = recorded()[:48]
    clean = diagnosed(records, tmp_path, check_logprobs=16)
    assert names(clean) == {}
    assert clean.advice.name == "DAPO"
    assert clean.advice.measured.outside == 0.0
    assert clean.as_dict()["advice"]["options"]["objective"] == "DAPO"
    shown = tg.doctor.render_lines(clean)
    assert "nothing found" in shown[0]
    assert shown[5].startswith("advice   train with DAPO: --objective DAPO --advantage.baseline group_mean")
    assert any(line.startswith("  figure old/rollout outside [0.5, 2]: 0.0% of tokens") for line in shown)
    assert "advice" not in diagnosed(records, tmp_path).as_dict()
    for record in records:
        for content in entries(record):
            moved = np.roll([entry["logprob"] for entry in content], -lag).tolist()
            for entry, logprob in zip(content, moved, strict=True):
                entry["logprob"] = logprob
    found = diagnosed(records, tmp_path, check_logprobs=16)
    assert names(found)["shifted_logprobs"] == "WRONG"
    assert "rescored" in {f.name: f.hits.description for f in found.findings}["shifted_logprobs"]
    assert found.next_command is None, "the model says so too"


def test_calls_of_tools_that_were_not_recorded_are_found(tmp_path):
    records = several_turns("messages")
    assert names(diagnosed(records, tmp_path)) == {}
    bare = [{key: value for key, value in record.items() if key != "tools"} for record in records]
    found = diagnosed(bare, tmp_path)
    assert names(found) == {"unrecorded_tools": "COSTS"}
    assert found.findings[0].hits.count == sum(len(list(answers(record))) for record in bare)
    ids = several_turns("token_ids")
    for record in ids:
        for call in record["calls"]:
            del call["request"]["tools"]
    assert "unrecorded_tools" not in names(diagnosed(ids, tmp_path)), "prompt ids say what came before"


def test_what_the_model_says_outweighs_what_counts_say_of_a_shift(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from tracegrad.doctor import checks_shift

    records = recorded()[:48]
    monkeypatch.setattr(
        checks_shift, "find_shift", lambda turns: (-1, checks_shift.bigram_lag_test(turns), turns[0].place)
    )
    guessed = diagnosed(records, tmp_path)
    assert names(guessed) == {"shifted_logprobs": "WRONG"}
    assert guessed.next_command.startswith("tracegrad doctor ")
    assert guessed.next_command.endswith(" --check-logprobs")
    asked = diagnosed(records, tmp_path, check_logprobs=16)
    assert names(asked) == {}
    assert asked.next_command.startswith("tracegrad train ")


def test_rescoring_says_what_suits_and_what_to_record_where_no_logprob_is(tmp_path):
    records = recorded()[:16]
    for record in records:
        for content in entries(record):
            for entry in content:
                entry["logprob"] = None
    found = diagnosed(records, tmp_path, check_logprobs=16)
    assert found.advice.name == "TOPR_POSITIVE"
    shown = tg.doctor.render_lines(found)
    assert any(line.startswith("advice   train with TOPR_POSITIVE: --objective TOPR_POSITIVE") for line in shown)
    [at] = [at for at, line in enumerate(shown) if line.startswith("  record ")]
    assert "logprobs=true and return_token_ids=true" in " ".join(line.strip() for line in shown[at:])
    assert "logprobs=true" in found.as_dict()["advice"]["record"]
    assert "record" not in diagnosed(recorded()[:16], tmp_path, check_logprobs=16).as_dict()["advice"]


def test_rescoring_finds_another_model(tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    shutil.copytree(MODEL, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    found = diagnosed(recorded()[:48], tmp_path, model=tmp_path / "model", check_logprobs=16)
    assert set(names(found)) == {"other_model"}
    assert found.advice.measured.outside > 0.05
    assert names(found)["other_model"] in ("COSTS", "WRONG")


def test_nothing_depends_on_how_the_file_is_cut_into_batches(tmp_path, monkeypatch):
    records = recorded()
    for record in records[::3]:
        record.pop("reward"), record.pop("rewards")
        for response in responses(record):
            response["usage"]["completion_tokens"] += 50
    records.append(records[3])
    told = []
    for batch in (7, 1024):
        monkeypatch.setattr("tracegrad.doctor.examination.BATCH", batch)
        told.append(diagnosed(records, tmp_path).as_dict())
    assert told[0] == told[1]
    assert {finding["name"] for finding in told[0]["findings"]} == {
        "no_rewards",
        "lost_chunks",
        "duplicated",
        "equal_rewards",
    }


def test_the_set_of_hashes_knows_what_stood_before(tmp_path):
    rng, hashes, known = np.random.default_rng(0), Hashes(), set()
    for _ in range(60):
        values = rng.integers(-300, 300, int(rng.integers(0, 40)))
        want = []
        for value in values.tolist():
            want.append(value in known)
            known.add(value)
        assert hashes.add(values).tolist() == want


def test_the_choices_of_one_stream_are_no_copies(tmp_path):
    chunks = [
        {"id": "chatcmpl-12345678", "choices": [{"index": at, "delta": {"content": text}, "finish_reason": "stop"}]}
        for at, text in enumerate("34")
    ]
    record = {"request": {"messages": [{"role": "user", "content": "A lamp?"}]}, "response": chunks, "rewards": [1, 0]}
    assert {"duplicated", "recorded_twice"}.isdisjoint(names(diagnosed([record], tmp_path)))
    assert "recorded_twice" in names(diagnosed([record, record], tmp_path))


def test_an_empty_thought_of_the_template_is_neither_trained_nor_missed(tmp_path):
    thought = "<think>\n\n</think>\n\n"
    inserted = f"(({thought!r} if loop.last else '') ~ (message.content or ''))"
    model = with_template(tmp_path, lambda text: text.replace("(message.content or '')", inserted))
    talk = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b c")) * 2]
    traces, told = tg.read([{"messages": talk, "reward": 1.0}]), tg.Tokenizer.from_pretrained(model)
    found = tg.align(traces, told, text_only=True)
    trained = told.decode(found.ids[found.trainable].tolist())
    assert found.branches == 2
    assert thought in told.decode(found.ids.tolist())
    assert "think" not in trained
    assert trained.count("b c") == 2
    said = tg.align(tg.read([{"messages": [talk[0], {**talk[1], "content": thought + "b c"}]}]), told, text_only=True)
    assert thought in told.decode(said.ids[said.trainable].tolist()), "what the record says was sampled is trained"
    assert "dropped_reasoning" not in names(diagnosed([{"messages": talk, "reward": 1.0}], tmp_path, model=model))


def test_answers_without_a_word_are_found(tmp_path):
    answers = ["", " \n", "b", ""]
    call = {"id": "c", "type": "function", "function": {"name": "price", "arguments": "{}"}}
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}], "reward": float(at)}
        for at, text in enumerate(answers)
    ]
    records[3]["messages"][1]["tool_calls"] = [call]
    found = {each.name: each for each in diagnosed(records, tmp_path).findings}["empty_answers"]
    assert (found.hits.count, found.hits.total, found.hits.first.line) == (2, 4, 1)
    told = {"message": {"role": "assistant", "content": ""}, "token_ids": [40, 41], "logprobs": [-0.5, -0.5]}
    call = {"request": {"messages": [{"role": "user", "content": "a"}]}, "response": {"choices": [told]}}
    assert "empty_answers" not in names(diagnosed([{"calls": [call], "reward": 1.0}], tmp_path)), "tokens are words"


def test_equal_answers_of_one_record_with_unlike_rewards_are_found(tmp_path):
    rated = [{"prompt": "a", "completions": ["b", "b", "c"], "rewards": rewards} for rewards in ([1, 0, 0], [1, 1, 0])]
    found = {each.name: each for each in diagnosed(rated, tmp_path).findings}["unlike_rewards"]
    assert (found.hits.count, found.hits.total) == (1, 6)
    assert found.hits.description == "reward 0, but 1 for an equal trace of the same record"


@pytest.mark.parametrize(
    ("record", "seen"),
    [
        (rb'{"routed_experts": "k05V"}', True),
        (rb'{"rollout_routed_experts": [[1, 2]]}', True),
        (rb'{"routing_matrix" : {"a": 1}}', True),
        (rb'{"routed_experts": null, "routing_matrix": []}', False),
        (rb'{"messages": [{"content": "\"routed_experts\": 7"}]}', False),
        (rb'{"experts": [1]}', False),
    ],
)
def test_records_of_a_mixture_of_experts_are_named(record, seen):
    from types import SimpleNamespace

    from tracegrad.doctor.checks_tokens import mixture_of_experts
    from tracegrad.doctor.finding import Hits

    class Records(list):
        core = SimpleNamespace(record=[b"{}", record].__getitem__)

    asked = []
    look = SimpleNamespace(traces=Records([0, 1]), trace=np.array([0, 1, 1]))
    look.hits = lambda hit, of, found: asked.append(hit.tolist()) or Hits(0, 3)
    mixture_of_experts.run(look)
    assert asked == [[False, seen, seen]]


def test_the_next_command_has_rows_for_the_longest_branch(tmp_path):
    short = {"group": "a", "messages": [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "4"}]}
    long = {"group": "a", "messages": [{"role": "user", "content": "1 " * 9000}, {"role": "assistant", "content": "4"}]}
    rewarded = [[{**record, "reward": reward} for reward in (0.0, 1.0)] for record in (short, long)]
    assert "--pack.tokens_per_row" not in diagnosed(rewarded[0], tmp_path).next_command
    found = diagnosed(rewarded[1], tmp_path)
    row = int(found.next_command.split("--pack.tokens_per_row ")[1].split()[0])
    longest = int(tg.align(tg.Traces.from_records(rewarded[1]), tg.Tokenizer.from_pretrained(MODEL)).cu_seqlens[1])
    assert longest > 9000
    assert row == 1024 * -(-longest // 1024)
