"""The page of a run: what it shows, how large it gets, and that a hostile trace stays text."""

import base64
import hashlib
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad._html import escape, visible
from tracegrad.alignment.sequences import AlignmentReport, Sequences
from tracegrad.errors import ReadError
from tracegrad.report import add_success, write_report
from tracegrad.report.charts import Panel, _thinned, chart, curves, overlay_curves
from tracegrad.report.token_map import PerToken, select_examples

HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;`\x00\u202e=https://evil.example/</style></details>"
)
PIECES = {
    1: HOSTILE.encode(),
    2: b"\xf0\x9f",
    3: b"\x98\x80",
    4: b"\x00\x1b[31m",
    5: b" ok\n",
    6: b"</script>",
    7: b"-->",
}


TAGS = """html head meta title style body header main h1 h2 h3 dl div dt dd section figure figcaption b output small
    svg path g rect polyline polygon circle text tspan table thead tbody tr th td p input label span details summary
    pre i em script"""


OWN = f"<script>{resources.files('tracegrad.report').joinpath('find.js').read_text('utf-8')}</script>"


class Vocabulary:
    def decode_bytes(self, ids):
        if ids[0] not in PIECES:
            raise ValueError("no such id")
        return PIECES[ids[0]]


class Page(HTMLParser):
    """What a browser would find: tags, attributes, visible text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words, self.open, self.raw = [], [], [], [], text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def numbers(self):
        return [value for _, name, value in self.attributes if name == "data-n"]

    @property
    def text(self):
        return "".join(self.words)


def sequences(ids, trainable, trace=None, **more):
    cu = more.pop("cu", [0, len(ids)])
    logprobs = np.where(trainable, -0.5, np.nan)
    return Sequences.from_arrays(ids, cu, logprobs, trainable, trace=trace, **more)


def terms(origin, gradient, **more):
    count = len(origin)
    columns = {
        "origin": np.asarray(origin),
        "gradient": np.asarray(gradient, float),
        "ratio": np.ones(count),
        "weight": np.ones(count),
        "advantages": np.ones(count),
        "logprobs": np.full(count, -0.25),
        "keep": np.ones(count, bool),
        "clipped": np.zeros(count, bool),
    }
    return SimpleNamespace(**{**columns, **{name: np.asarray(values) for name, values in more.items()}})


def page(tmp_path, s, *steps, rows=(), **more):
    path = tmp_path / "report.html"
    write_report(path, rows=rows, sequences=s, tokenizer=Vocabulary(), terms=steps, **more)
    return Page(path.read_text("utf-8"))


def ids(found):
    """Return the ids of the sections in page order."""
    return [value for tag, name, value in found.attributes if tag == "section" and name == "id"]


# --- hostile input ---


def hostile(tmp_path):
    s = sequences([1, 1, 2, 3, 4, 6, 7, 99], [False] + [True] * 7, rewards=[1.0], reward_names=(HOSTILE,))
    report = replace(
        s.alignment_report,
        **{name: np.zeros(1, np.int32) for name in ("trace", "turn", "token", "count")},
        reason=np.zeros(1, np.uint8),
        detail=(HOSTILE,),
        reasons=(HOSTILE,),
    )
    s = replace(s, trace_ids=(HOSTILE,), group_names=(HOSTILE,), alignment_report=report)
    rows = [{"step": 1, "loss": 0.5, HOSTILE: HOSTILE}, {"step": HOSTILE, "loss": HOSTILE}]
    summary = {"seed": HOSTILE, "seconds": {HOSTILE: 1.0}}
    return page(tmp_path, s, terms(range(1, 8), [1] * 7), rows=rows, summary=summary, title=HOSTILE)


def test_hostile_strings_stay_text(tmp_path):
    found = hostile(tmp_path)
    assert set(found.tags) <= set(TAGS.split())
    assert found.open == []
    assert not [name for _, name, _ in found.attributes if name.startswith("on") or name in ("src", "href")]
    assert found.text.count("<script>alert(1)</script>") >= 5
    for needle in ("<script", "</script", "http://", "https://", "src=", "href=", "\x00", "\u202e", "onerror="):
        assert needle not in found.raw.replace(" xmlns", "").replace(OWN, "")
    assert found.raw.count(OWN) == 1


def test_the_page_forbids_everything_but_its_own_style_and_search(tmp_path):
    policy = [value for tag, name, value in hostile(tmp_path).attributes if tag == "meta" and name == "content"]
    own = base64.b64encode(hashlib.sha256(OWN[8:-9].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'" in policy


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\xf0\x9f", "<i>F0·9F</i>"),
        ("é".encode() + b"\xc3", "é<i>C3</i>"),
        (b"\x00\x1b", "<i>00·1B</i>"),
        ("\u202ea\u200d".encode(), "<i>U+202E</i>a<i>U+200D</i>"),
        (b"a\n\tb", "a⏎\n⇥\tb"),
        (b"<i>", "&lt;i&gt;"),
        ("😀".encode(), "😀"),
    ],
)
def test_every_byte_of_a_token_is_visible(data, shown):
    assert visible(data) == shown


def test_escaping_spells_out_what_could_hide():
    assert escape("a\x00\ud800\u202eb") == "a[U+0000][U+D800][U+202E]b"
    assert escape("&<>\"'=`://") == "&amp;&lt;&gt;&quot;&#x27;&#61;&#96;&#58;//"


