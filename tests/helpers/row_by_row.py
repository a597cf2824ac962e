"""Run branches one by one, and compare with relative error."""

import pytest

transformers = pytest.importorskip("transformers")


torch = pytest.importorskip("torch")


def one_by_one(model, s):
    """Logprobs [M] of every term from a forward of its branch alone, by the model's own logits."""
    found = []
    for start, end in zip(s.cu_seqlens, s.cu_seqlens[1:], strict=False):
        ids = torch.from_numpy(s.ids[start:end]).long()
        scores = model(input_ids=ids[None]).logits[0] * torch.from_numpy(s.inv_temperature[start:end]).roll(-1)[:, None]
        logp = scores.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        found.append(logp[torch.from_numpy(s.trainable[start + 1 : end])])
    return torch.cat(found)


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()
