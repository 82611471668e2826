"""Log-prob, entropy and loss shapes found in the wild, re-expressed minimally.

Every case is   fn(hidden, weight, bias, ids, mask, **kw) -> scalar loss   (plain PyTorch, CPU, tiny shapes)
and carries the verdict a graph rewriter should give it:

  FUSABLE   'fusable'
            selected log-prob / lse / entropy reachable with one online-softmax pass over vocab tiles;
            pointwise transforms of the logits and row bookkeeping (slice/shift/mask/compact) allowed.
  GENERAL   'fusable-general (vocab-reduced region)'
            row-local, ends without a vocab axis, but needs other statistics than (target logit, lse, entropy).
            `stream` says how it may be tiled: 'vocab' (online / multi-pass over vocab tiles) or
            'token' (needs a whole row: topk/sort/cumsum/standardise -> chunk over tokens only).
  not_fusable(reason)  'not fusable: ...'   must be left alone AND reported.

`source` only names where the op structure was seen; no code here is copied from any project.

  make_inputs(seed=0, dtype=torch.float64)  -> dict of deterministic inputs (see docstring)
  CASES[name]                               -> Case(fn, expected, stream, group, ...)

Conventions: logits[:, t] scores ids[:, t+1]; mask is 1 on completion tokens; `m = mask[:, 1:]`.
Cases sharing a `group` must agree in loss and in d(hidden), d(weight).
`fd=False`: value and gradient deliberately disagree (detach / straight-through / argmax-like masks).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

FUSABLE = "fusable"
GENERAL = "fusable-general (vocab-reduced region)"


def not_fusable(reason: str) -> str:
    return f"not fusable: {reason}"


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable
    expected: str
    stream: str  # 'vocab' | 'token' | '' (not fusable)
    source: str
    note: str = ""
    group: str = ""
    fd: bool = True
    grads: tuple = ("hidden", "weight")  # leaves that must receive a non-zero gradient
    min_dtype: str = "float32"
    tags: tuple = field(default_factory=tuple)


CASES: "OrderedDict[str, Case]" = OrderedDict()


def case(
    expected,
    source,
    *,
    stream=None,
    note="",
    group="",
    fd=True,
    grads=("hidden", "weight"),
    tags=(),
):
    def deco(fn):
        name = fn.__name__
        assert name.startswith("case_") and name not in CASES
        st = stream if stream is not None else ("" if expected.startswith("not") else "vocab")
        CASES[name] = Case(
            name, fn, expected, st, source, note, group, fd, tuple(grads), tags=tuple(tags)
        )
        return fn

    return deco


# --------------------------------------------------------------------------------------------- inputs
LEAVES = ("hidden", "weight", "bias", "value_w", "lora_a", "lora_b", "weight2", "weight_cb")


def make_inputs(
    seed=0,
    dtype=torch.float64,
    device="cpu",
    B=4,
    T=11,
    H=8,
    V=97,
    v_real=89,
    P=4,
    requires_grad=True,
):
    """Deterministic inputs. V=97 and v_real=89 are primes unused by any other dim, so any tensor dim of size
    97/89 is a vocab axis (used by --inventory). Values are drawn in fp64 then cast, so fp32/fp64 runs agree.

    hidden[B,T,H] weight[V,H] bias[V] ids[B,T] mask[B,T]
    kw: adv[B] old_logp/ref_logp/rollout_logp[B,T-1] ref_hidden/ref_weight teacher_hidden/teacher_weight (H2!=H)
        teacher_topk_ids/_logp[B,T-1,5] soft_targets[B,T-1,V] allowed[B,T,V] banned[V] class_w[V] value_w[H]
        returns[B,T-1] temp_vec[B] lora_a[2,H] lora_b[V,2] weight2[V,H] weight_q/weight_scale weight_cb[2,V,H]
        ids_cb[B,T,2] prompt_len temperature v_real
    """
    g = torch.Generator(device="cpu").manual_seed(seed)

    def rnd(*s, scale=1.0):
        return (torch.randn(*s, generator=g, dtype=torch.float64) * scale).to(dtype).to(device)

    H2, r, C = 6, 2, 2
    hidden, weight, bias = rnd(B, T, H), rnd(V, H, scale=1.2 / math.sqrt(H)), rnd(V, scale=0.1)
    ids = torch.randint(0, v_real, (B, T), generator=g).to(device)
    lens = [T, T - 3, T - 1, T - 4, T - 2, T - 3, T, T - 1][:B]
    mask = torch.zeros(B, T, dtype=dtype, device=device)
    for i, n in enumerate(lens):
        mask[i, P:n] = 1
    seen = set(ids.flatten().tolist())
    banned = torch.zeros(V, dtype=torch.bool, device=device)
    banned[[v for v in range(v_real) if v not in seen][:5]] = True
    nxt = ids[:, 1:]

    def logp_of(w):
        z = F.linear(hidden[:, :-1], w)
        return z.log_softmax(-1).gather(-1, nxt[..., None])[..., 0].detach()

    old_logp, ref_logp = (
        logp_of(weight + rnd(V, H, scale=0.05)),
        logp_of(weight + rnd(V, H, scale=0.15)),
    )
    rollout_logp = old_logp + rnd(B, T - 1, scale=0.02)
    teacher_hidden, teacher_weight = rnd(B, T, H2), rnd(V, H2, scale=1.2 / math.sqrt(H2))
    t_logp = F.linear(teacher_hidden[:, :-1], teacher_weight).log_softmax(-1)
    tk = t_logp.topk(5, -1)
    allowed = torch.rand(B, T, V, generator=g) > 0.2
    allowed[:, :-1].scatter_(-1, nxt.cpu()[..., None], True)
    wf = weight.detach()
    scale = wf.abs().amax(-1, keepdim=True) / 127
    out = dict(
        hidden=hidden,
        weight=weight,
        bias=bias,
        ids=ids,
        mask=mask,
        adv=rnd(B),
        old_logp=old_logp,
        ref_logp=ref_logp,
        rollout_logp=rollout_logp,
        ref_hidden=hidden.detach() + rnd(B, T, H, scale=0.1),
        ref_weight=wf + rnd(V, H, scale=0.1),
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        teacher_topk_ids=tk.indices,
        teacher_topk_logp=tk.values,
        soft_targets=rnd(B, T - 1, V).softmax(-1),
        allowed=allowed.to(device),
        banned=banned,
        class_w=rnd(V).abs() + 0.5,
        value_w=rnd(H),
        returns=rnd(B, T - 1),
        temp_vec=rnd(B).abs() * 0.3 + 0.7,
        lora_a=rnd(r, H),
        lora_b=rnd(V, r, scale=0.1),
        weight2=rnd(V, H, scale=1.2 / math.sqrt(H)),
        weight_q=(wf / scale).round().to(torch.int8),
        weight_scale=scale,
        weight_cb=rnd(C, V, H, scale=1.2 / math.sqrt(H)),
        ids_cb=torch.randint(0, v_real, (B, T, C), generator=g).to(device),
        prompt_len=P,
        temperature=0.7,
        v_real=v_real,
    )
    if requires_grad:
        for k in LEAVES:
            out[k].requires_grad_(True)
    return out


# ------------------------------------------------------------------------------- shared (vocab-free) tails
def _mean(x, m):
    return (x * m).sum() / m.sum().clamp(min=1)


def _pg(logp, mask, adv):  # plain policy gradient over shifted log-probs [B, T-1]
    return -_mean(adv[:, None] * logp, mask[:, 1:])


def _clip_pg(logp, old, adv, m, lo=0.2, hi=0.28):
    ratio = (logp - old).exp()
    a = adv[:, None]
    return _mean(-torch.min(ratio * a, ratio.clamp(1 - lo, 1 + hi) * a), m)


def _logp(logits, tgt):
    return logits.log_softmax(-1).gather(-1, tgt[..., None])[..., 0]


# =============================================================================== A. selected log-prob idioms
@case(FUSABLE, "textbook; verl naive; torchtune logits_to_logprobs", group="pg")
def case_logsoftmax_gather(hidden, weight, bias, ids, mask, *, adv, **kw):
    logits = F.linear(hidden, weight)[:, :-1]
    lp = F.log_softmax(logits, dim=-1)
    return _pg(torch.gather(lp, 2, ids[:, 1:].unsqueeze(-1)).squeeze(-1), mask, adv)


@case(
    FUSABLE,
    "trl selective_log_softmax, fp32/fp64 branch (gather first, per-row logsumexp, stack)",
    group="pg",
)
def case_trl_selective_fp32_rowloop(hidden, weight, bias, ids, mask, *, adv, **kw):
    logits = F.linear(hidden, weight)[:, :-1]
    picked = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
    norm = torch.stack([row.logsumexp(-1) for row in logits])
    return _pg(picked - norm, mask, adv)


@case(
    FUSABLE,
    "verl v2 on remove-padding logits: `for z in logits` walks single tokens of a 2-D [N,V] tensor",
    group="pg",
    note="unrolls one logsumexp per token when traced; canonicalise unbind+stack or it is 1000s of nodes",
)
def case_verl_v2_packed_tokenloop(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden[:, :-1].flatten(0, 1), weight)
    t = ids[:, 1:].flatten()
    lse = torch.stack([row.logsumexp(-1) for row in z])
    lp = z.gather(-1, t[:, None])[:, 0] - lse
    return _pg(lp.view(ids.size(0), -1), mask, adv)


@case(
    FUSABLE, "verl/xtuner/RLinf: -F.cross_entropy(reduction='none') on flattened logits", group="pg"
)
def case_ce_none_flat(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1].contiguous()
    t = ids[:, 1:].contiguous()
    lp = -F.cross_entropy(z.view(-1, z.size(-1)), t.view(-1), reduction="none").view_as(t)
    return _pg(lp, mask, adv)


@case(
    FUSABLE, "class axis moved to dim 1: F.cross_entropy(logits.transpose(1, 2), ids)", group="pg"
)
def case_ce_none_class_dim1(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    return _pg(-F.cross_entropy(z.transpose(1, 2), ids[:, 1:], reduction="none"), mask, adv)


@case(FUSABLE, "gather the probability, then log it", group="pg")
def case_softmax_gather_log(hidden, weight, bias, ids, mask, *, adv, **kw):
    p = torch.softmax(F.linear(hidden, weight)[:, :-1], -1)
    return _pg(p.gather(-1, ids[:, 1:, None])[..., 0].log(), mask, adv)


@case(FUSABLE, "gather minus logsumexp, no loop", group="pg")
def case_gather_minus_logsumexp(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    return _pg(z.gather(-1, ids[:, 1:, None])[..., 0] - z.logsumexp(-1), mask, adv)


@case(FUSABLE, "hand-written stable lse: detach max, exp, sum, log", group="pg")
def case_manual_max_exp_sum_log(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    top = z.detach().amax(-1, keepdim=True)
    lse = (z - top).exp().sum(-1).log() + top.squeeze(-1)
    return _pg(z.gather(-1, ids[:, 1:, None])[..., 0] - lse, mask, adv)


@case(
    FUSABLE,
    "one-hot inner product instead of gather",
    group="pg",
    note="one_hot is itself [N,V]; recognise as gather or build the tile-local one-hot per chunk",
)
def case_one_hot_sum(hidden, weight, bias, ids, mask, *, adv, **kw):
    lp = F.linear(hidden, weight)[:, :-1].log_softmax(-1)
    oh = F.one_hot(ids[:, 1:], lp.size(-1)).to(lp.dtype)
    return _pg((lp * oh).sum(-1), mask, adv)


@case(FUSABLE, "head as einsum instead of F.linear", group="pg")
def case_einsum_head(hidden, weight, bias, ids, mask, *, adv, **kw):
    return _pg(_logp(torch.einsum("bth,vh->btv", hidden, weight)[:, :-1], ids[:, 1:]), mask, adv)


class _OpaqueCE(torch.autograd.Function):  # flash_attn's cross entropy (in-place backward)
    @staticmethod
    def forward(ctx, z, t):
        lp = torch.log_softmax(z, -1)
        ctx.save_for_backward(lp, t)
        return -lp.gather(-1, t[:, None])[:, 0]

    @staticmethod
    def backward(ctx, g):
        lp, t = ctx.saved_tensors
        d = lp.exp()
        d.scatter_add_(-1, t[:, None], -torch.ones_like(t[:, None], dtype=d.dtype))
        return d.mul_(g[:, None]), None


@case(
    FUSABLE,
    "an autograd.Function: what verl, skyrl and openrlhf call of flash-attn, in PyTorch ops",
    group="pg",
)
def case_opaque_autograd_function_ce(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden[:, :-1].flatten(0, 1), weight)
    return _pg(-_OpaqueCE.apply(z, ids[:, 1:].flatten()).view(ids.size(0), -1), mask, adv)


# =============================================================================== B. supervised cross-entropy shapes
def _labels(ids, mask):
    return ids.masked_fill(mask == 0, -100)


@case(
    FUSABLE, "classic HF: shift logits & labels, contiguous, CE mean with ignore_index", group="sft"
)
def case_hf_shift_ce_mean(hidden, weight, bias, ids, mask, **kw):
    z = F.linear(hidden, weight)[..., :-1, :].contiguous()
    t = _labels(ids, mask)[..., 1:].contiguous()
    return F.cross_entropy(z.view(-1, z.size(-1)), t.view(-1), ignore_index=-100)


@case(GENERAL, "F.cross_entropy(label_smoothing=): needs mean_v log p_v besides the target")
def case_ce_label_smoothing(hidden, weight, bias, ids, mask, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    return F.cross_entropy(
        z.flatten(0, 1), _labels(ids, mask)[:, 1:].flatten(), ignore_index=-100, label_smoothing=0.1
    )


@case(
    FUSABLE,
    "F.cross_entropy(weight=[V]): weight of the target only, normalised by sum of picked weights",
    note="class_w[target] is a row scalar; no extra vocab statistic",
)
def case_ce_class_weight(hidden, weight, bias, ids, mask, *, class_w, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    return F.cross_entropy(
        z.flatten(0, 1), _labels(ids, mask)[:, 1:].flatten(), weight=class_w, ignore_index=-100
    )


@case(FUSABLE, "unlikelihood: log(1 - p(target))")
def case_unlikelihood(hidden, weight, bias, ids, mask, **kw):
    lp = _logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:])
    return _mean(-torch.log1p(-lp.exp().clamp(max=1 - 1e-6)), mask[:, 1:])


# =============================================================================== C. transforms on the logits
@case(FUSABLE, "temperature: logits / float", group="pg_temp")
def case_temperature_float(hidden, weight, bias, ids, mask, *, adv, temperature, **kw):
    return _pg(_logp(F.linear(hidden, weight)[:, :-1] / temperature, ids[:, 1:]), mask, adv)


@case(FUSABLE, "temperature as reciprocal multiply", group="pg_temp")
def case_temperature_reciprocal_mul(hidden, weight, bias, ids, mask, *, adv, temperature, **kw):
    return _pg(_logp(F.linear(hidden, weight)[:, :-1] * (1.0 / temperature), ids[:, 1:]), mask, adv)


@case(FUSABLE, "temperature as a 0-d tensor", group="pg_temp")
def case_temperature_0d_tensor(hidden, weight, bias, ids, mask, *, adv, temperature, **kw):
    t = torch.tensor(temperature, dtype=hidden.dtype, device=hidden.device)
    return _pg(_logp(F.linear(hidden, weight)[:, :-1] / t, ids[:, 1:]), mask, adv)


@case(
    GENERAL,
    "two temperatures on the same logits: sampling-T log-prob for the ratio, T=1 entropy for the bonus",
    note="two softmax states per row from one tile; still a single pass",
)
def case_two_temperatures(hidden, weight, bias, ids, mask, *, adv, temperature, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    lp = _logp(z / temperature, ids[:, 1:])
    ent = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    return _pg(lp, mask, adv) - 0.01 * _mean(ent, mask[:, 1:])


@case(FUSABLE, "gemma2/3/4 final_logit_softcapping: cap*tanh(z/cap)")
def case_softcap_tanh(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = torch.tanh(F.linear(hidden, weight)[:, :-1] / 3.0) * 3.0
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@case(FUSABLE, "granite logits_scaling: divide")
def case_logits_scaling_div(hidden, weight, bias, ids, mask, *, adv, **kw):
    return _pg(_logp(F.linear(hidden, weight)[:, :-1] / 8.0, ids[:, 1:]), mask, adv)


@case(FUSABLE, "logit bias vector added after the head", grads=("hidden", "weight", "bias"))
def case_logit_bias_add(hidden, weight, bias, ids, mask, *, adv, **kw):
    return _pg(_logp((F.linear(hidden, weight) + bias)[:, :-1], ids[:, 1:]), mask, adv)


@case(FUSABLE, "slice, then float()", group="pg")
def case_upcast_after_slice(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1].to(torch.promote_types(hidden.dtype, torch.float32))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@case(
    FUSABLE,
    "everything in bf16: log_softmax of bf16 logits, upcast only the picked value",
    fd=False,
    note="rewriter may compute in fp32 (better) but must document the dtype change of the result",
)
def case_bf16_logsoftmax(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden.bfloat16(), weight.bfloat16())[:, :-1]
    return _pg(_logp(z, ids[:, 1:]).to(hidden.dtype), mask, adv)


@case(FUSABLE, "padded vocab: additive [V] mask", group="pg_padvocab")
def case_padded_vocab_additive(hidden, weight, bias, ids, mask, *, adv, v_real, **kw):
    z = F.linear(hidden, weight)
    pad = torch.zeros(z.size(-1), dtype=z.dtype, device=z.device)
    pad[v_real:] = torch.finfo(z.dtype).min
    return _pg(_logp((z + pad)[:, :-1], ids[:, 1:]), mask, adv)


@case(FUSABLE, "banned tokens: torch.where against a broadcast vector", group="pg_banned")
def case_banned_where(hidden, weight, bias, ids, mask, *, adv, banned, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    return _pg(_logp(torch.where(banned, torch.full_like(z, -1e9), z), ids[:, 1:]), mask, adv)


@case(
    GENERAL,
    "top-p (nucleus) filtered log-probs: sort + cumsum over vocab",
    stream="token",
    fd=False,
)
def case_topp_filtered_logprob(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    with torch.no_grad():
        p, order = z.softmax(-1).sort(-1, descending=True)
        drop = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, (p.cumsum(-1) - p) > 0.9)
        drop = drop.scatter(-1, ids[:, 1:, None], False)
    return _pg(_logp(z.masked_fill(drop, float("-inf")), ids[:, 1:]), mask, adv)


# =============================================================================== D. row selection / layout
@case(FUSABLE, "completion slice logits[:, -K-1:-1]", group="pg_tail")
def case_logits_tail_slice(hidden, weight, bias, ids, mask, *, adv, prompt_len, **kw):
    k = ids.size(1) - prompt_len
    z = F.linear(hidden, weight)[:, -k - 1 : -1]
    return -_mean(adv[:, None] * _logp(z, ids[:, -k:]), mask[:, -k:])


@case(
    FUSABLE,
    "trl 1.16 fused head: hidden[bool mask] before the head, masked_scatter back",
    group="pg",
    note="data-dependent row count (nonzero): unbacked symint; or keep all rows and zero the weights",
)
def case_compact_hidden_then_scatter(hidden, weight, bias, ids, mask, *, adv, **kw):
    sel = mask[:, 1:].bool()
    z = F.linear(hidden[:, :-1][sel], weight)
    lp = _logp(z, ids[:, 1:][sel])
    full = torch.zeros_like(mask[:, 1:]).masked_scatter(sel, lp)
    return _pg(full, mask, adv)


@case(FUSABLE, "nonzero + index_select of rows on flattened logits", group="pg")
def case_index_select_rows(hidden, weight, bias, ids, mask, *, adv, **kw):
    rows = mask[:, 1:].reshape(-1).nonzero().squeeze(-1)
    z = F.linear(hidden[:, :-1].flatten(0, 1), weight).index_select(0, rows)
    lp = _logp(z, ids[:, 1:].flatten()[rows])
    a = adv.repeat_interleave(ids.size(1) - 1)[rows]
    return -(a * lp).mean()


@case(FUSABLE, "packed rows, per-sequence token means via index_add (seq-mean-token-mean)")
def case_packed_segment_mean(hidden, weight, bias, ids, mask, *, adv, **kw):
    B, n = ids.size(0), ids.size(1) - 1
    lp = _logp(F.linear(hidden[:, :-1].reshape(B * n, -1), weight), ids[:, 1:].reshape(-1))
    seg = torch.arange(B, device=ids.device).repeat_interleave(n)
    m = mask[:, 1:].reshape(-1)
    num = torch.zeros(B, dtype=lp.dtype, device=lp.device).index_add(0, seg, lp * m)
    den = torch.zeros(B, dtype=lp.dtype, device=lp.device).index_add(0, seg, m)
    return -(adv * num / den.clamp(min=1)).mean()


@case(
    FUSABLE,
    "user already chunks tokens through checkpoint(head+logp) (trl chunked_nll, prime-rl, titan ChunkedLoss)",
    group="pg",
    note="leaving it alone is acceptable; must not get worse (torchtitan#3646: Inductor re-batches the chunks)",
)
def case_user_checkpointed_chunks(hidden, weight, bias, ids, mask, *, adv, **kw):
    def f(h, t):
        return _logp(F.linear(h, weight), t)

    lp = torch.cat(
        [
            checkpoint(f, h, t, use_reentrant=False)
            for h, t in zip(hidden[:, :-1].split(4, 1), ids[:, 1:].split(4, 1))
        ],
        1,
    )
    return _pg(lp, mask, adv)


@case(FUSABLE, "multi-codebook / audio LM heads: [B,T,C,V]", grads=("hidden", "weight_cb"))
def case_multi_codebook(hidden, weight, bias, ids, mask, *, adv, weight_cb, ids_cb, **kw):
    z = torch.einsum("bth,cvh->btcv", hidden, weight_cb)[:, :-1]
    lp = _logp(z, ids_cb[:, 1:]).sum(-1)
    return _pg(lp, mask, adv)


# =============================================================================== E. heads that are not one plain Linear


@case(FUSABLE, "normalised head weight (cosine / nGPT style)")
def case_normalised_weight_head(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = 5.0 * F.linear(F.normalize(hidden, dim=-1), F.normalize(weight, dim=-1))
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@case(
    GENERAL,
    "vocab shards concatenated: base vocab + added-token head (or gathered TP shards)",
    grads=("hidden", "weight", "weight2"),
    note="cat on the vocab axis: tile each piece",
)
def case_concat_vocab_shards(hidden, weight, bias, ids, mask, *, adv, weight2, **kw):
    z = torch.cat([F.linear(hidden, weight), F.linear(hidden, weight2)], -1)
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


# =============================================================================== F. entropy and other vocab statistics
@case(FUSABLE, "verl/openrlhf entropy: lse - sum(softmax*logits), as a loss bonus", group="ent")
def case_entropy_lse_minus_expect(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    ent = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) - 0.01 * _mean(ent, mask[:, 1:])


@case(FUSABLE, "-(p * log p).sum from one shared log_softmax", group="ent")
def case_entropy_p_logp(hidden, weight, bias, ids, mask, *, adv, **kw):
    lp = F.linear(hidden, weight)[:, :-1].log_softmax(-1)
    ent = -(lp.exp() * lp).sum(-1)
    return _pg(lp.gather(-1, ids[:, 1:, None])[..., 0], mask, adv) - 0.01 * _mean(ent, mask[:, 1:])


@case(FUSABLE, "Categorical: log_prob and entropy from one distribution object", group="ent")
def case_categorical_logprob_entropy(hidden, weight, bias, ids, mask, *, adv, **kw):
    d = Categorical(logits=F.linear(hidden, weight)[:, :-1], validate_args=False)
    return _pg(d.log_prob(ids[:, 1:]), mask, adv) - 0.01 * _mean(d.entropy(), mask[:, 1:])


@case(FUSABLE, "entropy for logging only (no_grad), detached metric returned beside the loss")
def case_entropy_no_grad_metric(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    with torch.no_grad():
        lp_all = z.log_softmax(-1)
        ent = -(lp_all.exp() * lp_all).sum(-1)
    metrics = {"entropy": _mean(ent, mask[:, 1:])}
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 0.0 * metrics["entropy"]


@case(
    GENERAL,
    "sum of squared probs via lse(2z) - 2 lse(z) (verl optimal baseline, WPO weight); verl fused kernels refuse it",
)
def case_sum_pi_squared(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    s2 = torch.exp(torch.logsumexp(2 * z, -1) - 2 * torch.logsumexp(z, -1))
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 0.1 * _mean(s2, mask[:, 1:])


@case(
    GENERAL,
    "top-2 probability margin as a detached token weight (DeepConf-style confidence)",
    stream="token",
    fd=False,
)
def case_top2_margin_weight(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    top = z.detach().softmax(-1).topk(2, -1).values
    w = top[..., 0] - top[..., 1]
    return -_mean(w * adv[:, None] * _logp(z, ids[:, 1:]), mask[:, 1:])


@case(
    GENERAL,
    "argmax token accuracy only, no grad (trl mean_token_accuracy; its kernel calls this is_top1)",
    note="running max + 'is the target the first maximum' streams over vocab tiles",
)
def case_argmax_accuracy(hidden, weight, bias, ids, mask, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    acc = (z.argmax(-1) == ids[:, 1:]).to(z.dtype)
    return -_mean(_logp(z, ids[:, 1:]), mask[:, 1:]) + 0.0 * _mean(acc, mask[:, 1:])


@case(GENERAL, "max-logit penalty: relu(max_v z - c)^2 per token (max over vocab with gradient)")
def case_max_logit_penalty(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 1e-2 * _mean(
        F.relu(z.amax(-1) - 1.0) ** 2, mask[:, 1:]
    )


# =============================================================================== G. RL objectives on top (vocab-free tails)
@case(FUSABLE, "trl grpo: clipped ratio + beta*k3 to reference log-probs, per-sequence mean")
def case_grpo_k3(hidden, weight, bias, ids, mask, *, adv, old_logp, ref_logp, **kw):
    m = mask[:, 1:]
    lp = _logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:])
    d = ref_logp - lp
    r = (lp - old_logp).exp()
    tok = -torch.min(r * adv[:, None], r.clamp(0.8, 1.2) * adv[:, None]) + 0.04 * (d.exp() - d - 1)
    return ((tok * m).sum(-1) / m.sum(-1).clamp(min=1)).mean()


@case(FUSABLE, "k2 KL in the loss")
def case_kl_k2(hidden, weight, bias, ids, mask, *, adv, ref_logp, **kw):
    lp = _logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:])
    return _pg(lp, mask, adv) + 0.04 * _mean(0.5 * (lp - ref_logp).square(), mask[:, 1:])


@case(FUSABLE, "gspo: sequence-level geometric-mean ratio")
def case_gspo(hidden, weight, bias, ids, mask, *, adv, old_logp, **kw):
    m = mask[:, 1:]
    lp = _logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:])
    s = (((lp - old_logp) * m).sum(-1) / m.sum(-1).clamp(min=1)).exp()
    return -torch.min(s * adv, s.clamp(1 - 3e-2, 1 + 4e-2) * adv).mean()


@case(FUSABLE, "cispo: detached clamped ratio times A times logp", fd=False)
def case_cispo(hidden, weight, bias, ids, mask, *, adv, old_logp, **kw):
    lp = _logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:])
    w = (lp - old_logp).exp().clamp(max=1.2).detach()
    return _mean(-w * adv[:, None] * lp, mask[:, 1:])


@case(FUSABLE, "TIS/MIS: truncated or masked rollout-vs-train ratio multiplies the token loss")
def case_tis_mis(hidden, weight, bias, ids, mask, *, adv, old_logp, rollout_logp, **kw):
    m = mask[:, 1:]
    lp = _logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:])
    is_r = (old_logp - rollout_logp).exp()
    w = is_r.clamp(max=2.0) * ((is_r < 5.0) & (is_r > 0.2)).to(lp.dtype)
    r = (lp - old_logp).exp()
    return _mean(-torch.min(r * adv[:, None], r.clamp(0.8, 1.28) * adv[:, None]) * w, m)


@case(
    FUSABLE,
    "PPO with a value head next to lm_head: hidden has two consumers",
    grads=("hidden", "weight", "value_w"),
)
def case_ppo_value_head(hidden, weight, bias, ids, mask, *, adv, old_logp, value_w, returns, **kw):
    m = mask[:, 1:]
    v = (hidden @ value_w)[:, :-1]
    pg = _clip_pg(_logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:]), old_logp, adv, m)
    return pg + 0.5 * _mean((v - returns).square(), m)


# =============================================================================== H. preference losses
def _seq(hidden, weight, ids, mask):
    return (_logp(F.linear(hidden, weight)[:, :-1], ids[:, 1:]) * mask[:, 1:]).sum(-1)


@case(
    FUSABLE,
    "dpo: two separate head calls on the same weight (two forwards)",
    group="dpo",
    note="two regions sharing one weight: dW accumulates; the reference is a third, no-grad region",
)
def case_dpo_two_forwards(hidden, weight, bias, ids, mask, *, ref_hidden, ref_weight, **kw):
    n = ids.size(0) // 2
    c, j = _seq(hidden[:n], weight, ids[:n], mask[:n]), _seq(hidden[n:], weight, ids[n:], mask[n:])
    with torch.no_grad():
        rc = _seq(ref_hidden[:n], ref_weight, ids[:n], mask[:n])
        rj = _seq(ref_hidden[n:], ref_weight, ids[n:], mask[n:])
    return -F.logsigmoid(0.1 * ((c - rc) - (j - rj))).mean()


@case(FUSABLE, "kto: reference-relative sigmoid values with a detached KL baseline", fd=False)
def case_kto(hidden, weight, bias, ids, mask, *, ref_hidden, ref_weight, **kw):
    with torch.no_grad():
        r = _seq(ref_hidden, ref_weight, ids, mask)
    d = _seq(hidden, weight, ids, mask) - r
    base = d.mean().clamp(min=0).detach()
    good, bad = d.chunk(2)
    return torch.cat(
        [1 - torch.sigmoid(0.1 * (good - base)), 1 - torch.sigmoid(0.1 * (base - bad))]
    ).mean()


# =============================================================================== I. two-logits losses (reference / teacher)
def _two(hidden, weight, th, tw):
    with torch.no_grad():
        t = F.linear(th, tw)[:, :-1]
    return F.linear(hidden, weight)[:, :-1], t


@case(
    GENERAL,
    "forward KL(teacher||student) via F.kl_div(log_target=True); teacher has another hidden size",
)
def case_distill_forward_kl(
    hidden, weight, bias, ids, mask, *, teacher_hidden, teacher_weight, **kw
):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    kl = F.kl_div(z.log_softmax(-1), zt.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return _mean(kl, mask[:, 1:])


@case(
    GENERAL, "classic KD: softmax teacher with temperature, kl_div 'batchmean', T^2, mixed with CE"
)
def case_distill_classic_kd(
    hidden, weight, bias, ids, mask, *, teacher_hidden, teacher_weight, **kw
):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    kd = (
        F.kl_div(
            (z / 2).flatten(0, 1).log_softmax(-1),
            (zt / 2).flatten(0, 1).softmax(-1),
            reduction="batchmean",
        )
        * 4
    )
    return 0.5 * kd - 0.5 * _mean(_logp(z, ids[:, 1:]), mask[:, 1:])


@case(FUSABLE, "teacher top-k with a tail bucket (sdpo add_tail): log(1 - sum p_k)")
def case_distill_teacher_topk_tail(
    hidden, weight, bias, ids, mask, *, teacher_topk_ids, teacher_topk_logp, **kw
):
    def tail(lp):
        return torch.cat(
            [lp, torch.log(-torch.expm1(lp.logsumexp(-1, keepdim=True).clamp(max=-1e-7)))], -1
        )

    s = tail(F.linear(hidden, weight)[:, :-1].log_softmax(-1).gather(-1, teacher_topk_ids))
    t = tail(teacher_topk_logp)
    return _mean((t.exp() * (t - s)).sum(-1), mask[:, 1:])


@case(GENERAL, "uld/gold cross-tokenizer: L1 between sorted probability vectors", stream="token")
def case_distill_sorted_probs(
    hidden, weight, bias, ids, mask, *, teacher_hidden, teacher_weight, **kw
):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    ps = z.softmax(-1).sort(-1, descending=True).values
    pt = zt.softmax(-1).sort(-1, descending=True).values
    return _mean((ps - pt).abs().sum(-1), mask[:, 1:])


@case(GENERAL, "total variation between policy and reference distributions")
def case_total_variation(hidden, weight, bias, ids, mask, *, ref_hidden, ref_weight, **kw):
    z, zr = _two(hidden, weight, ref_hidden, ref_weight)
    return _mean(0.5 * (z.softmax(-1) - zr.softmax(-1)).abs().sum(-1), mask[:, 1:])


# =============================================================================== J. must be reported, not fused
class _Out(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor | None


@case(
    not_fusable("logits are an output of the optimised function"),
    "compute_loss(return_outputs=True); eval loops; hf Trainer metrics",
    note="the case returns only the loss so the self-test can run; fn(return_logits=True) returns both",
)
def case_logits_returned(hidden, weight, bias, ids, mask, *, adv, return_logits=False, **kw):
    z = F.linear(hidden, weight)
    out = _Out(_pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv), z)
    return out if return_logits else out.loss + 0.0 * out.logits.detach().reshape(-1)[0]


_STASH: list = []


@case(
    not_fusable("logits escape through a side effect (appended to a python list)"),
    "debug hooks, activation dumps, log_completions of logits",
)
def case_logits_escape_side_effect(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)
    _STASH.clear()
    _STASH.append(z.detach())
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@case(
    not_fusable("vocab-carrying values of different tokens are combined (needs a halo)"),
    "temporal smoothness: KL between consecutive tokens",
)
def case_cross_token_kl(hidden, weight, bias, ids, mask, *, adv, **kw):
    lp = F.linear(hidden, weight)[:, :-1].log_softmax(-1)
    kl = (lp[:, 1:].exp() * (lp[:, 1:] - lp[:, :-1])).sum(-1)
    return _pg(lp.gather(-1, ids[:, 1:, None])[..., 0], mask, adv) + 0.01 * _mean(kl, mask[:, 2:])


@case(
    not_fusable("gradient with respect to the logits is taken explicitly"),
    "gradient penalties / influence scores: autograd.grad(loss, logits, create_graph=True)",
)
def case_autograd_grad_wrt_logits(hidden, weight, bias, ids, mask, *, adv, **kw):
    z = F.linear(hidden, weight)[:, :-1]
    loss = _pg(_logp(z, ids[:, 1:]), mask, adv)
    (g,) = torch.autograd.grad(loss, z, create_graph=True)
    return loss + 0.1 * g.square().sum()


@case(
    not_fusable("logits re-enter another layer that keeps the vocab axis (second head over vocab)"),
    "learned logit adapters: logits @ M with M [V,V]",
)
def case_vocab_to_vocab_matmul(hidden, weight, bias, ids, mask, *, adv, weight2, **kw):
    z = F.linear(hidden, weight)
    z = z + 0.01 * (z @ weight2.detach()) @ weight2.detach().t()
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)
