"""The loss head written out in plain PyTorch, with logits: what the fused op is judged against."""

import torch
from hypothesis import strategies as st

DIFFERENTIABLE = ("logprob", "lse", "entropy", "sum_p2", "mean_logit")
OUTPUTS = ("logprob", "lse", "entropy", "argmax_hit", "sum_p2", "mean_logit", "max_logit")


def reference(
    hidden, weight, target, *, bias=None, temperature=None, row_mask=None, scale=1.0, softcap=0.0
):
    """All seven outputs as a dict of ``[N]`` tensors, by autograd-visible textbook formulas."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature is not None:
        logits = logits / (temperature if temperature.dim() == 0 else temperature[:, None])
    probs = torch.softmax(logits, -1)
    safe = target if row_mask is None else torch.where(row_mask, target, 0)
    values = {
        "logprob": torch.log_softmax(logits, -1).gather(1, safe[:, None])[:, 0],
        "lse": torch.logsumexp(logits, -1),
        "entropy": -torch.special.xlogy(probs, probs).sum(-1),
        "argmax_hit": logits.argmax(-1) == safe,
        "sum_p2": (probs**2).sum(-1),
        "mean_logit": logits.mean(-1),
        "max_logit": logits.detach().amax(-1),
    }
    if row_mask is None:
        return values
    return {name: torch.where(row_mask, v, torch.zeros_like(v)) for name, v in values.items()}


def random_head(num_rows, vocab, width, *, dtype=torch.float64, seed=0, device="cpu"):
    """``hidden [N, H]``, ``weight [V, H]``, ``target [N]`` with logits of order one."""
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, width, generator=gen, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=gen, dtype=torch.float64)
    target = torch.randint(0, vocab, (num_rows,), generator=gen)
    return hidden.to(device, dtype), weight.to(device, dtype), target.to(device)


def drawn_head(draw, *, most_entries):
    """A float64 head and options of the op, by a hypothesis ``draw``, and a generator for more."""
    num_rows, vocab = draw(st.integers(0, 9)), draw(st.integers(1, most_entries))
    seed = draw(st.integers(0, 2**16))
    made = random_head(num_rows, vocab, draw(st.integers(1, 5)), seed=seed)
    gen = torch.Generator().manual_seed(seed + 1)
    options = {
        "scale": draw(st.sampled_from([1.0, 0.25, -1.5])),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
    }
    if draw(st.booleans()):
        options["bias"] = torch.randn(vocab, generator=gen, dtype=torch.float64)
    if (shape := draw(st.sampled_from([None, (), (1,), (num_rows,)]))) is not None:
        options["temperature"] = 0.5 + torch.rand(shape, generator=gen, dtype=torch.float64)
    return made, options, gen
