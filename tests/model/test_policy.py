"""The packed forward and the head: the same numbers and the same gradient, whatever the road."""

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

import forked as cases
from row_by_row import one_by_one, relative, torch
from tracegrad import model as policy
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.model import attention, token_logprobs
from tracegrad.model.attention import enable_flex_attention
from tracegrad.packing import Batch, pack

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SLIDING = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
MODELS = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Qwen2": SLIDING,  # first layer full, second sliding
    "Llama": {"attention_bias": True},
    "Mistral": {"head_dim": 8, "sliding_window": 5},
    "Gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "Gemma3": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 4.0},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def model_of(name, dtype=torch.float64, **more):
    torch.manual_seed(3)
    known = {**SMALL, **MODELS.get(name, {}), **more}
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")(**known)
    config.initializer_range = 0.3
    return getattr(transformers, name + "ForCausalLM")(config).to(dtype).eval()


def sequences(seed=0, traces=9):
    """Forked traces of 2 to 25 tokens, among them one without a term and a branch that ends with its term."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 26, traces + 4)
    lengths[0] = 2
    trace = np.r_[np.arange(traces), [traces - 1] * 2, traces, traces + 1]
    cu = np.r_[0, lengths.cumsum()]
    trainable = rng.random(cu[-1]) < 0.4
    trainable[cu[:-1]] = False
    trainable[cu[3] : cu[4]] = False
    trainable[cu[1:] - 1] |= np.arange(len(lengths)) % 2 == 1
    logprobs = np.where(trainable, -1.0, np.nan)
    return Sequences.from_arrays(
        rng.integers(0, SMALL["vocab_size"], cu[-1]),
        cu,
        logprobs,
        trainable,
        trace=trace,
        group=np.arange(trace[-1] + 1) // 3,
        inv_temperature=rng.uniform(0.7, 1.4, cu[-1]),
    )


def padded(model, s):
    """The same from one left-padded batch with an attention mask."""
    lengths = np.diff(s.cu_seqlens)
    width = int(lengths.max())
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for n, length in enumerate(lengths):
        ids[n, width - length :] = torch.from_numpy(s.ids[s.cu_seqlens[n] : s.cu_seqlens[n + 1]])
        mask[n, width - length :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    found = []
    for n, length in enumerate(lengths):
        here = slice(s.cu_seqlens[n], s.cu_seqlens[n + 1])
        scores = logits[n, width - length :] * torch.from_numpy(s.inv_temperature[here]).roll(-1)[:, None]
        logp = scores.log_softmax(-1)[:-1].gather(1, ids[n, width - length + 1 :, None]).squeeze(1)
        found.append(logp[torch.from_numpy(s.trainable[here][1:])])
    return torch.cat(found)


def packed(model, s, budget=40, plan=None, ranks=1):
    """Logprobs [M] in the order of `s.terms`, over all rows of all ranks."""
    found = torch.zeros(int(s.trainable.sum()), dtype=next(model.parameters()).dtype)
    for rank in range(ranks):
        for step in pack(s, np.zeros(s.traces), tokens_per_row=budget, groups_per_step=2, ranks=ranks, rank=rank):
            for batch in step.batches:
                logp = policy.logprobs(model, batch) if plan is None else by_plan(model, batch.to("cpu"), plan)
                found = found.index_put((torch.from_numpy(np.searchsorted(s.terms, step.origin[batch.term])),), logp)
    return found


def by_plan(model, batch, plan):
    hidden = policy.hidden_states(model, batch, plan)[batch.read]
    head = policy.head_of(model)
    rest = {"bias": head.bias, "softcap": head.softcap, "logit_scale": head.logit_scale}
    return token_logprobs(hidden, head.weight, batch.target, inv_temperature=batch.inv_temperature, **rest)[0]


def gradient(model, logp):
    model.zero_grad()
    (logp * torch.linspace(-1, 2, len(logp), dtype=logp.dtype)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# --- laws of the forward ---


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", ["stack", "mask"])
def test_packed_equals_one_by_one(name, plan):
    # grouped_mm takes no float64; the other two sum in float32 inside their norms or their softmax.
    special = {
        "Qwen3Moe": (torch.float32, 1e-5),
        "Gemma2": (torch.float64, 1e-6),
        "Gemma3": (torch.float64, 1e-6),
        "Cohere": (torch.float64, 1e-7),
    }
    dtype, bound = special.get(name, (torch.float64, 1e-9))
    model, s = model_of(name, dtype), sequences()
    ours, theirs = packed(model, s, plan=plan), one_by_one(model, s)
    assert relative(ours, theirs) < bound
    assert relative(gradient(model, ours), gradient(model, theirs)) < bound


@pytest.mark.parametrize("name", ["Qwen3", "Llama"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_packed_equals_padded(name, dtype, bound):
    model, s = model_of(name, dtype), sequences()
    ours, theirs = packed(model, s), padded(model, s)
    assert ours.dtype == dtype
    assert relative(ours, theirs) < bound
    assert relative(gradient(model, ours), gradient(model, theirs)) < bound


@pytest.mark.parametrize(("budget", "ranks"), [(25, 1), (26, 2), (60, 1), (60, 3), (1000, 1)])
def test_any_cut_into_rows_gives_the_same_gradient(budget, ranks):
    model, s = model_of("Qwen3"), sequences(1)
    whole = gradient(model, one_by_one(model, s))
    assert relative(gradient(model, packed(model, s, budget, ranks=ranks)), whole) < 1e-9


def forked():
    """4 5 6, then either 7 8 (read at 6) or 9: pre-order 4 5 6 7 8 9, the prefix's subtree ends with the row."""
    return Batch(
        ids=np.array([4, 5, 6, 7, 8, 9]),
        positions=np.array([0, 1, 2, 3, 4, 3]),
        tree_end=np.array([6, 6, 6, 5, 5, 6]),
        read=np.array([1, 2, 3, 2]),
        target=np.array([6, 7, 8, 9]),
        inv_temperature=np.ones(4, np.float32),
        logit_row=np.array([0, 1, 2, 0, 3]),
        term=np.arange(5, dtype=np.int32),
    )


