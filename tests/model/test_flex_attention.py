"""Our compiled flex_attention on a CPU: how often torch compiles it, what stops it, and that its numbers are right.

Dynamo and AOTAutograd run as on CUDA; the backend counts graphs and makes no kernels.
"""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "gpu"))

import forked as cases
from rehearsal import flex_attention_on_the_cpu, fused_attention_alone
from tracegrad import model as policy
from tracegrad.config import load
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.model import attention, forward
from tracegrad.model.attention import enable_flex_attention
from tracegrad.objective import presets
from tracegrad.packing import pack
from tracegrad.trainer import setup, verify_attention
from tracegrad.trainer.distributed import wrap
from tracegrad.trainer.memory import compile_layers
from tracegrad.trainer.step import compute_logprobs, optimizer_step
from tracegrad.trainer.verify_attention import describe_attention, verify_rows
from waits import Waits

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE = {
    "vocab_size": cases.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
FAMILIES = {
    "Qwen3": {"tie_word_embeddings": True, "num_hidden_layers": 1},
    "Gemma3": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma2": {"num_hidden_layers": 1, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    "GptOss": {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


def model_of(name: str = "Qwen3", **changes):
    """Random weights, float32, and sinks that are not all zero."""
    torch.manual_seed(3)
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(name, name) + "Config")
    model = getattr(transformers, name + "ForCausalLM")(config(**{**SHAPE, **FAMILIES[name], **changes})).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def graphs():
    """The graphs that torch makes of attention while a test runs: what each has as inputs."""
    from torch._dynamo.backends.debugging import aot_eager

    found: list[list[object]] = []

    def counting(module, inputs):
        found.append(list(inputs))
        return aot_eager(module, inputs)

    torch.compiler.reset()
    with flex_attention_on_the_cpu(counting):
        yield found
    torch.compiler.reset()


@pytest.fixture(scope="module")
def case():
    """Forked traces of about 300 tokens."""
    return cases.forked(more=24, stem=24)


def step_of(case, budget=1024, share=False):
    """Rows of two blocks of 128 or more: one block alone is another graph."""
    options = {"share_prefixes": share, "requirements": presets.DAPO.requirements, "pad_to_multiple_of": 256}
    [step] = pack(case.sequences, case.advantages, tokens_per_row=budget, **options)
    return case.ready(step)


def logprobs_and_gradient(model, case, share=True):
    """[M] of a shared row and the gradient of a weighted sum of them."""
    [batch] = step_of(case, share=share).batches
    model.zero_grad()
    found = policy.logprobs(model, batch)
    (found * torch.linspace(-1, 2, len(found))).sum().backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_near(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


@pytest.mark.nightly
def test_gemma3_is_checked_and_takes_its_first_steps_with_eight_graphs(graphs, case):
    """Two windows, with and without a gradient, float32 for the checks: more than torch's limit with one more length.

    Rows of other lengths and shared prefixes need none. No number but a length is an input: the kernels take a scale or
    a window as a constant only.
    """
    model = model_of("Gemma3")
    enable_flex_attention(model)
    target = wrap(model, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert verify_rows(target, 100, share_prefixes=True) is None
    first = step_of(case, 256)
    compute_logprobs(target, first.batches, torch.bfloat16)
    optimizer_step(target, first, presets.DAPO, optimizer, grad_clip=1.0, precision=torch.bfloat16)
    assert 0 < len(graphs) <= 8, len(graphs)
    before = len(graphs)
    for budget, share in ((1024, False), (512, True)):
        step = step_of(case, budget, share)
        compute_logprobs(target, step.batches, torch.bfloat16)
        optimizer_step(target, step, presets.DAPO, optimizer, grad_clip=1.0, precision=torch.bfloat16)
    assert len(graphs) == before
    tensors = [each for inputs in graphs for each in inputs if isinstance(each, torch.Tensor)]
    assert all(each.ndim for each in tensors)  # torch passes a scale that is an input as a tensor of no dimension
    lengths = {batch.ids.shape[0] for batch in first.batches}
    numbers = [int(each) for inputs in graphs for each in inputs if isinstance(each, (int, torch.SymInt))]
    assert 9 not in numbers  # the window
    assert lengths & set(numbers)


@pytest.mark.parametrize("window", [None, 9])
def test_each_table_of_a_block_mask_has_memory_of_its_own(case, window):
    """Inductor copies a table that does not begin at a multiple of 16 bytes, at each call."""
    mask = policy.block_mask(step_of(case).batches[0].to("cpu"), window=window)
    names = [f"{whole}{side}" for whole in ("", "full_") for side in ("q", "kv")]
    tables = [getattr(mask, f"{name}_{what}") for name in names for what in ("num_blocks", "indices")]
    assert len({table.untyped_storage().data_ptr() for table in tables}) == 8
    assert not any(table.data_ptr() % 16 for table in tables)
    assert all(table.is_contiguous() for table in tables)


def test_torchs_own_limit_of_graphs_does_not_make_attention_unfused(graphs, case):
    """Each head size is a graph. torch's limit is 8 for all models of a process; 2 here, as that is quicker."""
    mask = policy.block_mask(step_of(case).batches[0].to("cpu"))
    tokens = mask.shape[-1]
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (8, 16, 24):
            query = torch.ones(1, 2, tokens, size)
            out, _ = attention._attend(torch.nn.Module(), query, query, query, mask)
            assert out.shape == (1, tokens, 2, size)
    assert len(graphs) == 3


def test_another_graph_than_the_limit_allows_is_an_error(graphs, monkeypatch):
    monkeypatch.setattr(attention, "MAX_COMPILED_GRAPHS", 1)
    config = torch._dynamo.config
    query = torch.ones(1, 2, 16, 8)
    with config.patch(recompile_limit=1):
        attention._attend(torch.nn.Module(), query, query, query, None)
        with pytest.raises(TracegradError, match=r"TG-MODEL-001.*_flex.*1"):
            attention._attend(torch.nn.Module(), *[query.double()] * 3, None)
        assert config.recompile_limit == 1
    assert len(graphs) == 1
    assert not config.fail_on_recompile_limit_hit
    assert not config.specialize_float


def test_a_compiled_layer_past_the_limit_is_an_error(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(attention, "MAX_COMPILED_GRAPHS", 1)
    compile_by = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_by(function, backend="eager", **how))
    model = model_of()
    compile_layers(model)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        model(torch.arange(4)[None])
        with pytest.raises(TracegradError, match=r"TG-MODEL-001.*Qwen3DecoderLayer\.forward.*1"):
            model(torch.arange(9)[None])
    torch.compiler.reset()


def test_attention_that_torch_does_not_compile_is_an_error(graphs):
    from torch.utils._python_dispatch import TorchDispatchMode

    query = torch.ones(1, 2, 16, 8)
    with TorchDispatchMode(), pytest.raises(TracegradError, match="TG-MODEL-003"):
        attention._attend(torch.nn.Module(), query, query, query, None)
    with torch.compiler.set_stance("force_eager"), pytest.raises(TracegradError, match="TG-MODEL-003"):
        attention._attend(torch.nn.Module(), query, query, query, None)
    assert not graphs


def test_what_counts_waits_leaves_compilation_on(graphs, case):
    """A row is compiled while it is counted: the error above does not come."""
    batch = step_of(case).batches[0].to("cpu")
    with Waits() as waits:
        query = torch.ones(1, 2, len(batch.ids), 8)
        attention._attend(torch.nn.Module(), query, query, query, policy.block_mask(batch))
        batch.ids.sum().item()
    assert len(graphs) == 1
    assert waits.seen == {"_local_scalar_dense": 1}


def test_attention_in_its_unfused_form_is_found():
    """What tests/gpu run under on a device."""
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.ones(1, 2, 16, 8)
    with fused_attention_alone(), pytest.raises(AssertionError, match="ran unfused"):
        flex_attention(query, query, query)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
@pytest.mark.first_cases(1)
def test_caps_and_sinks_are_those_of_eager_attention(graphs, case, name):
    expected = logprobs_and_gradient(model_of(name, attn_implementation="eager"), case)
    model = model_of(name, attn_implementation="flex_attention")
    assert_near(logprobs_and_gradient(model, case), expected)
    assert graphs
    assert model.config._attn_implementation == "tracegrad_flex"


def test_three_queries_share_a_key(graphs, case):
    """flex_attention's kernels take powers of two; GptOss and Qwen3 above have two."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    expected = logprobs_and_gradient(model_of(**heads), case)
    model = model_of(**heads)
    enable_flex_attention(model)
    assert_near(logprobs_and_gradient(model, case), expected)
    assert graphs


def test_a_table_is_added_to_the_scores(graphs):
    """As rows with pictures have it."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 16, 8)
    table = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).triu(1).bool(), -1e30)[None, None]
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=table)
    ours, _ = attention._attend(torch.nn.Module(), query, key, value, table)
    torch.testing.assert_close(ours.transpose(1, 2), theirs)
    assert len(graphs) == 1