def test_an_id_without_bytes_is_shown_as_a_number(tmp_path):
    assert "⟨99⟩" in hostile(tmp_path).text


def test_an_untrained_run_shows_whole_characters_that_its_tokens_share(tmp_path):
    found = page(tmp_path, sequences([2, 3, 5], [False, False, True]), terms([2], [1.0]))
    assert "😀" in found.text


# --- what is shown ---


def test_traces_are_shown_by_their_share_of_the_gradient(tmp_path):
    s = sequences([5] * 7, [False, True, True] + [False, True] * 2, trace=[0, 1, 2], cu=[0, 3, 5, 7])
    # |gradient| sums: trace 0: 0.1 + 0.1, trace 1: 0.6, trace 2: 0. Together 0.8.
    found = page(tmp_path, s, terms([1, 2], [0.1, -0.1]), terms([4, 6], [-0.6, 0.0]))
    assert "The 2 traces below have 100 % of the gradient" in found.text
    assert found.text.index("75 %") < found.text.index("25 %")
    assert [tag for tag in found.tags if tag == "details"] == ["details"] * 2
    assert [value.rsplit("·", 1)[1].strip() for value in found.numbers()] == [
        "100 % of the trace's gradient",
        "50 % of the trace's gradient",
        "50 % of the trace's gradient",
    ]


def test_hovering_a_token_gives_its_numbers(tmp_path):
    s = sequences([5, 5, 5], [False, True, True])
    step = terms(
        [1, 2],
        [-0.3, 0.0],
        ratio=[1.25, 0.5],
        weight=[2.0, 1.0],
        advantages=[1.5, -2.0],
        keep=[True, False],
        clipped=[0, 0],
    )
    first, second = page(tmp_path, s, step).numbers()
    assert first.split("  ·  ") == [
        "sampled, level T0, turn 0",
        "ratio 1.25",
        "weight 2",
        "kept",
        "advantage +1.5",
        "logprob -0.25, recorded -0.5",
        "100 % of the trace's gradient",
    ]
    assert "masked" in second
    assert "advantage -2" in second


def test_colours_say_which_way_and_how_far(tmp_path):
    s = sequences([5] * 4, [False, True, True, True])
    step = terms(
        [1, 2, 3],
        [-4.0, 1.0, 0.0],
        ratio=[1.5, 1 / 1.5, 1.0],
        weight=[0.0, 1.0, 1.5**0.5],
        advantages=[1.0, -0.5, 0.0],
        clipped=[False, False, True],
    )
    spans = [value for tag, name, value in page(tmp_path, s, step).attributes if tag == "span" and name == "class"]
    # A gradient below 0 pushes up; colour goes with the square root of the magnitude: 8 + 8, and 8 - 8 * (1/4) ** 0.5.
    assert [value for value in spans if value.startswith("t ")][-3:] == ["t p16 a16 r16 w0", "t p4 a4 r0", "t w12 c"]


def test_given_template_and_untrained_tokens_are_told_apart(tmp_path):
    s = sequences([5] * 6, [False, False, False, True, False, False])
    s = replace(s, source=np.array([0, 0, 1, 2, 2, 1], np.uint8))
    found = page(tmp_path, s, terms([3], [1.0]))
    kinds = [value for tag, name, value in found.attributes if tag == "span" and name == "class"]
    assert kinds[-5:] == ["g", "p", "t p0 a16", "s", "p"]