@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Mistral", "Gemma2", "Gemma3", "Qwen3Moe"])
def test_a_shared_prefix_under_its_tree_mask_equals_its_branches_alone(name):
    tree = forked()
    trainable = [False, False, True, True, True, False, False, True, True]
    s = Sequences.from_arrays([4, 5, 6, 7, 8, 4, 5, 6, 9], [0, 5, 9], np.zeros(9) - 1, trainable)
    model = model_of(name, torch.float32 if name == "Qwen3Moe" else torch.float64)
    assert policy.forward_plan(model, tree.to("cpu")) == "mask"
    ours, theirs = policy.logprobs(model, tree), one_by_one(model, s)
    bound = 1e-5 if name == "Qwen3Moe" else 1e-6  # norms sum in float32
    assert relative(ours, theirs) < bound
    assert relative(gradient(model, ours), gradient(model, theirs)) < bound


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_prefix_that_all_branches_begin_with_changes_nothing(name, checkpointing):
    model = model_of(name)
    rng = np.random.default_rng(5)
    ids = [np.r_[np.arange(20) % 7, rng.integers(0, 61, length)] for length in (1, 2, 9, 14)]
    trainable = [np.arange(len(branch)) >= 19 - 2 * n for n, branch in enumerate(ids)]  # within the prefix too
    cu = np.r_[0, np.cumsum([len(branch) for branch in ids])]
    s = Sequences.from_arrays(np.concatenate(ids), cu, np.full(cu[-1], -1.0), np.concatenate(trainable))
    theirs = one_by_one(model, s)
    whole = gradient(model, theirs)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    ours = packed(model, s, budget=200)
    bound = 1e-6  # norms sum in float32, and a shared token's gradient is summed before them
    assert relative(ours, theirs) < bound
    assert relative(gradient(model, ours), whole) < bound