def test_dropout_is_refused():
    query = torch.ones(1, 2, 16, 8)
    with pytest.raises(ArgumentError, match="TG-MODEL-002"):
        attention._attend(torch.nn.Module(), query, query, query, None, dropout=0.1)


# --- a kernel that cannot run ---


@pytest.fixture
def too_large(monkeypatch):
    """flex_attention's kernel takes more shared memory than there is, as Triton says it."""
    errors = pytest.importorskip("triton.runtime.errors")

    def backend(module, inputs):
        raise errors.OutOfResources(294912, 232448, "shared memory")

    torch.compiler.reset()
    with flex_attention_on_the_cpu(backend):
        yield
    torch.compiler.reset()


def as_cuda(monkeypatch):
    for module in (verify_attention, forward):
        monkeypatch.setattr(module, "must_be_fused", lambda device: True)


def test_a_kernel_that_does_not_fit_stops_a_run_on_cuda(too_large, monkeypatch):
    model = model_of()
    enable_flex_attention(model)
    as_cuda(monkeypatch)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-093.*memory.*Required.*294912.*Hardware"):
        verify_rows(wrap(model, "none"), 64, share_prefixes=True)


def test_a_kernel_that_does_not_fit_stops_a_row_on_cuda(too_large, case, monkeypatch):
    model = model_of()
    enable_flex_attention(model)
    as_cuda(monkeypatch)
    with pytest.raises(ArgumentError, match=r"TG-MODEL-004.*memory.*Required.*294912.*Hardware"):
        policy.logprobs(model, step_of(case).batches[0])