def test_branches_of_a_forked_trace_stand_one_after_another(tmp_path):
    s = sequences([5] * 6, [False, True, True] * 2, trace=[0, 0], cu=[0, 3, 6])
    found = page(tmp_path, s, terms([1, 2, 4, 5], [1.0] * 4))
    assert found.tags.count("pre") == 2
    assert "branch 2 of 2" in found.text


@pytest.mark.parametrize(
    ("advantages", "group", "sentence"),
    [
        ([1.0, -1.0], [0, 1], "They have advantages of both signs and come from 2 groups."),
        ([1.0, 0.5], [0, 0], "They have positive advantages and come from 1 group."),
        ([-1.0, 0.0], [0, 1], "They have negative advantages and come from 2 groups."),
        ([0.0, 0.0], [0, 0], "They have advantage 0 and come from 1 group."),
    ],
)
def test_the_sentence_about_the_shown_traces_is_that_of_their_advantages(tmp_path, advantages, group, sentence):
    s = sequences([5] * 2, [True] * 2, trace=[0, 1], cu=[0, 1, 2], group=group)
    assert sentence in page(tmp_path, s, terms([0, 1], [0.1, 0.2], advantages=advantages)).text
    alone = page(tmp_path, s, terms([0], [0.1])).text
    assert "The trace below has 100 % of the gradient" in alone
    assert "They have" not in alone


def test_the_page_counts_what_was_trained_and_what_was_not(tmp_path):
    summary = {
        "trained": {"traces": 3, "tokens": 9, "traces_with_gradient": 1, "tokens_with_gradient": 6},
        "held_out": {"traces": 1, "tokens": 4},
        "dropped": {"traces": 2, "tokens": 4871},
        "truncated": {"traces": 0, "tokens": 0},
    }
    found = page(tmp_path, sequences([5, 5], [False, True]), summary=summary).text
    assert "trained tokens9gradient from1 of 3 traces, 6 tokensheld out1 trace, 4 tokens" in found
    assert "left out, too long2 traces, 4,871 tokens" in found
    assert "cut, too long" not in found


def test_the_page_has_success_and_facts(tmp_path):
    summary = {
        "before": {"success": 0.39, "ci95": [0.35, 0.43], "n": 512},
        "after": {"success": 0.68, "ci95": [0.64, 0.72], "n": 512},
        "seconds": {"read": 0.5, "train": 45.25},
        "seed": 3,
    }
    found = page(tmp_path, sequences([5, 5], [False, True]), rows=[{"step": 62}], summary=summary)
    assert "39.0 % [35.0, 43.0], n = 512" in found.text
    assert "68.0 % [64.0, 72.0], n = 512" in found.text
    assert "steps62traces1" in found.text
    assert "seconds45.8seed3" in found.text


def row(step, value, low, high, **more):
    """Return a row of metrics.jsonl with a reliable off-policy estimate; the recorded reward is 0.445."""
    estimate = {"ope": value, "ope_low": low, "ope_high": high, "ope_reliable": 1, "ope_recorded_reward": 0.445}
    sample = {"ope_ess": 80.0, "ope_ess_fraction": 0.625, "ope_traces": 128, "ope_clamped": 0}
    return {"step": step, "loss": 0.1, **estimate, **sample, **more}


BEFORE, TWO_GROUPS = row(0, 0.445, 0.34, 0.55), {"trace": [0, 1], "cu": [0, 1, 2], "group": [0, 1]}


def opening(found):
    """Return the text of the page before its curves or settings, without the style."""
    body = found.raw[found.raw.index("<body>") :]
    return Page(body[: body.index("</section>")] + "</section></main></body>").text


def of_rows(tmp_path, rows, **more):
    return page(tmp_path, sequences([5, 5], [True, True], **TWO_GROUPS), terms([0, 1], [1.0, 1.0]), rows=rows, **more)


def test_the_page_begins_with_the_outcome_and_then_curves_settings_alignment_traces(tmp_path):
    found = of_rows(tmp_path, [BEFORE, row(6, 0.754, 0.641, 0.844)], about=[("optimizer.lr", 0.1)])
    assert ids(found) == ["outcome", "curves", "settings", "alignment", "traces"]
    headings = [tag for tag in found.tags if tag in ("h1", "h2", "h3")]
    assert headings == ["h1", "h2", "h3", "h2", "h2", "h2", "h2"]
    assert found.tags.index("h2") < found.tags.index("svg") < found.tags.index("table")