def test_an_empty_batch_reaches_every_parameter_with_a_gradient_of_zero():
    s = Sequences.from_arrays([1, 2, 3], [0, 3], [-1, -1, -1], [False, False, True])
    [step] = pack(s, [1.0], tokens_per_row=8, ranks=2, rank=1, pad_to_multiple_of=8)
    model = model_of("Llama")
    logp, entropy = policy.logprobs_and_entropy(model, step.batches[0])
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_entropy_is_that_of_the_sampling_distribution():
    model, s = model_of("Qwen3"), sequences(2, traces=3)
    [step] = pack(s, np.zeros(s.traces), tokens_per_row=1000)
    batch = step.batches[0].to("cpu")
    scores = model.lm_head(policy.hidden_states(model, batch, "mask")[batch.read]) * batch.inv_temperature[:, None]
    expected = torch.distributions.Categorical(logits=scores).entropy()
    assert torch.allclose(policy.logprobs_and_entropy(model, batch)[1], expected, atol=1e-12)


def test_logprobs_are_float32_for_a_bfloat16_model():
    model, s = model_of("Qwen3", torch.bfloat16), sequences(2, traces=3)
    [step] = pack(s, np.zeros(s.traces), tokens_per_row=1000)
    logp = policy.logprobs(model, step.batches[0])
    assert logp.dtype == torch.float32
    exact = one_by_one(model.double(), s)
    assert (logp - exact).abs().max() < 0.2


# --- what a model is made of ---


def test_a_head_that_is_not_known_is_refused():
    class Doubled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 2
            return out

    model = Doubled(transformers.LlamaConfig(**SMALL))
    with pytest.raises(ArgumentError, match=r"TG-MODEL-016.*Doubled"):
        policy.head_of(model)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ArgumentError, match=r"TG-MODEL-014.*Sequential"):
        policy.head_of(model)


