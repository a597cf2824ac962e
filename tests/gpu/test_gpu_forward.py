"""The packed forward under flex_attention on the device, beside the dense mask and each branch alone."""

from contextlib import nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import forked as cases
from tracegrad import model as policy
from tracegrad.model.attention import enable_flex_attention
from tracegrad.packing import pack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SHAPE = {
    "vocab_size": cases.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # the least that flex_attention takes on CUDA
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
FAMILIES = {
    "Qwen3": {"tie_word_embeddings": True},  # norms of queries and keys, which autocast leaves in float32
    "Llama": {"attention_bias": True},
    "Gemma3": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},  # attention sinks
}


def model_of(name, device):
    """Random weights, float32."""
    torch.manual_seed(3)
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")(**{**SHAPE, **FAMILIES[name]})
    return getattr(transformers, name + "ForCausalLM")(config).to(device).eval()


def by_blocks(model):
    """As the learner has it on CUDA, architectures with attention sinks too, which have no sdpa."""
    enable_flex_attention(model)
    assert model.config._attn_implementation == "tracegrad_flex"
    return model


def autocast(device, dtype):
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def measured(model, case, device, dtype, *, share, plan=None):
    """Logprobs [M] of all terms and the gradient of a weighted sum of them."""
    told = {"tokens_per_row": 512, "share_prefixes": share, "pad_to_multiple_of": 128}
    [step] = pack(case.sequences, case.advantages, **told)
    assert not share or step.sharing.shared
    in_order = torch.from_numpy(np.searchsorted(case.sequences.terms, step.origin)).to(device)
    logp = torch.zeros(len(step), device=device)
    model.zero_grad()
    with autocast(device, dtype):
        for batch in step.batches:
            found = policy.logprobs_and_entropy(model, batch, plan=plan)[0]
            logp = logp.index_put((in_order[torch.from_numpy(batch.term).long().to(device)],), found)
    (logp * torch.linspace(-1, 2, len(logp), device=device)).sum().backward()
    return logp.detach(), gradient(model)


def gradient(model):
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def one_by_one(model, case, device, dtype):
    """The same from each branch alone and the model's own logits, without any of our masks."""
    s, found = case.sequences, []
    model.zero_grad()
    with autocast(device, dtype):
        for start, end in zip(s.cu_seqlens, s.cu_seqlens[1:], strict=False):
            ids = torch.from_numpy(s.ids[start:end]).long().to(device)
            heat = torch.from_numpy(s.inv_temperature[start:end]).to(device).roll(-1)[:, None]
            scores = model(input_ids=ids[None]).logits[0].float() * heat
            logp = scores.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
            found.append(logp[torch.from_numpy(s.trainable[start + 1 : end]).to(device)])
    logp = torch.cat(found)
    (logp * torch.linspace(-1, 2, len(logp), device=device)).sum().backward()
    return logp.detach(), gradient(model)


def apart(found, expected):
    """Relative distances of the logprobs and of the gradients."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@pytest.fixture(scope="module")
def case():
    """Forked traces of several groups: about 300 tokens, more than two of flex_attention's blocks."""
    return cases.forked(more=24, stem=24)


@pytest.mark.parametrize("share", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_under_flex_attention_are_each_branch_alone_in_float32(device, case, name, share):
    expected = one_by_one(model_of(name, device), case, device, torch.float32)
    model = by_blocks(model_of(name, device))
    [step] = pack(case.sequences, case.advantages, tokens_per_row=512, share_prefixes=share)
    assert policy.forward_plan(model, step.batches[0].to(device)) == "flex"
    found = apart(measured(model, case, device, torch.float32, share=share), expected)
    assert found[0] < 1e-5
    assert found[1] < 1e-4


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
def test_rows_under_flex_attention_are_those_under_the_dense_mask(device, case, name):
    dense = measured(model_of(name, device), case, device, torch.float32, share=True, plan="mask")
    blocks = measured(by_blocks(model_of(name, device)), case, device, torch.float32, share=True)
    assert max(apart(blocks, dense)) < 1e-4


@pytest.mark.parametrize("share", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_rows_are_as_far_from_float32_as_each_branch_alone_is(device, case, name, share):
    """bfloat16 moves any two roads apart; ours may not be further from float32 than twice the model's own distance."""
    exact = one_by_one(model_of(name, device), case, device, torch.float32)
    theirs = apart(one_by_one(model_of(name, device), case, device, torch.bfloat16), exact)
    ours = apart(measured(by_blocks(model_of(name, device)), case, device, torch.bfloat16, share=share), exact)
    assert ours[0] < 2 * theirs[0] + 1e-3
    assert ours[1] < 2 * theirs[1] + 1e-2