@pytest.mark.parametrize(
    ("last", "verdict", "kind"),
    [
        (row(6, 0.754, 0.641, 0.844), "Training helped, according to the off-policy estimate", "helped"),
        (row(6, 0.3, 0.2, 0.4), "Training made the policy worse, according to the off-policy estimate", "worse"),
        (row(6, 0.5, 0.4, 0.6), "It cannot be told whether training helped", "unclear"),
    ],
)
def test_the_off_policy_estimate_tells_whether_training_helped(tmp_path, last, verdict, kind):
    found = of_rows(tmp_path, [BEFORE, last])
    assert f'<h2 class="verdict {kind}">{verdict}</h2>' in found.raw
    assert f"after step 6, with a 95 % interval of {last['ope_low']} to {last['ope_high']}" in opening(found)
    assert "80 of 128 held-out traces" in opening(found)
    assert ("The interval contains zero" in opening(found)) == (kind == "unclear")
    change = float(f"{last['ope'] - BEFORE['ope']:.3g}")
    assert f"The difference is {change:+g}, with a 95 % interval of" in opening(found)


def test_the_estimate_is_compared_with_that_before_training_and_not_with_another_policys_reward(tmp_path):
    start = row(0, 0.9, 0.85, 0.95)  # The records (reward 0.445) are of a weaker policy than the one trained.
    assert 'class="verdict worse"' in of_rows(tmp_path, [start, row(6, 0.7, 0.6, 0.8)]).raw
    unreliable = {**start, "ope_reliable": 0}
    found = of_rows(tmp_path, [unreliable, row(6, 0.7, 0.6, 0.8)])
    assert 'class="verdict unclear"' in found.raw
    assert "no reliable estimate before training" in opening(found)
    # The intervals of both count: the difference of 0.15 has an interval from 0.15 - 0.2 on.
    assert 'class="verdict unclear"' in of_rows(tmp_path, [row(0, 0.5, 0.4, 0.7), row(6, 0.65, 0.6, 0.7)]).raw


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (
            {"ope_ess": 7.5, "ope_ess_fraction": 0.0586},
            "effective sample size is 7 of 128 held-out traces, and at least 39",
        ),
        ({"ope_clamped": 3}, "3 of 128 held-out traces have a clamped weight"),
        ({"ope_traces": 0, "ope": None}, "no held-out trace has a reward and a recorded logprob"),
        ({"ope_traces": 4, "ope_ess": 4.0, "ope_ess_fraction": 1.0}, "only 4 held-out traces"),
        ({"ope_low": None, "ope_high": None}, "the held-out traces are of one group"),
        ({"ope_low": 0.5, "ope_high": 0.5}, "all held-out traces have the same reward"),
    ],
)
def test_an_unreliable_estimate_is_unknown_with_a_reason(tmp_path, last, reason):
    reliable = row(3, 0.61, 0.52, 0.73)
    found = of_rows(tmp_path, [BEFORE, reliable, row(6, 0.987, 0.7, 0.99, **{"ope_reliable": 0, **last})])
    assert 'class="verdict unclear"' in found.raw
    assert "Off-policy estimate: unknown" in opening(found)
    assert reason in opening(found)
    assert "0.987" not in found.text
    assert "The last reliable estimate is 0.61 [0.52, 0.73], after step 3." in opening(found)


def test_an_estimate_that_was_not_made_is_unknown_with_a_reason(tmp_path):
    assert "no optimizer step has been taken" in opening(of_rows(tmp_path, []))
    assert "no optimizer step has been taken" in opening(of_rows(tmp_path, [BEFORE]))
    assert "not evaluated after a step" in opening(of_rows(tmp_path, [BEFORE, {"step": 1, "loss": 0.1}]))
    assert "no group is held out (data.holdout)" in opening(of_rows(tmp_path, [{"step": 1, "loss": 0.1}]))
    as_text = opening(of_rows(tmp_path, [{"step": 1, "loss": 0.1, "rollout_logprob_coverage": 0.0}]))
    assert "no trained token has a recorded logprob" in as_text
    alone = page(tmp_path, sequences([5, 5], [False, True]), rows=[{"step": 1, "loss": 0.1}])
    assert "fewer than two groups" in opening(alone)


