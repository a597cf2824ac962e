"""What README promises on its first screen runs as it is written."""

import json
import re
from pathlib import Path

import tracegrad as tg
from tracegrad.cli import main

ROOT = Path(__file__).parents[2]


def test_the_corrected_weights_are_those_that_readme_prints(capsys):
    [code] = [
        code
        for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "tg.correct(" in code
    ]
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert printed == "[1.35 0.27 1.   2.  ]"
    assert code.rstrip().endswith(printed)


def test_the_doctor_says_what_readme_shows_of_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    (shown,) = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    recorded = tg.read("examples/quickstart/traces.jsonl.zst")
    (tmp_path / "shifted.jsonl").write_text("".join(json.dumps(shifted(trace.to_dict())) + "\n" for trace in recorded))
    for part in shown.split("$ ")[1:]:
        command, *lines = [line for line in part.splitlines() if line.strip() not in ("", "...")]
        arguments = [word.replace("shifted.jsonl", str(tmp_path / "shifted.jsonl")) for word in command.split()[1:]]
        assert main(arguments) == int("shifted" in command)
        said = iter(capsys.readouterr().out.replace(str(tmp_path) + "/", "").splitlines())
        for line in lines:
            assert line in said, line


def shifted(record):
    """The record as a recorder leaves it that begins each list with a filler and cuts it to its length."""
    for holder in [*(call["response"]["choices"][0] for call in record.get("calls", ())), *record.get("messages", ())]:
        content = (holder.get("logprobs") or {}).get("content") or []
        for at in range(len(content) - 1, 0, -1):
            content[at]["logprob"] = content[at - 1]["logprob"]
        if content:
            content[0]["logprob"] = 0.0
    return record


def test_each_figure_of_the_results_is_in_the_benchmarks():
    results = (ROOT / "README.md").read_text().split("\n## Results\n")[1].split("\n## ")[0]
    table = "".join(line for line in results.splitlines(keepends=True) if line.startswith("|"))
    figures = set(re.findall(r"\d+\.\d|\d[\d,]*,\d{3}", table))
    assert figures >= {"78.5", "44.9", "91.0", "93.9", "52,900", "62,600"}
    benchmarks = (ROOT / "docs" / "explanation" / "benchmarks.md").read_text()
    assert [figure for figure in sorted(figures) if figure not in benchmarks] == []


def test_every_page_that_a_page_links_to_is_there():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
