"""Every family of causal LMs in transformers: a road that is taken has the numbers of branches alone."""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import families, model_of
from row_by_row import one_by_one, relative
from tracegrad import model as policy
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.model import verify
from tracegrad.model.verify import ForwardMode, check_forward_mode
from tracegrad.packing import pack

TELLING = {  # how a plain row and a tree run, "" for a refusal
    "qwen3": ("stack", "mask"),
    "mistral": ("stack", "mask"),  # a window of 5
    "llama4": ("stack", ""),  # chunks, and a decoder that it does not name
    "mpt": ("stack", ""),  # biases by place in the row
    "gpt_neo": ("stack", ""),  # a window by place in the row
    "bart": ("stack", ""),  # positions by place in the row
    "bloom": ("stack", ""),
    "falcon": ("stack", ""),
    "openai-gpt": ("stack", ""),
    "mamba": ("stack", ""),
    "cpmant": ("", ""),  # sees what follows
    "modernbert-decoder": ("", ""),  # its head is not a linear layer alone
}


def case(seed=0, longest=0):
    """Five branches that share 18 tokens, 24, or none; some end untrained, so that a tail is left out."""
    rng = np.random.default_rng(seed)
    draw = lambda count: rng.integers(3, 61, count).tolist()  # noqa: E731
    prefix = draw(18)
    more = prefix + draw(6)
    branches = [more + draw(9), more + draw(4), prefix + draw(14), prefix + draw(15 + longest), draw(21)]
    cu = np.r_[0, np.cumsum([len(branch) for branch in branches])]
    trainable = rng.random(cu[-1]) < 0.6
    trainable[cu[:-1]] = False
    logprobs = np.where(trainable, -1.0, np.nan)
    return Sequences.from_arrays(np.concatenate(branches), cu, logprobs, trainable, group=[0] * 5)


@torch.no_grad()
def taken(model, s, share):
    """The plan of one row of all branches and how far its logprobs are from each branch's alone; or the refusal."""
    [step] = pack(s, np.zeros(s.traces), tokens_per_row=s.tokens, share_prefixes=share)
    [batch] = step.batches
    batch = batch.to("cpu")
    assert (step.sharing is not None and step.sharing.shared) == share
    try:
        logp, plan = policy.logprobs(model, batch), policy.forward_plan(model, batch)
    except ArgumentError as error:
        return "", str(error)
    wanted = one_by_one(model, s)[torch.from_numpy(np.searchsorted(s.terms, step.origin[batch.term]))]
    return plan, relative(logp, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TELLING)
def test_a_family_is_run_as_its_branches_alone_or_refused_with_the_reason(kind):
    model = model_of(kind)
    for share, plan in zip((False, True), TELLING[kind], strict=True):
        found, told = taken(model, case(), share)
        assert found == plan, told
        assert told.count(". ") >= 1 if plan == "" else told < 1e-5


@pytest.mark.nightly  # two minutes
@pytest.mark.filterwarnings("ignore")
def test_no_family_of_transformers_is_silently_wrong_or_raises_raw():
    seen = {}
    for kind in families():
        try:
            model = model_of(kind)
            with torch.no_grad():
                one_by_one(model, case())
        except Exception as error:  # a config that cannot be made tiny, or a package that is missing
            seen[kind] = f"not tried: {type(error).__name__}"
            continue
        for share in (False, True):
            plan, told = taken(model, case(), share)
            assert plan == "" or told < 1e-4, (kind, share, plan, told)
            seen[kind, share] = plan
        del model
        gc.collect()
    tried = [key for key in seen if isinstance(key, tuple)]
    assert len(tried) >= 2 * 120
    assert sum(seen[key] == "mask" for key in tried) >= 70
    assert sum(seen[key] == "stack" for key in tried) >= 100


def windowed(window):
    """A model that attends to `window` tokens by place in the row, and says so nowhere: positions are its depth."""
    torch.manual_seed(0)
    small = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    config = transformers.Qwen3Config(**small, **heads, initializer_range=0.5, attn_implementation="eager")
    model = transformers.Qwen3ForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    plain = attention.forward

    def narrow(hidden_states, *rest, attention_mask=None, **named):
        index = torch.arange(hidden_states.shape[1])
        near = (index[:, None] - index[None, :] < window)[None, None]
        return plain(hidden_states, *rest, attention_mask=attention_mask.masked_fill(~near, -1e30), **named)

    attention.forward = narrow
    return model


def test_a_window_that_only_long_branches_pass_is_found_when_they_come():
    model = windowed(100)
    assert taken(model, case(), True)[0] == "mask"
    plan, told = taken(model, case(longest=120), True)
    assert plan == ""
    assert "prefixes cannot be shared: hidden states of Qwen3ForCausalLM on branches of" in told
    assert taken(model, case(longest=120), False)[0] == "stack"


def test_a_cap_on_logits_is_found_where_ordinary_logits_do_not_reach_it():
    class Capped(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = 30 * (out.logits / 30).tanh()
            return out

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Capped(transformers.LlamaConfig(vocab_size=61, **small))
    with pytest.raises(ArgumentError, match=r"TG-MODEL-016.*Capped"):
        policy.head_of(model)


def test_a_model_is_compared_once_for_each_length_it_meets(monkeypatch):
    model, runs = model_of("qwen3"), []
    compared = verify._compare
    monkeypatch.setattr(verify, "_compare", lambda *how: runs.append(how[2]) or compared(*how))
    for longest in (0, 0, 100, 90, 0):
        taken(model, case(longest=longest), True)
    assert runs == [40, 64, 185]  # 42 and 133 tokens: the next power of two, or all that the row holds
    assert check_forward_mode(model, ForwardMode("mask", tree=True), 185) is None
    assert len(runs) == 3


def test_comparing_leaves_gradients_mode_and_random_numbers_as_they_were():
    model = model_of("qwen3").train()
    state = torch.random.get_rng_state()
    assert check_forward_mode(model, ForwardMode("stack")) is None
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_in_bfloat16_rounding_is_allowed_and_a_wrong_road_is_not():
    assert check_forward_mode(model_of("qwen3").bfloat16(), ForwardMode("mask", tree=True), 64) is None
    for kind in ("mpt", "gpt_neo", "bart"):
        assert "would differ" in check_forward_mode(model_of(kind).bfloat16(), ForwardMode("mask", tree=True), 64)