def test_measured_success_comes_first_and_decides(tmp_path):
    rates = [{"success": share, "ci95": [share - 0.04, share + 0.04], "n": 512} for share in (0.39, 0.68)]
    found = of_rows(
        tmp_path, [BEFORE, row(6, 0.5, 0.4, 0.6)], summary=dict(zip(("before", "after"), rates, strict=True))
    )
    # 0.29 -+ (0.04 ** 2 + 0.04 ** 2) ** 0.5 = 0.29 -+ 0.0566
    assert "The difference is +29.0 percentage points, with a 95 % interval of +23.3 to +34.7." in opening(found)
    assert '<h2 class="verdict helped">Training helped, measured on fresh prompts</h2>' in found.raw
    assert found.text.index("Success on fresh prompts") < found.text.index("Off-policy estimate")
    add_success(tmp_path / "report.html", rates[1], rates[0])
    added = Page((tmp_path / "report.html").read_text("utf-8"))
    assert added.raw.count('class="verdict') == 1
    assert 'class="verdict worse">Training made the policy worse, measured on fresh prompts<' in added.raw
    assert "Off-policy estimate" in added.text
    add_success(tmp_path / "report.html", rates[0], {"success": 0.42, "ci95": [0.38, 0.46], "n": 512})
    assert 'class="verdict unclear"' in (tmp_path / "report.html").read_text("utf-8")


def test_the_reward_of_recorded_traces_is_no_curve_and_that_of_rollouts_is(tmp_path):
    rows = [{"step": step, "loss": 0.1, "reward": step / 10} for step in range(1, 5)]
    assert "<b>reward</b>" not in of_rows(tmp_path, rows).raw
    online = [{**each, "trajectories": 8} for each in rows]
    assert "<b>reward</b>" in of_rows(tmp_path, online).raw
    assert "<b>reward</b>" not in overlay_curves({"a": rows})
    assert "<b>reward</b>" in overlay_curves({"a": rows, "b": online})
    overlaid = overlay_curves({"a": rows, "b": online})
    assert overlaid.count('<polyline class="line s0"') == 1  # a's loss
    assert overlaid.count('<polyline class="line s1"') == 2  # b's loss and reward: a run keeps its colour
    assert overlaid.count('<span class="key s1">b</span>') == 2


def rollouts(step, reward, **more):
    return {"step": step, "reward": reward, "trajectories": 8 * step, **more}


def test_an_online_run_is_judged_by_its_evaluation_and_then_by_its_rewards(tmp_path):
    # Ten rewards 0.2 and 0.4 in turn: mean 0.3, deviation (10 * 0.01 / 9) ** 0.5 = 0.10541, and
    # 2.262 * 0.10541 / 10 ** 0.5 = 0.0754. The last ten are higher by 0.4: 0.4 -+ 0.0754 * 2 ** 0.5 = 0.4 -+ 0.1066.
    steps = [rollouts(n, 0.2 + 0.2 * (n % 2) + 0.4 * (n > 10), traces=8, tokens_trained=50) for n in range(1, 21)]
    found = of_rows(tmp_path, steps, part="step 20")
    assert "+0.4, with a 95 % interval of +0.293 to +0.507." in opening(found)
    assert "Training helped, according to the reward of the rollouts" in opening(found)
    assert "Off-policy" not in opening(found)
    assert "traces160trained tokens1,000" in found.text  # sums over all steps
    assert "Alignment in step 20" in found.text
    evaluations = [
        {"step": step, "eval_reward": mean, "eval_low": mean - 0.1, "eval_high": mean + 0.1, "eval_tasks": 50}
        for step, mean in ((0, 0.0), (20, 0.05))
    ]
    found = of_rows(tmp_path, [evaluations[0], *steps, evaluations[1]])
    assert 'class="verdict unclear"' in found.raw
    assert "0.05 after step 20, and 0 before training. The difference is +0.05" in opening(found)
    assert "-0.0914 to +0.191. The interval contains zero." in opening(found)  # 0.05 -+ 0.1 * 2 ** 0.5
    assert opening(found).index("Evaluation") < opening(found).index("Reward of the rollouts")
    assert "no second evaluation" in opening(of_rows(tmp_path, [evaluations[0], *steps]))
    no_interval = {**evaluations[1], "eval_low": None, "eval_high": None}
    equal = {**evaluations[1], "eval_reward": 1.0, "eval_low": 1.0, "eval_high": 1.0}
    few = {**evaluations[1], "eval_tasks": 9, "eval_reward": 0.9, "eval_low": 0.8, "eval_high": 1.0}
    for last in (no_interval, equal, few):
        found = of_rows(tmp_path, [evaluations[0], *steps, last])
        assert "fewer than 10 tasks, or equal rewards" in opening(found)
    assert "20 are needed" in opening(of_rows(tmp_path, steps[:19]))
    filtered = [{**each, "groups_zero_std": 1} for each in steps]
    assert "leave out groups with equal rewards" in opening(of_rows(tmp_path, filtered))
    without_updates = [{**each, "step": each["step"] + (each["step"] > 15)} for each in steps]
    assert "leave out groups with equal rewards" in opening(of_rows(tmp_path, without_updates))


