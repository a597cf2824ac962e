"""Sessions of a proxy on the disk while they are open: what was kept comes back, whatever the proxy died of."""

import json

import pytest

from tracegrad.errors import ArgumentError, FormatError
from tracegrad.rollout.proxy_journal import Journal
from tracegrad.rollout.session import LOST_CALLS, Session

TOOLS = [{"type": "function", "function": {"name": "price"}}]


def said(session, messages, answer):
    """One call of a conversation, which grows."""
    call = session.open({"messages": messages, "tools": TOOLS, "model": "clerk"})
    message = {"role": "assistant", "content": answer}
    choice = {"message": message, "token_ids": [5, 2], "logprobs": {"content": [{"logprob": -1.0}] * 2}}
    call.close({"prompt_token_ids": [1, 5], "choices": [choice]})
    return [*messages, message, {"role": "user", "content": "more \ud800 é"}]


def kept(tmp_path, max_turns=3, text="hi"):
    journal, session = Journal(tmp_path), Session("a")
    with journal:
        entry = journal.start("a", "7")
        messages = [{"role": "user", "content": text}]
        for _ in range(max_turns):
            messages = said(session, messages, "yes")
            journal.keep(entry, session)
    return journal, session, entry, messages


def test_calls_come_back_as_they_were_and_the_session_goes_on(tmp_path):
    journal, session, entry, messages = kept(tmp_path)
    session.open({"messages": messages}).fail("it was late")
    journal.keep(entry, session)
    [(found, calls, lost)] = Journal(tmp_path).open_sessions()
    assert (found.name, found.group, found.token) == ("a", "7", entry.token)
    assert calls == session.calls
    assert [one["error"] for one in lost] == ["it was late"]
    again = Session("a")
    again.restore(calls, lost)
    assert (again.tokens, again.lost_count, again.without_ids) == (6, 1, 0)
    for one in (session, again):
        said(one, messages, "no")
    assert again.record() == session.record()
    journal.keep(found, again)
    [(_, calls, _)] = journal.open_sessions()
    assert calls == session.calls


def test_what_requests_share_is_written_once(tmp_path):
    kept(tmp_path, max_turns=30, text="x" * 100_000)
    [path] = tmp_path.iterdir()
    assert path.stat().st_size < 130_000


@pytest.mark.parametrize("cut", [1, 9])
def test_a_line_that_was_cut_is_not_there_and_the_next_one_is_whole(tmp_path, cut):
    journal, session, _, messages = kept(tmp_path)
    [path] = journal.files
    path.write_bytes(path.read_bytes()[:-cut])
    [(entry, calls, _)] = journal.open_sessions()
    assert calls == session.calls[:2]
    again = Session("a")
    again.restore(calls, [])
    said(again, messages, "no")
    journal.keep(entry, again)
    [(_, calls, _)] = journal.open_sessions()
    assert calls == again.calls
    path.write_bytes(b'{"name": "a", "gr')
    assert (list(journal.open_sessions()), journal.files) == ([], [])


def test_what_is_forgotten_is_not_found_and_a_name_may_come_again(tmp_path):
    journal, _, entry, _ = kept(tmp_path)
    journal.forget({"another"})
    assert len(journal.files) == 1
    journal.forget({entry.token})
    assert journal.files == []
    assert journal.start("a", None).token != entry.token
    [(found, calls, _)] = journal.open_sessions()
    assert (found.group, calls) == (None, [])


def test_all_losses_are_counted_and_the_last_ones_kept(tmp_path):
    journal, session, entry, messages = kept(tmp_path, max_turns=1)
    for number in range(2 * LOST_CALLS):
        session.open({"messages": messages}).fail(str(number))
        if number % 3 == 0:
            journal.keep(entry, session)
    journal.keep(entry, session)
    [(_, calls, lost)] = journal.open_sessions()
    again = Session("a")
    again.restore(calls, lost)
    assert again.record() == session.record()


@pytest.mark.parametrize(
    "line", ["[]", '{"name": "b"}', '{"name": "a", "group": null}', "{", '{"name":"a","group":null,"token":"t"}\n{}']
)
def test_a_file_of_somebody_else_is_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(FormatError, match=r"TG-ROLLOUT-033.*a\.jsonl"):
        list(Journal(tmp_path).open_sessions())


def test_one_proxy_has_a_folder(tmp_path):
    first = Journal(tmp_path / "open")
    with first, pytest.raises(ArgumentError, match="TG-ROLLOUT-032"), Journal(tmp_path / "open"):
        pass
    with Journal(tmp_path / "open") as journal:
        assert journal.files == []


def test_what_could_not_be_written_is_written_by_the_next(tmp_path, monkeypatch):
    import os

    journal, session, entry, messages = kept(tmp_path, max_turns=1)
    whole = os.write

    def full(file, data):
        whole(file, data[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    messages = said(session, messages, "no")
    with pytest.raises(OSError, match="Errno 28"):
        journal.keep(entry, session)
    monkeypatch.undo()
    said(session, messages, "again")
    journal.keep(entry, session)
    [(_, calls, _)] = journal.open_sessions()
    assert json.dumps(calls) == json.dumps(session.calls)
