"""Users, passwords and signatures in addresses: nowhere in what is printed or written."""

import json
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad import config, prepare
from tracegrad.cli import args
from tracegrad.config import Data
from tracegrad.data import provenance
from tracegrad.errors import ReadError, redact

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
RECORD = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
# What is hidden in each is one of these.
SECRETS = ("geheim", "AKIA")
ADDRESSES = {
    "https://AKIA:geheim@host/a.jsonl": "https://***@host/a.jsonl",
    "https://geheim@host/a.jsonl": "https://***@host/a.jsonl",
    "https://host:8443/a@b.jsonl": "https://host:8443/a@b.jsonl",
    "s3://AKIA:ge/heim+geheim=@bucket/a.jsonl": "s3://***@bucket/a.jsonl",
    "https://AKIA:ge@geheim@host/a": "https://***@host/a",
    "https://host/a?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=geheim": (
        "https://host/a?X-Amz-Credential=***&X-Amz-Signature=***"
    ),
    "https://host/a?GoogleAccessId=AKIA&Signature=geheim==": "https://host/a?GoogleAccessId=***&Signature=***",
    "https://host.blob.core.windows.net/c/a?sv=AKIA&sig=geheim/1": "https://host.blob.core.windows.net/c/a?sv=***&sig=***",
    "https://host/a?nobody_has_heard_of_it=geheim": "https://host/a?nobody_has_heard_of_it=***",
    "https://host/a?geheim": "https://host/a?***",
    "https://host/a#geheim": "https://host/a#***",
    "https://host?k=geheim": "https://host?k=***",
    "simplecache::https://AKIA:geheim@host/a?k=geheim": "simplecache::https://***@host/a?k=***",
    "zip://in.jsonl::s3://AKIA:geheim@bucket/a.zip": "zip://in.jsonl::s3://***@bucket/a.zip",
    "https:/AKIA:geheim@host/a?k=geheim": "https:/***@host/a?k=***",
    "http://[::1]:80/a?k=geheim": "http://[::1]:80/a?k=***",
    "hf://datasets/me/set@main/a.jsonl": "hf://datasets/me/set@main/a.jsonl",
    "abfs://container@host.dfs.core.windows.net/a?sig=geheim": "abfs://container@host.dfs.core.windows.net/a?sig=***",
    "s3://bucket/part-?.jsonl": "s3://bucket/part-?.jsonl",
    "data/runs.jsonl": "data/runs.jsonl",
}


def is_clean(text):
    return not any(secret in text for secret in SECRETS)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_shown_without_its_secrets(address):
    assert redact(address) == ADDRESSES[address]
    for text in (f"read {address}: not there.", json.dumps({"a": address}), f"('{address}', 1)", f"<{address}>"):
        assert redact(text) == text.replace(address, ADDRESSES[address])
    assert redact(redact(address)) == redact(address)


@pytest.mark.parametrize("address", ADDRESSES)
def test_neither_errors_nor_lines_nor_objects_tell_a_secret(address, capsys):
    error = ReadError(f"{address}: 403, url='{address}'. Check it.")
    assert is_clean(f"{error}{error!r}")
    args.print_lines(f"read {address}")
    args.print_stderr(f"read {address}")
    args.print_json({"source": address, "named": [address]})
    shown = capsys.readouterr()
    assert is_clean(shown.out + shown.err)
    assert json.loads(shown.out.partition("\n")[2])["source"] == ADDRESSES[address]


@pytest.fixture(params=["memory://AKIA:geheim@b/runs.jsonl", "memory://b/runs.jsonl?sig=geheim&t=AKIA"])
def address(request):
    """Traces at an address with a secret."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    path = request.param.removeprefix("memory:/")
    files.pipe_file(path, "".join(json.dumps(RECORD) + "\n" for _ in range(3)).encode())
    yield request.param
    files.rm_file(path)


def texts_of(folder):
    return {path.name: path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file()}


def test_trace_ids_and_bad_records_are_named_without_secrets(address):
    traces = tg.read(address)
    assert is_clean("".join(trace.id for trace in traces))
    assert traces[0].id.endswith(":1")


def test_addresses_that_differ_by_secrets_alone_have_traces_of_their_own():
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    addresses = [f"memory://c/runs.jsonl?{part}" for part in ("part=1", "part=2")]
    for address in addresses:
        files.pipe_file(address.removeprefix("memory:/"), json.dumps(RECORD).encode())
    found = [trace.id for trace in tg.read([*addresses, addresses[0]])]
    assert found == [f"memory:///c/runs.jsonl?part=***{more}:1" for more in ("", " (2)", "")]
    for address in addresses:
        files.rm_file(address.removeprefix("memory:/"))


def test_a_prepared_folder_holds_no_secret_and_is_gone_on_with(address, tmp_path):
    model, out = QUICKSTART / "model", tmp_path / "out"
    account = prepare.prepare(address, model, Data(text_only=True), out)
    found = texts_of(out)
    assert {"prepare.json", "alignment_report.json", "manifest.json"} <= found.keys()
    assert [name for name, text in found.items() if not is_clean(name + text)] == []
    assert is_clean("".join(account.lines()))
    prepare.prepare(address, model, Data(text_only=True), out, resume=True)
    made_of = provenance.provenance([address], model)
    assert is_clean(json.dumps(made_of) + "".join(provenance.lines(made_of)))


def test_the_index_of_the_viewer_and_its_page_hold_no_secret(address, tmp_path):
    view = pytest.importorskip("tracegrad.view")
    pytest.importorskip("starlette")
    import time

    with view.Viewer([address], tmp_path / "index", None, config.FieldMap()) as session:
        while not session.indexer.done:
            time.sleep(0.02)
        assert session.rows == 3
        view.export_page(session, view.select_rows(session, [], "", "", 10), tmp_path / "page.html")
    found = texts_of(tmp_path)
    assert "page.html" in found
    assert [name for name, text in found.items() if not is_clean(name + text)] == []


def test_config_and_model_card_hold_no_secret(tmp_path):
    pytest.importorskip("torch")
    from tracegrad.report import write_card

    for address in ADDRESSES:
        chosen = config.load(overrides=[("data.reward", address)])
        about = {"base": address, "objective": address, "config": chosen, "rows": []}
        write_card(tmp_path, **about, data=[f"read {address}"])
        assert is_clean((tmp_path / "README.md").read_text())