def test_tables_have_headings_and_fields_have_labels(tmp_path):
    found = of_rows(tmp_path, [BEFORE], about=[("optimizer.lr", 0.1)])
    scopes = [value for tag, name, value in found.attributes if tag == "th" and name == "scope"]
    assert len(scopes) == found.tags.count("th")
    assert {"row", "col"} == set(scopes)
    inputs = {value for tag, name, value in found.attributes if tag == "input" and name == "id"}
    assert inputs == {value for tag, name, value in found.attributes if tag == "label" and name == "for"}
    assert ("html", "lang", "en") in found.attributes


def test_success_can_be_added_when_it_is_known(tmp_path):
    page(tmp_path, sequences([5, 5], [False, True]), title="<!--success-->")
    path = tmp_path / "report.html"
    for share in (0.5, 0.75):
        add_success(path, {"success": 0.25, "ci95": [0.2, 0.3], "n": 8}, {"success": share, "ci95": [0.4, 0.9], "n": 8})
    found = Page(path.read_text("utf-8"))
    assert found.text.count("75.0 % [40.0, 90.0], n = 8") == 1
    assert "50.0 %" not in found.text
    assert found.open == []
    path.write_text("<p>another page</p>")
    with pytest.raises(ReadError, match="TG-REPORT-003"):
        add_success(path, {}, {})
    with pytest.raises(ReadError, match="TG-REPORT-002"):
        add_success(tmp_path / "missing", {}, {})


def test_tables_show_alignment_levels_and_mismatches(tmp_path):
    s = sequences([5, 5, 5], [False, True, True])
    one = np.zeros(1, np.int32)
    report = AlignmentReport(
        np.zeros(1, np.uint8), one, one, one, one + 4, ("x",), ("R99 made_up",), recorded=2, exact=1
    )
    found = page(tmp_path, replace(s, alignment_report=report))
    assert "R99 made_up114" in found.text
    assert "50 % of 2 recorded tokens" in found.text
    assert "T0" in found.text


def test_a_run_without_rows_or_terms_is_a_page_too(tmp_path):
    found = page(tmp_path, sequences([5, 5], [False, True]))
    assert ids(found) == ["outcome", "settings", "alignment"]


# --- size ---


def test_long_runs_are_cut_with_a_note(tmp_path):
    given = 5000
    s = sequences([5] * (given + 2000), [False] * given + [True] * 2000)
    found = page(tmp_path, s, terms(range(given, given + 2000), [1.0] * 2000))
    assert "4,780 tokens not shown" in found.text
    assert "500 more trained tokens of this branch, 25 % of the trace's gradient, are not shown" in found.text
    assert len(found.numbers()) == 1500


def test_the_page_says_when_traces_do_not_fit(tmp_path):
    count = 30
    s = sequences([5, 5] * count, [False, True] * count, trace=range(count), cu=range(0, 2 * count + 1, 2))
    found = page(tmp_path, s, terms(range(1, 2 * count, 2), [1.0] * count), max_bytes=2000)
    shown = found.tags.count("details")
    assert 1 <= shown < 20
    assert f"{20 - shown} more would make this page larger" in found.text
    assert len(found.raw) < 2000 + 30_000