def test_a_kernel_that_does_not_fit_leads_elsewhere_to_the_attention_without_blocks(too_large):
    model = model_of()
    enable_flex_attention(model)
    target = wrap(model, "none")
    assert verify_rows(target, 64, share_prefixes=True) is None
    assert describe_attention(target, share_prefixes=True) == (
        "attention is sdpa: branches in padded batches, rows that share prefixes under a dense [T, T] mask."
    )


def test_the_check_for_cuda_looks_at_the_device():
    assert attention.must_be_fused(torch.device("cuda", 1))
    assert not attention.must_be_fused(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "loaded", "asked", "expected"),
    [
        ("Qwen3", "sdpa", "auto", "tracegrad_flex"),
        ("Qwen3", "flex_attention", "auto", "tracegrad_flex"),
        ("Qwen3", "eager", "auto", "eager"),
        ("GptOss", "eager", "auto", "tracegrad_flex"),
        ("Qwen3", "sdpa", "sdpa", "sdpa"),
        ("Qwen3", "flex_attention", "sdpa", "sdpa"),
        ("GptOss", "flex_attention", "sdpa", "eager"),
    ],
)
def test_the_attention_on_cuda_is_what_the_option_asks_for(name, loaded, asked, expected):
    model = model_of(name, attn_implementation=loaded)
    setup.choose_attention(model, load(overrides=[("attention.implementation", asked)]))
    assert model.config._attn_implementation == expected


def test_the_attention_that_was_chosen_is_described(graphs):
    model = model_of()
    enable_flex_attention(model)
    target = wrap(model, "none")
    verify_rows(target, 64, share_prefixes=True)
    assert (
        describe_attention(target, share_prefixes=True) == "attention is flex_attention, compiled, under block masks."
    )
    plain = wrap(model_of(), "none")
    verify_rows(plain, 64, share_prefixes=False)
    assert describe_attention(plain, share_prefixes=False) == "attention is sdpa: branches in padded batches."


def test_layers_are_not_compiled_for_the_attention_that_they_are_compared_with(monkeypatch, case):
    """The head's check and the branches alone run as they are: only rows under block masks become graphs."""
    seen = []
    compile_by = torch.compile

    def counting(module, _inputs):
        seen.append([str(node.target) for node in module.graph.nodes])
        return module

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_by(function, **{"backend": counting, **how}))
    model = model_of()
    enable_flex_attention(model)
    compile_layers(model)
    with torch.no_grad(), flex_attention_on_the_cpu(counting):
        policy.logprobs(model, step_of(case).batches[0])
    assert seen
    assert all(any("flex_attention" in target for target in graph) for graph in seen)
    torch.compiler.reset()