def test_looking_at_a_head_leaves_the_model_in_its_mode():
    model = model_of("Llama").train()
    policy.head_of(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# --- masks ---


def masks(window):
    [step] = pack(sequences(4), np.zeros(11), tokens_per_row=1000)
    batch = step.batches[0].to("cpu")
    return batch, policy.dense_mask(batch, window=window), policy.block_mask(batch, window=window, block=16)


@pytest.mark.parametrize("window", [None, 7])
def test_the_block_mask_shows_what_the_dense_mask_shows(window):
    batch, dense, blocks = masks(window)
    total, side = len(batch.ids), 16
    assert total % side  # the last block is not full
    table = torch.zeros(1, 1, -(-total // side) * side, -(-total // side) * side, dtype=torch.bool)
    table[..., :total, :total] = dense
    per_block = table.view(len(table[0, 0]) // side, side, -1, side).sum((1, 3))
    full = [(q, k) for q in range(len(per_block)) for k in listed(blocks.full_kv_num_blocks, blocks.full_kv_indices, q)]
    part = [(q, k) for q in range(len(per_block)) for k in listed(blocks.kv_num_blocks, blocks.kv_indices, q)]
    rows = [min(side, total - side * n) for n in range(len(per_block))]
    assert not set(full) & set(part)
    assert all(per_block[q, k] == rows[q] * rows[k] for q, k in full)
    seen = {tuple(pair) for pair in per_block.nonzero().tolist()}
    assert seen <= {*full, *part}
    if window is None:
        assert seen == {*full, *part}
    index = torch.arange(total)
    assert torch.equal(blocks.mask_mod(0, 0, index[:, None], index[None, :]), dense[0, 0])


def causal():
    s = Sequences.from_arrays(np.zeros(160, int), [0, 160], -np.ones(160), np.arange(160) > 0)
    return s, pack(s, [0.0], tokens_per_row=160)


def side_by_side():
    s = sequences(4)
    return s, pack(s, np.zeros(11), tokens_per_row=1000, pad_to_multiple_of=16)


def tree():
    case = cases.forked(more=30, stem=40)
    return case.sequences, pack(
        case.sequences, case.advantages, tokens_per_row=1000, share_prefixes=True, pad_to_multiple_of=16
    )


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("layout", [causal, side_by_side, tree])
def test_the_block_mask_is_that_of_torch_which_looks_at_every_pair(layout, window):
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    s, [step] = layout()
    [batch] = (batch.to("cpu") for batch in step.batches)
    total = len(batch.ids)
    assert total % 16 == 0
    if layout is tree:
        assert total < s.tokens
    ours = policy.block_mask(batch, window=window, block=16)
    theirs = create_block_mask(ours.mask_mod, None, None, total, total, device="cpu", BLOCK_SIZE=16)
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE

    def listing(mask, side):
        names = [f"{kind}{side}_{what}" for kind in ("", "full_") for what in ("num_blocks", "indices")]
        counts, indices, whole_counts, whole_indices = (getattr(mask, name) for name in names)
        return [(listed(counts, indices, row), listed(whole_counts, whole_indices, row)) for row in range(total // 16)]

    by_torch = BlockMask.from_kv_blocks(
        ours.kv_num_blocks, ours.kv_indices, ours.full_kv_num_blocks, ours.full_kv_indices, BLOCK_SIZE=16
    )
    assert listing(ours, "q") == listing(by_torch, "q")
    if window is None:
        assert [listing(ours, side) for side in ("kv", "q")] == [listing(theirs, side) for side in ("kv", "q")]
    for (part, whole), (their_part, their_whole) in zip(listing(ours, "kv"), listing(theirs, "kv"), strict=True):
        assert set(whole) <= set(their_whole)
        assert {*part, *whole} >= {*their_part, *their_whole}


def test_the_block_mask_is_built_without_reading_anything_back():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # raises where a value, or a shape that depends on one, is asked for
        columns = [torch.zeros(1000, dtype=torch.long) for _ in range(7)]
        batch = Batch(*columns, term=np.zeros(0, np.int32))
        assert policy.block_mask(batch, window=300).kv_indices.shape == (1, 1, 8, 8)


def test_blocks_beyond_a_window_are_not_visited():
    s = Sequences.from_arrays(np.zeros(160, int), [0, 160], -np.ones(160), np.arange(160) == 159)
    [step] = pack(s, [0.0], tokens_per_row=160)
    blocks = policy.block_mask(step.batches[0].to("cpu"), window=20, block=16)
    # a query sees 19 keys before it: its own block, the one before and the last of the one before that
    assert (blocks.kv_num_blocks + blocks.full_kv_num_blocks)[0, 0].tolist() == [1, 2] + [3] * 8


def listed(counts, indices, row):
    return indices[0, 0, row, : counts[0, 0, row]].tolist()


def test_some_blocks_of_a_long_branch_are_seen_whole():
    s = Sequences.from_arrays(np.zeros(90, int), [0, 90], -np.ones(90), np.arange(90) == 89)
    [step] = pack(s, [0.0], tokens_per_row=100)
    blocks = policy.block_mask(step.batches[0].to("cpu"), block=16)
    assert blocks.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert blocks.kv_num_blocks[0, 0].tolist() == [1] * 6


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_under_the_block_mask_equals_sdpa_under_the_dense_mask():
    from torch.nn.attention.flex_attention import flex_attention

    batch, dense, _ = masks(7)
    blocks = policy.block_mask(batch, window=7)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, len(batch.ids), 16)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    assert torch.allclose(flex_attention(q, k, v, block_mask=blocks), theirs, atol=1e-5)


@pytest.mark.nightly  # half a minute of compiling
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", [None, 40])
def test_compiled_flex_attention_under_the_block_mask_equals_sdpa_under_the_dense_mask(window):
    s = sequences(4, traces=30)
    [step] = pack(s, np.zeros(s.traces), tokens_per_row=1000, pad_to_multiple_of=128)
    batch = step.batches[0].to("cpu")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, len(batch.ids), 16)
    dense = policy.dense_mask(batch, window=window)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    ours, _ = attention._attend(torch.nn.Module(), q, k, v, policy.block_mask(batch, window=window))
    assert torch.allclose(ours.transpose(1, 2), theirs, atol=1e-5)


@pytest.fixture
def attended(monkeypatch):
    """Masks and dtypes that our compiled flex_attention was called with; it is traced, and not compiled to kernels."""
    calls = []
    compiled = attention._compiled("aot_eager")

    def call(query, key, value, mask, *others):
        calls.append((mask, query.dtype, key.dtype, value.dtype))
        return compiled(query, key, value, mask, *others)

    monkeypatch.setattr(attention, "_compiled", lambda _backend: call)
    return calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Mistral"])
def test_a_model_with_flex_attention_is_given_the_block_mask(name, attended):
    from torch.nn.attention.flex_attention import BlockMask

    s = sequences()
    model = model_of(name, torch.float32)
    with torch.no_grad():
        expected = packed(model, s, budget=100)
        model.set_attn_implementation("flex_attention")
        [step, *_] = pack(s, np.zeros(s.traces), tokens_per_row=100, groups_per_step=2)
        assert policy.forward_plan(model, step.batches[0].to("cpu")) == "flex"
        ours = packed(model, s, budget=100)
    assert attended
    assert all(isinstance(mask, BlockMask) for mask, *_ in attended)
    assert relative(ours, expected) < 1e-5


def test_attention_by_blocks_is_chosen_where_the_architecture_has_it_and_takes_one_dtype(attended):
    s = sequences()
    model, eager = model_of("Qwen3", torch.float32), model_of("Qwen3", torch.float32)
    eager.set_attn_implementation("eager")
    enable_flex_attention(eager)
    assert eager.config._attn_implementation == "eager"
    with torch.no_grad():
        expected = packed(model, s, budget=100)
        enable_flex_attention(model)
        assert relative(packed(model, s, budget=100), expected) < 1e-5
        assert {tuple(dtypes) for _, *dtypes in attended} == {(torch.float32,) * 3}
        attended.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            packed(model, s, budget=100)
    assert {tuple(dtypes) for _, *dtypes in attended} == {(torch.bfloat16,) * 3}


# --- layers that pass a state along the row ---

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
STATEFUL = {
    "Qwen3Next": {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], **LINEAR, **EXPERTS},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Mamba": {"state_size": 4, "expand": 1, "time_step_rank": 4},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_recurrent_or_hybrid_model_is_packed_branch_by_branch(name):
    model, s = model_of(name, torch.float32, **STATEFUL[name]), sequences(traces=4)
    ours, theirs = packed(model, s), one_by_one(model, s)
    assert relative(ours, theirs) < 1e-5
    assert relative(gradient(model, ours), gradient(model, theirs)) < 1e-4  # their scans sum in float32


@pytest.mark.parametrize("name", STATEFUL)
def test_a_recurrent_or_hybrid_model_is_refused_a_shared_prefix_with_the_reason(name):
    model = model_of(name, torch.float32, **STATEFUL[name])
    with pytest.raises(ArgumentError, match=rf"TG-MODEL-005.*{name}"):
        policy.logprobs(model, forked())


def test_layers_that_no_mask_keeps_apart_are_refused_in_one_row():
    model = model_of("Lfm2", torch.float32, **STATEFUL["Lfm2"])
    [step, *_] = pack(sequences(), np.zeros(11), tokens_per_row=100)
    batch = step.batches[0].to("cpu")
    assert policy.forward_plan(model, batch) == "stack"
    with pytest.raises(ArgumentError, match=r"TG-MODEL-006.*Lfm2ForCausalLM.*LookupError.*keeps.*apart"):
        policy.hidden_states(model, batch, "mask")


@pytest.mark.parametrize("compute", [policy.forward_plan, policy.hidden_states])
def test_a_batch_that_is_not_on_a_device_is_refused_with_the_call_that_moves_it(compute):
    model = model_of("Qwen3")
    [step, *_] = pack(sequences(), np.zeros(11), tokens_per_row=100)
    with pytest.raises(ArgumentError, match=r"TG-MODEL-026.*numpy.*batch\.to\("):
        compute(model, step.batches[0])
    assert compute(model, step.batches[0].to("cpu")) is not None