def test_a_full_disk_is_a_clear_error(tmp_path):
    with pytest.raises(ReadError, match="TG-REPORT-004"):
        page(tmp_path / "missing", sequences([5, 5], [False, True]))


def test_a_message_of_ten_megabytes_leaves_the_page_small_and_says_what_is_not_shown(tmp_path):
    given = 2_500_000
    s = sequences(np.full(given + 3, 5, np.int32), np.arange(given + 3) >= given)
    found = page(tmp_path, s, terms(range(given, given + 3), [1.0] * 3))
    assert "2,499,780 tokens not shown" in found.text
    assert len(found.raw) < 60_000
    assert len(found.numbers()) == 3


class Long:
    """Tokens of 5 MB, of nothing but what must be escaped."""

    def decode_bytes(self, ids):
        return b"<&\x00\xff" * 1_250_000


@pytest.mark.parametrize("kind", ["runs", "branches", "terms"])
def test_no_trace_of_long_tokens_or_many_pieces_makes_the_page_large(tmp_path, kind):
    count = 4000
    trainable = np.arange(count) % 2 == 1 if kind == "runs" else np.full(count, kind == "terms")
    trainable[-1] = True
    cu = range(0, count + 1, 2) if kind == "branches" else [0, count]
    s = sequences([5] * count, trainable, trace=[0] * (len(cu) - 1), cu=cu)
    own = np.flatnonzero(trainable)
    write_report(tmp_path / "r.html", rows=(), sequences=s, tokenizer=Long(), terms=[terms(own, [1.0] * len(own))])
    found = Page((tmp_path / "r.html").read_text("utf-8"))
    assert len(found.raw) < 400_000
    assert "4,999,744 bytes more" in found.text
    assert "not shown" in found.text
    assert found.open == []


ANY = st.text(max_size=40) | st.sampled_from([HOSTILE, "<!--success-->", "]]>", "<" * 5000, "\ud800", "&#60;script>"])


@given(ANY, ANY, ANY, ANY, ANY, st.lists(st.binary(max_size=300) | st.just(HOSTILE.encode()), min_size=1, max_size=6))
@settings(max_examples=60)
def test_whatever_text_a_stranger_wrote_stays_text(tmp_path_factory, title, trace, group, reward, reason, pieces):
    s = sequences(range(len(pieces)), [False] + [True] * (len(pieces) - 1), rewards=[1.0], reward_names=(reward,))
    one = np.zeros(1, np.int32)
    report = AlignmentReport(np.zeros(1, np.uint8), one, one, one, one, (reason,), (reason,), recorded=2, exact=1)
    s = replace(s, trace_ids=(trace,), group_names=(group,), alignment_report=report)
    tokens = SimpleNamespace(decode_bytes=lambda ids: pieces[ids[0]])
    path = tmp_path_factory.getbasetemp() / "any.html"
    shown = [terms(range(1, len(pieces)), [1.0] * (len(pieces) - 1))] if len(pieces) > 1 else []
    rows = [{"step": 1, "loss": 0.5, reward: reason}, {"step": trace, "loss": title}]
    given = {"rows": rows, "summary": {"seed": group, "seconds": {title: 1.0}}, "title": title}
    write_report(path, sequences=s, tokenizer=tokens, terms=shown, **given)
    found = Page(path.read_text("utf-8"))
    assert set(found.tags) <= set(TAGS.split())
    assert found.tags.count("script") == 1
    assert found.open == []
    assert not [name for _, name, _ in found.attributes if name.startswith("on") or name in ("src", "href", "action")]
    assert len(found.raw) < 120_000


# --- curves ---


def test_a_curve_goes_through_its_points():
    drawn = chart([{"step": 1, "x": 0.0}, {"step": 2, "x": 1.0}, {"step": 3, "x": 0.5}], Panel("x", ("x",), ""))
    # The plot is 46..330 wide and 154..10 high; ticks at 0, 0.5 and 1.
    assert 'points="46.0,154.0 188.0,10.0 330.0,82.0"' in drawn
    assert "step 2: 1<" in drawn


def test_labels_of_an_axis_differ_and_a_share_of_zero_is_at_its_floor():
    def labels(values, floor):
        rows = [{"step": step, "x": value} for step, value in enumerate(values)]
        drawn = chart(rows, Panel("x", ("x",), "", floor=floor))
        return re.findall(r'<text class="y"[^>]*>([^<]*)<', drawn)

    assert labels([0.11464, 0.11468], None) == ["0.11464", "0.11466", "0.11468"]
    assert labels([0.1145, 0.114575], None) == ["0.114500", "0.114525", "0.114550", "0.114575"]
    assert labels([12000.0, 12002.0], None) == ["12,000", "12,001", "12,002"]
    assert labels([0.0, 0.0], 0.0)[0] == "0"
    without_sample = [{"step": 1, "loss": 1.0, "ope_ess_fraction": 0.0, "ope_traces": 0}]
    assert "effective sample size" not in curves(without_sample)
    assert "effective sample size" in curves([{**without_sample[0], "ope_traces": 3}])


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "0.3", True, 1e300])
def test_what_is_no_number_is_left_out_of_a_curve(value):
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": value}, {"step": 3, "loss": 2.0}]
    drawn = curves(rows)
    assert drawn.count('class="at"') == 2
    assert "nan" not in drawn
    assert "inf" not in drawn


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1.0, 1.0000000000000002], [-1e-9, -1e-9, 2e-9], [1e20, -1e20]])
def test_flat_and_extreme_curves_can_be_drawn(values):
    drawn = curves([{"step": step, "loss": value} for step, value in enumerate(values)])
    assert "nan" not in drawn
    assert drawn.count("<figure>") == 1


def test_many_steps_are_thinned_to_means_and_the_last_stays():
    rows = [{"step": step, "loss": float(step)} for step in range(1001)]
    drawn = curves(rows)
    assert drawn.count('class="at"') <= 151
    assert "<output>1,000</output>" in drawn
    assert _thinned([]) == []


def test_the_interval_of_value_is_drawn_where_it_is_known():
    rows = [
        {"step": 1, "ope": 0.4, "ope_low": 0.3, "ope_high": 0.5, "ope_recorded_reward": 0.4, "ope_reliable": 1},
        {"step": 2, "ope": 0.5, "ope_low": math.nan, "ope_high": math.nan},
        {"step": 3, "ope": 0.6, "ope_low": 0.4, "ope_high": 0.9},
    ]
    rows = [rows[0], {**rows[1], "ope_reliable": 0}, {**rows[2], "ope_reliable": 1}]
    drawn = curves(rows)
    assert drawn.count('class="band s0"') == 1
    assert 'class="level"' in drawn
    assert "0.6 [0.4, 0.9]" in drawn
    assert "step 2" not in drawn
    assert "off-policy estimate" not in curves([{**rows[2], "ope_reliable": 0}])


def test_examples_are_good_and_bad_ones_of_many_groups():
    """Six traces of two groups, good ones have the larger gradients: twenty alike would be 0, 1, 2, 3."""
    s = sequences([5] * 6, [True] * 6, trace=range(6), cu=range(7), group=[0, 0, 0, 1, 1, 1])
    magnitudes, sign = [6.0, 5.0, 0.5, 4.0, 0.4, 0.3], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    values = PerToken.of(6, [terms(range(6), magnitudes, advantages=sign)])
    assert [trace for trace, _ in select_examples(s, values, 4)] == [0, 3, 2, 4]
    assert [trace for trace, _ in select_examples(s, values, 9)] == [0, 1, 3, 2, 4, 5]


def test_the_page_has_the_settings_of_the_run(tmp_path):
    options = {
        "about": [("optimizer.lr", 0.1), ("train.epochs", 4), (HOSTILE, HOSTILE)],
        "links": ["summary.json", "../x", "a b"],
    }
    found = page(tmp_path, sequences([5], [False]), **options)
    assert "optimizer.lr0.1train.epochs4" in found.text
    assert "<td>4</td>" in (tmp_path / "report.html").read_text(), "an option is no column of figures"
    assert [value for _, name, value in found.attributes if name == "href"] == ["summary.json"]
    assert found.tags.count("script") == 1


def test_a_long_setting_is_whole_and_one_beyond_measure_is_visibly_cut(tmp_path):
    loss, monster = "+ KL * 0.001 " * 40, "x" * 5_000
    found = of_rows(tmp_path, [BEFORE], about=[("loss", loss), ("run.name", monster)])
    assert loss.strip() in found.text
    assert "x" * 4_000 + " …" in found.raw
    assert "x" * 4_001 not in found.raw
