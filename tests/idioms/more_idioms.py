"""More shapes of losses than the catalogue holds: every further way we could think of.

``MORE[name]`` is a function of the catalogue's inputs with an attribute ``verdict``: ``APPLY``,
``REFUSE``, or ``EITHER`` where both are right as long as the numbers are.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from idioms import _clip_pg, _labels, _logp, _mean, _pg, _two
from torch.distributions import Categorical, kl_divergence
from torch.utils.checkpoint import checkpoint

APPLY, REFUSE, EITHER = "apply", "refuse", "either"
# Dynamo makes an autograd.Function of a hook, which is opened; from torch 2.13 on an opaque op.
HOOKED = APPLY if torch.__version__.startswith(("2.11.", "2.12.")) else REFUSE
MORE: dict[str, Callable] = {}


def shape(verdict: str, *, seldom: bool = False) -> Callable:
    """Register a loss shape with the verdict it should get.

    Of the shapes that are seldom run, each op, remark and branch of fxrl is another one's, too.
    """

    def register(fn: Callable) -> Callable:
        fn.verdict, fn.seldom = verdict, seldom
        MORE[fn.__name__] = fn
        return fn

    return register


def head(hidden, weight):
    return F.linear(hidden, weight)[:, :-1]


# ---------------------------------------------------------------- picking the target
@shape(APPLY, seldom=True)
def advanced_index_flat(hidden, weight, ids, mask, adv):
    z = head(hidden, weight).flatten(0, 1).log_softmax(-1)
    n = torch.arange(z.size(0))
    return _pg(z[n, ids[:, 1:].flatten()].view(ids.size(0), -1), mask, adv)


@shape(APPLY, seldom=True)
def advanced_index_two_dims(hidden, weight, ids, mask, adv):
    z = head(hidden, weight).log_softmax(-1)
    b = torch.arange(z.size(0))[:, None]
    t = torch.arange(z.size(1))[None, :]
    return _pg(z[b, t, ids[:, 1:]], mask, adv)


@shape(APPLY, seldom=True)
def take_along_dim(hidden, weight, ids, mask, adv):
    lp = torch.take_along_dim(head(hidden, weight).log_softmax(2), ids[:, 1:, None], dim=2)
    return _pg(lp.squeeze(2), mask, adv)


@shape(APPLY, seldom=True)
def nll_loss_mean(hidden, weight, ids, mask):
    lp = head(hidden, weight).log_softmax(-1)
    return F.nll_loss(lp.flatten(0, 1), _labels(ids, mask)[:, 1:].flatten(), ignore_index=-100)


@shape(APPLY, seldom=True)
def nll_loss_class_dim_1(hidden, weight, ids, mask, adv):
    lp = head(hidden, weight).log_softmax(-1).movedim(-1, 1)
    return _pg(-F.nll_loss(lp, ids[:, 1:], reduction="none"), mask, adv)


@shape(APPLY, seldom=True)
def one_hot_einsum(hidden, weight, ids, mask, adv):
    lp = head(hidden, weight).log_softmax(-1)
    hot = F.one_hot(ids[:, 1:], lp.size(-1)).to(lp)
    return _pg(torch.einsum("btv,btv->bt", lp, hot), mask, adv)


@shape(APPLY, seldom=True)
def equality_mask(hidden, weight, ids, mask, adv):
    lp = head(hidden, weight).log_softmax(-1)
    hit = torch.arange(lp.size(-1)) == ids[:, 1:, None]
    return _pg(lp.masked_fill(~hit, 0.0).sum(-1), mask, adv)


@shape(APPLY, seldom=True)
def labels_rolled(hidden, weight, ids, mask, adv):
    lp = _logp(F.linear(hidden, weight), ids.roll(-1, 1))[:, :-1]
    return _pg(lp, mask, adv)


@shape(APPLY, seldom=True)
def labels_padded(hidden, weight, ids, mask):
    labels = F.pad(_labels(ids, mask), (0, 1), value=-100)[:, 1:]
    z = F.linear(hidden, weight)
    return F.cross_entropy(z.view(-1, z.size(-1)), labels.reshape(-1))


@shape(APPLY, seldom=True)
def labels_clamped_then_masked(hidden, weight, ids, mask):
    labels = _labels(ids, mask)[:, 1:]
    lp = _logp(head(hidden, weight), labels.clamp(min=0))
    return -(lp * (labels != -100)).sum() / (labels != -100).sum()


@shape(APPLY)
def labels_of_minus_one_indexed(hidden, weight, ids, mask):
    """An index of -1 is the vocabulary's last entry, which the mask leaves out."""
    lp, m = head(hidden, weight).log_softmax(-1).flatten(0, 1), mask[:, 1:].flatten()
    labels = torch.where(m == 1, ids[:, 1:].flatten(), -1)
    hits = (lp.argmax(-1) == labels).to(m)
    return -_mean(lp[torch.arange(len(lp)), labels] * (1 + hits), m)


@shape(APPLY, seldom=True)
def labels_of_minus_one_indexed_among_the_best(hidden, weight, ids, mask):
    lp, m = head(hidden, weight).flatten(0, 1).topk(20).values.log_softmax(-1), mask[:, 1:]
    labels = torch.where(m == 1, ids[:, 1:] % 20, -1).flatten()
    return -lp[torch.arange(len(lp)), labels].mean()


@shape(APPLY, seldom=True)
def labels_flipped(hidden, weight, ids, mask, adv):
    lp = _logp(head(hidden, weight), ids[:, 1:].flip(1))
    return _pg(lp, mask, adv)


@shape(APPLY, seldom=True)
def cumsum_mask_to_first_eos(hidden, weight, ids, adv):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    m = ((ids[:, 1:] % 7 == 0).cumsum(1) == 0).to(lp.dtype)
    return -_mean(lp * adv[:, None], m)


# ---------------------------------------------------------------- statistics of one row
@shape(APPLY, seldom=True)
def entropy_xlogy(hidden, weight, mask):
    p = head(hidden, weight).softmax(-1)
    return _mean(-torch.xlogy(p, p).sum(-1), mask[:, 1:])


@shape(APPLY)
def entropy_entr(hidden, weight, mask):
    return _mean(torch.special.entr(head(hidden, weight).softmax(-1)).sum(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def entropy_nats_of_top_k(hidden, weight, mask):
    lp = head(hidden, weight).topk(5, -1).values.log_softmax(-1)
    return _mean(-(lp.exp() * lp).sum(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def entropy_weights_by_quantile(hidden, weight, ids, mask, adv):
    lp = head(hidden, weight).log_softmax(-1)
    with torch.no_grad():
        ent = -(lp.exp() * lp).sum(-1)
        keep = (ent >= ent.flatten().sort().values[ent.numel() // 2]).to(lp.dtype)
    return -_mean(lp.gather(-1, ids[:, 1:, None])[..., 0] * adv[:, None] * keep, mask[:, 1:])


@shape(APPLY, seldom=True)
def z_loss(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 1e-4 * _mean(z.logsumexp(-1) ** 2, mask[:, 1:])


@shape(APPLY)
def gini(hidden, weight, mask):
    return _mean(1 - head(hidden, weight).softmax(-1).square().sum(-1), mask[:, 1:])


@shape(APPLY)
def renyi_entropy(hidden, weight, mask):
    lp = head(hidden, weight).log_softmax(-1)
    return _mean((0.5 * lp).logsumexp(-1) / 0.5, mask[:, 1:])


@shape(APPLY)
def kl_to_uniform(hidden, weight, mask):
    lp = head(hidden, weight).log_softmax(-1)
    return _mean(-lp.mean(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def variance_of_logits(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 1e-2 * _mean(z.var(-1) + z.std(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def logits_square_mean(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 1e-3 * z.square().mean()


@shape(APPLY, seldom=True)
def rank_of_target(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    picked = z.gather(-1, ids[:, 1:, None])
    rank = (z > picked).sum(-1).to(z.dtype)
    return -_mean((picked[..., 0] - z.logsumexp(-1)) * adv[:, None] / (1 + rank), mask[:, 1:])


@shape(APPLY, seldom=True)
def probability_above_target(hidden, weight, ids, mask):
    p = head(hidden, weight).softmax(-1)
    picked = p.gather(-1, ids[:, 1:, None])
    return _mean(torch.where(p > picked, p, 0.0).sum(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def top_5_accuracy(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    hit = (z.topk(5, -1).indices == ids[:, 1:, None]).any(-1).to(z.dtype)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 0.0 * _mean(hit, mask[:, 1:])


@shape(APPLY, seldom=True)
def margin_to_best_other(hidden, weight, ids, mask):
    z = head(hidden, weight)
    other = z.scatter(-1, ids[:, 1:, None], float("-inf")).amax(-1)
    return _mean(F.relu(1 + other - z.gather(-1, ids[:, 1:, None])[..., 0]), mask[:, 1:])


@shape(APPLY, seldom=True)
def softplus_of_the_rest(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    rest = z.scatter(-1, ids[:, 1:, None], float("-inf")).logsumexp(-1)
    return _pg(-F.softplus(rest - z.gather(-1, ids[:, 1:, None])[..., 0]), mask, adv)


@shape(APPLY, seldom=True)
def focal(hidden, weight, ids, mask):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    return _mean(-((1 - lp.exp()) ** 2) * lp, mask[:, 1:])


@shape(APPLY)
def odds_ratio(hidden, weight, ids, mask):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    seq = (lp * mask[:, 1:]).sum(-1) / mask[:, 1:].sum(-1)
    odds = seq - torch.log1p(-seq.exp())
    good, bad = odds.chunk(2)
    return -F.logsigmoid(good - bad).mean()


@shape(APPLY)
def logit_of_probability(hidden, weight, ids, mask):
    p = head(hidden, weight).softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return _mean(-torch.logit(p, eps=1e-9), mask[:, 1:])


@shape(APPLY)
def logaddexp_mixture(hidden, weight, ids, mask, ref_logp):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    return _mean(-torch.logaddexp(lp, ref_logp), mask[:, 1:])


@shape(APPLY, seldom=True)
def binary_ce_per_class(hidden, weight, ids, mask):
    z = head(hidden, weight)
    hot = F.one_hot(ids[:, 1:], z.size(-1)).to(z.dtype)
    bce = F.binary_cross_entropy_with_logits(z, hot, reduction="none").sum(-1)
    return _mean(bce, mask[:, 1:])


@shape(APPLY, seldom=True)
def logsigmoid_of_logits(hidden, weight, ids, mask):
    z = head(hidden, weight)
    return _mean(-F.logsigmoid(z).gather(-1, ids[:, 1:, None])[..., 0], mask[:, 1:])


@shape(APPLY)
def label_smoothing_by_hand(hidden, weight, ids, mask):
    lp = head(hidden, weight).log_softmax(-1)
    picked = lp.gather(-1, ids[:, 1:, None])[..., 0]
    return -_mean(0.9 * picked + 0.1 * lp.mean(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def ce_smoothing_weight_class_dim_1(hidden, weight, ids, mask, class_w):
    z = head(hidden, weight).transpose(1, 2)
    return F.cross_entropy(z, _labels(ids, mask)[:, 1:], weight=class_w, label_smoothing=0.1)


@shape(APPLY, seldom=True)
def ce_sum(hidden, weight, ids, mask):
    z = head(hidden, weight)
    labels = _labels(ids, mask)[:, 1:]
    total = F.cross_entropy(z.reshape(-1, z.size(-1)), labels.reshape(-1), reduction="sum")
    return total / mask[:, 1:].sum()


@shape(APPLY, seldom=True)
def ce_soft_targets(hidden, weight, soft_targets):
    z = head(hidden, weight)
    return F.cross_entropy(z.flatten(0, 1), soft_targets.flatten(0, 1))


@shape(APPLY)
def categorical_probs(hidden, weight, ids, mask, adv):
    d = Categorical(probs=head(hidden, weight).softmax(-1), validate_args=False)
    return _pg(d.log_prob(ids[:, 1:]), mask, adv) - 0.01 * _mean(d.entropy(), mask[:, 1:])


# ---------------------------------------------------------------- transforms and masks
@shape(APPLY, seldom=True)
def standardised_logits(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def logits_divided_by_their_norm(hidden, weight, ids, mask, adv):
    return _pg(_logp(9 * F.normalize(head(hidden, weight), dim=-1), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def clamp_and_nan_to_num(hidden, weight, ids, mask, adv):
    z = torch.nan_to_num(head(hidden, weight)).clamp(-2.0, 2.0)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def temperature_per_sequence(hidden, weight, ids, mask, adv, temp_vec):
    return _pg(_logp(head(hidden, weight) / temp_vec[:, None, None], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def temperature_per_token(hidden, weight, ids, mask, adv, returns):
    t = 1 + returns.square()[..., None]
    return _pg(_logp(head(hidden, weight) / t, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def temperature_learned(hidden, weight, ids, mask, adv, value_w):
    return _pg(_logp(head(hidden, weight) * value_w[0].exp(), ids[:, 1:]), mask, adv)


@shape(APPLY)
def temperature_from_mean_entropy(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    lp = z.log_softmax(-1)
    ent = -(lp.exp() * lp).sum(-1).mean()
    return _pg(_logp(z / (1 + ent), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def min_p_filter(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    p = z.detach().softmax(-1)
    keep = (p >= 0.1 * p.amax(-1, keepdim=True)).scatter(-1, ids[:, 1:, None], True)
    return _pg(_logp(z.masked_fill(~keep, float("-inf")), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def top_k_filter_by_threshold(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    floor = z.topk(20, -1).values[..., -1:]
    picked = z.gather(-1, ids[:, 1:, None])
    z = torch.where((z < floor) & (z != picked), -1e9, z)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def top_k_filter_by_kthvalue(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    floor = z.kthvalue(z.size(-1) - 19, -1, keepdim=True).values
    return _mean((z.logsumexp(-1) - (z * (z >= floor)).sum(-1)), mask[:, 1:])


@shape(APPLY)
def vocab_slice(hidden, weight, ids, mask, adv, v_real):
    z = F.linear(hidden, weight)[..., :v_real]
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def vocab_narrow(hidden, weight, ids, mask, adv, v_real):
    z = F.linear(hidden, weight).narrow(-1, 0, v_real).narrow(1, 0, ids.size(1) - 1)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def vocab_subset(hidden, weight, mask, banned):
    z = head(hidden, weight).index_select(-1, torch.arange(3, 40, 2))
    return _mean(z.log_softmax(-1)[..., 4], mask[:, 1:])


@shape(APPLY)
def vocab_subset_by_list(hidden, weight, mask):
    return _mean(head(hidden, weight)[..., [3, 5, 8, 13]].log_softmax(-1)[..., 2], mask[:, 1:])


@shape(APPLY, seldom=True)
def masked_fill_vector(hidden, weight, ids, mask, adv, banned):
    z = head(hidden, weight).masked_fill(banned, float("-inf"))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def bias_as_wide_as_one_row(hidden, weight, ids, mask, adv, banned):
    z = head(hidden, weight)
    bias, kept = torch.zeros_like(z[0, 0]), torch.ones_like(z[:, 0], dtype=torch.bool)
    bias[banned] = -1e4
    kept = kept.scatter(1, ids[:, :2], False).scatter(1, ids[:, 2:], True)
    return _pg(_logp(torch.where(kept[:, None], z + bias, z / 1.2), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def masked_fill_full_mask(hidden, weight, ids, mask, adv, allowed):
    z = head(hidden, weight).masked_fill(~allowed[:, :-1], float("-inf"))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def banned_columns_written(hidden, weight, ids, mask, adv, banned):
    z = F.linear(hidden, weight)
    z[:, :, banned] = -1e9
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def padded_columns_written(hidden, weight, ids, mask, adv, v_real):
    z = F.linear(hidden, weight)
    z[..., v_real:] = float("-inf")
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY)
def column_list_written(hidden, weight, ids, mask, adv, banned):
    z = F.linear(hidden, weight).clone()
    z[..., banned.nonzero()[:, 0]] = -50.0
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def in_place_chain(hidden, weight, ids, mask, adv, banned):
    z = F.linear(hidden, weight)
    z.div_(0.7).add_(0.1).masked_fill_(banned, -1e9)
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def penalty_on_seen_tokens(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    picked = z.gather(-1, ids[:, 1:, None])
    z = z.scatter(-1, ids[:, 1:, None], torch.where(picked > 0, picked / 1.2, picked * 1.2))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def index_of_fewer_tokens(hidden, weight, ids, mask, adv):
    """The last token's logits are read by the entropy alone."""
    lp = F.linear(hidden, weight).log_softmax(-1)
    entropy = -(lp.exp() * lp).sum(-1)
    chosen = lp.gather(-1, ids[:, 1:, None])[..., 0]
    return _pg(chosen, mask, adv) - 0.01 * _mean(entropy, mask)


@shape(APPLY, seldom=True)
def weighted_by_rank_and_range(hidden, weight, ids, mask, adv):
    """How many entries are above the target's, and how far the least and the largest are apart."""
    z = head(hidden, weight)
    above = torch.count_nonzero(z > z.gather(-1, ids[:, 1:, None]), dim=-1)
    least, largest = torch.aminmax(z.detach(), dim=-1)  # has no gradient in torch 2.11
    middle = z.nanmedian(-1).values + z.round().mode(-1).values
    return _pg(_logp(z, ids[:, 1:]) * (largest - least) / (1 + above) + middle, mask, adv)


@shape(APPLY, seldom=True)
def index_of_fewer_sequences(hidden, weight, ids, mask):
    z = F.linear(hidden, weight).unflatten(-1, (1, -1))
    lp = z.log_softmax(-1).gather(-1, ids[1:-1, 2:-3, None, None])
    return -_mean(lp[..., 0, 0], mask[1:-1, 2:-3])


@shape(APPLY, seldom=True)
def rows_zeroed_by_mask(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight) * mask[..., None]
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def straight_through_argmax(hidden, weight, mask, value_w):
    p = head(hidden, weight).softmax(-1)
    hard = F.one_hot(p.argmax(-1), p.size(-1)).to(p.dtype)
    soft = hard + p - p.detach()
    return _mean((soft * torch.arange(p.size(-1))).sum(-1), mask[:, 1:])


# ---------------------------------------------------------------- rows: splits, loops, packing
@shape(APPLY, seldom=True)
def chosen_rejected_chunk(hidden, weight, ids, mask):
    lp = _logp(head(hidden, weight), ids[:, 1:]) * mask[:, 1:]
    good, bad = lp.sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (good - bad)).mean()


@shape(APPLY, seldom=True)
def chosen_rejected_logits_split(hidden, weight, ids, mask):
    good, bad = head(hidden, weight).chunk(2)
    n = ids.size(0) // 2
    c = (_logp(good, ids[:n, 1:]) * mask[:n, 1:]).sum(-1)
    r = (_logp(bad, ids[n:, 1:]) * mask[n:, 1:]).sum(-1)
    return -F.logsigmoid(0.1 * (c - r)).mean()


@shape(APPLY, seldom=True)
def every_second_sequence(hidden, weight, ids, mask):
    z = head(hidden, weight)
    c = (_logp(z[0::2], ids[0::2, 1:]) * mask[0::2, 1:]).sum(-1)
    r = (_logp(z[1::2], ids[1::2, 1:]) * mask[1::2, 1:]).sum(-1)
    return F.relu(1 - (c - r)).mean()


@shape(APPLY)
def loop_over_sequences(hidden, weight, ids, mask):
    z = F.linear(hidden, weight)
    losses = [F.cross_entropy(row[:-1], ids[i, 1:]) for i, row in enumerate(z.unbind(0))]
    return torch.stack(losses).mean()


@shape(APPLY, seldom=True)
def loop_with_head_inside(hidden, weight, ids, mask):
    parts = [_logp(F.linear(h, weight)[:-1], t[1:]) for h, t in zip(hidden, ids, strict=True)]
    return -(torch.cat(parts) * mask[:, 1:].reshape(-1)).sum() / mask[:, 1:].sum()


@shape(APPLY)
def last_token_yes_no(hidden, weight, adv):
    z = F.linear(hidden, weight)[:, -1]
    return -(adv * F.logsigmoid(z[:, 5] - z[:, 9])).mean()


@shape(APPLY, seldom=True)
def last_token_answer_letters(hidden, weight, ids):
    z = F.linear(hidden, weight)[:, -1, [5, 9, 11, 40]]
    return F.cross_entropy(z, ids[:, -1] % 4)


@shape(APPLY, seldom=True)
def last_valid_token(hidden, weight, ids, mask, adv):
    last = mask.long().sum(-1) + 3
    z = F.linear(hidden, weight)[torch.arange(ids.size(0)), last]
    return -(adv * z.log_softmax(-1)[:, 7]).mean()


@shape(APPLY, seldom=True)
def logits_compacted_by_mask(hidden, weight, ids, mask):
    keep = mask[:, 1:].bool()
    return F.cross_entropy(head(hidden, weight)[keep], ids[:, 1:][keep])


@shape(APPLY, seldom=True)
def logits_compacted_twice(hidden, weight, ids, mask):
    z, keep = head(hidden, weight), mask[:, 1:] == 1
    lse = z[keep].logsumexp(-1)
    lp = z[keep].gather(-1, ids[:, 1:][keep][:, None])[:, 0] - lse
    return -lp.mean() + 1e-3 * (lse**2).mean()


@shape(APPLY)
def logits_compacted_and_in_parts(hidden, weight, ids, mask):
    keep = mask[:, 1:] == 1
    z, ids = head(hidden, weight)[keep], ids[:, 1:][keep]
    logps = torch.cat([_logp(*part) for part in zip(z.split(8), ids.split(8), strict=True)])
    entropies = [c.logsumexp(-1) - (c.softmax(-1) * c).sum(-1) for c in torch.chunk(z, 3)]
    return -logps.mean() - 0.01 * torch.cat(entropies).mean()


@shape(APPLY, seldom=True)
def segment_sums_by_scatter_add(hidden, weight, ids, mask, adv):
    lp = (_logp(head(hidden, weight), ids[:, 1:]) * mask[:, 1:]).flatten()
    seg = torch.arange(ids.size(0)).repeat_interleave(ids.size(1) - 1)
    return -(adv * lp.new_zeros(ids.size(0)).scatter_add(0, seg, lp)).mean()


@shape(APPLY, seldom=True)
def two_shifts_same_logits(hidden, weight, ids, mask):
    z = F.linear(hidden, weight)
    one, two = _logp(z[:, :-1], ids[:, 1:]), _logp(z[:, :-2], ids[:, 2:])
    return -_mean(one, mask[:, 1:]) - 0.3 * _mean(two, mask[:, 2:])


@shape(APPLY)
def time_major(hidden, weight, ids, mask, adv):
    z = F.linear(hidden.transpose(0, 1), weight)[:-1]
    lp = _logp(z, ids.t()[1:])
    return _pg(lp.t(), mask, adv)


@shape(APPLY, seldom=True)
def vmap_over_batch(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    lp = torch.vmap(lambda a, t: a.log_softmax(-1).gather(-1, t[:, None])[:, 0])(z, ids[:, 1:])
    return _pg(lp, mask, adv)


@shape(APPLY)
def sequence_repeats(hidden, weight, ids, mask):
    lp = _logp(head(hidden, weight), ids[:, 1:]).repeat_interleave(2, 0)
    return -_mean(lp, mask[:, 1:].repeat_interleave(2, 0))


# ---------------------------------------------------------------- heads
@shape(APPLY)
def head_matmul_transposed_weight(hidden, weight, ids, mask, adv):
    return _pg(_logp((hidden @ weight.T)[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY)
def head_with_bias(hidden, weight, bias, ids, mask, adv):
    return _pg(_logp(F.linear(hidden, weight, bias)[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def head_weight_on_the_left(hidden, weight, ids, mask, adv):
    z = weight @ hidden[:, :-1].transpose(1, 2)
    return _pg(-F.cross_entropy(z, ids[:, 1:], reduction="none"), mask, adv)


@shape(APPLY, seldom=True)
def head_with_lora(hidden, weight, ids, mask, adv, lora_a, lora_b):
    z = F.linear(hidden, weight) + 2.0 * F.linear(F.linear(hidden, lora_a), lora_b)
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY)
def head_lora_merged(hidden, weight, ids, mask, adv, lora_a, lora_b):
    return _pg(_logp(head(hidden, weight + lora_b @ lora_a), ids[:, 1:]), mask, adv)


@shape(APPLY)
def head_tied_to_embedding(hidden, weight, ids, mask, adv):
    x = hidden + 0.1 * F.embedding(ids, weight)
    return _pg(_logp(head(x, weight), ids[:, 1:]), mask, adv)


@shape(APPLY)
def head_dequantised(hidden, weight_q, weight_scale, ids, mask, adv):
    w = weight_q.to(hidden.dtype) * weight_scale
    return _pg(_logp(head(hidden, w), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def two_heads_two_losses(hidden, weight, weight2, ids, mask):
    one, two = _logp(head(hidden, weight), ids[:, 1:]), _logp(head(hidden, weight2), ids[:, :-1])
    return -_mean(one, mask[:, 1:]) - 0.5 * _mean(two, mask[:, 1:])


@shape(APPLY, seldom=True)
def two_heads_summed(hidden, weight, weight2, ids, mask, adv):
    return _pg(_logp(head(hidden, weight) + head(hidden, weight2), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def categorical_value_head(hidden, weight, weight2, ids, mask, adv, returns):
    support = torch.linspace(-2, 2, weight2.size(0), dtype=hidden.dtype)
    v = head(hidden, weight2).softmax(-1) @ support
    return _pg(_logp(head(hidden, weight), ids[:, 1:]), mask, adv) + _mean(
        (v - returns) ** 2, mask[:, 1:]
    )


@shape(APPLY, seldom=True)
def reward_head_beside(hidden, weight, ids, mask, adv, value_w):
    score = (hidden @ value_w)[:, -1]
    good, bad = score.chunk(2)
    return _pg(_logp(head(hidden, weight), ids[:, 1:]), mask, adv) - F.logsigmoid(good - bad).mean()


@shape(APPLY, seldom=True)
def router_loss_beside(hidden, weight, weight2, ids, mask, adv):
    p = F.linear(hidden, weight2[:4]).softmax(-1)
    load = p.mean((0, 1))
    return _pg(_logp(head(hidden, weight), ids[:, 1:]), mask, adv) + (load * load).sum()


@shape(APPLY, seldom=True)
def many_experts_router_beside(hidden, weight, weight2, ids, mask, adv):
    p = F.linear(hidden, weight2[:16]).softmax(-1)
    load = p.mean((0, 1))
    return _pg(_logp(head(hidden, weight), ids[:, 1:]), mask, adv) + (load * load).sum()


@shape(APPLY, seldom=True)
def hidden_reused(hidden, weight, ids, mask, adv):
    return _pg(_logp(head(hidden, weight), ids[:, 1:]), mask, adv) + 1e-2 * hidden.square().mean()


@shape(APPLY)
def mlp_before_head(hidden, weight, weight2, ids, mask, adv):
    x = hidden + F.silu(F.linear(hidden, weight2[:32])) @ weight2[:32]
    return _pg(_logp(head(x, weight), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def soft_embedding(hidden, weight, ids, mask, adv):
    p = head(hidden, weight).softmax(-1)
    mixed = p @ weight
    return _mean((mixed - hidden[:, 1:]).square().sum(-1), mask[:, 1:])


# ---------------------------------------------------------------- two distributions
@shape(APPLY, seldom=True)
def kl_div_probabilities(hidden, weight, teacher_hidden, teacher_weight, mask):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    kl = F.kl_div(z.log_softmax(-1), zt.softmax(-1), reduction="none").sum(-1)
    return _mean(kl, mask[:, 1:])


@shape(APPLY, seldom=True)
def kl_div_sum(hidden, weight, teacher_hidden, teacher_weight):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    lp, lt = z.log_softmax(-1), zt.log_softmax(-1)
    return F.kl_div(lp, lt, reduction="sum", log_target=True) / z.shape[0]


@shape(APPLY, seldom=True)
def reverse_kl(hidden, weight, ref_hidden, ref_weight, mask):
    z, zt = _two(hidden, weight, ref_hidden, ref_weight)
    lp, lt = z.log_softmax(-1), zt.log_softmax(-1)
    return _mean((lp.exp() * (lp - lt)).sum(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def jensen_shannon(hidden, weight, teacher_hidden, teacher_weight, mask):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    lp, lt = z.log_softmax(-1), zt.log_softmax(-1)
    mix = torch.logsumexp(torch.stack([lp, lt]), 0) - torch.log(torch.tensor(2.0))
    js = 0.5 * ((lp.exp() * (lp - mix)).sum(-1) + (lt.exp() * (lt - mix)).sum(-1))
    return _mean(js, mask[:, 1:])


@shape(APPLY, seldom=True)
def renyi_divergence(hidden, weight, ref_hidden, ref_weight, mask):
    z, zt = _two(hidden, weight, ref_hidden, ref_weight)
    mixed = 0.5 * z.log_softmax(-1) + 0.5 * zt.log_softmax(-1)
    return _mean(-2 * mixed.logsumexp(-1), mask[:, 1:])


@shape(APPLY)
def categorical_kl(hidden, weight, ref_hidden, ref_weight, mask):
    z, zt = _two(hidden, weight, ref_hidden, ref_weight)
    p, q = (Categorical(logits=x, validate_args=False) for x in (z, zt))
    return _mean(kl_divergence(p, q), mask[:, 1:])


@shape(APPLY, seldom=True)
def cosine_of_logits(hidden, weight, teacher_hidden, teacher_weight, mask):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    return _mean(1 - F.cosine_similarity(z, zt, dim=-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def logits_mse_per_token(hidden, weight, teacher_hidden, teacher_weight, mask):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    mse = F.mse_loss(z, zt, reduction="none") + F.huber_loss(z, zt, reduction="none")
    return _mean(mse.mean(-1), mask[:, 1:])


@shape(EITHER, seldom=True)
def logits_mse(hidden, weight, teacher_hidden, teacher_weight):
    z, zt = _two(hidden, weight, teacher_hidden, teacher_weight)
    return F.mse_loss(z, zt)


@shape(APPLY, seldom=True)
def vocab_order_reversed(hidden, weight, ids, mask, adv):
    z = head(hidden, weight).flip(-1).roll(3, -1)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def additive_full_mask(hidden, weight, ids, mask, adv, allowed):
    z = head(hidden, weight) + (~allowed[:, :-1]).to(hidden.dtype) * -30.0
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def additive_full_data(hidden, weight, ids, mask, adv, soft_targets):
    return _pg(_logp(head(hidden, weight) + soft_targets.log(), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def divided_by_full_data(hidden, weight, ids, mask, adv, soft_targets):
    return _pg(_logp(head(hidden, weight) / (1 + soft_targets), ids[:, 1:]), mask, adv)


@shape(APPLY)
def additive_vector_of_three_dims(hidden, weight, ids, mask, adv, class_w):
    return _pg(_logp(head(hidden, weight) + class_w[None, None, :], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def argmax_of_biased_logits(hidden, weight, ids, mask, adv, soft_targets):
    z = head(hidden, weight)
    hit = ((z + 40 * soft_targets).argmax(-1) == ids[:, 1:]).to(z.dtype)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + _mean(hit, mask[:, 1:])


@shape(APPLY, seldom=True)
def rows_overwritten_by_mask(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight)
    z[mask == 0] = 0.5
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def contrastive_logits(hidden, weight, ref_hidden, ref_weight, ids, mask, adv):
    z, zt = _two(hidden, weight, ref_hidden, ref_weight)
    return _pg(_logp(z + 0.5 * (z - zt), ids[:, 1:]), mask, adv)


@shape(APPLY)
def top_k_distillation_renormalised(hidden, weight, teacher_topk_ids, teacher_topk_logp, mask):
    s = head(hidden, weight).gather(-1, teacher_topk_ids).log_softmax(-1)
    t = teacher_topk_logp.log_softmax(-1)
    return _mean((t.exp() * (t - s)).sum(-1), mask[:, 1:])


# ---------------------------------------------------------------- gradients and modes
@shape(APPLY)
def checkpointed_loss(hidden, weight, ids, mask, adv):
    def f(h, w):
        return _pg(_logp(head(h, w), ids[:, 1:]), mask, adv)

    return checkpoint(f, hidden, weight, use_reentrant=False)


@shape(APPLY, seldom=True)
def nested_grad_modes(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    with torch.no_grad():
        w = z.softmax(-1).amax(-1)
        with torch.enable_grad():
            lp = _logp(z, ids[:, 1:])
    return -_mean(lp * w * adv[:, None], mask[:, 1:])


@shape(APPLY)
def detached_hidden(hidden, weight, ids, mask, adv):
    return _pg(_logp(head(hidden.detach(), weight), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def frozen_head(hidden, weight, ids, mask, adv):
    return _pg(_logp(head(hidden, weight.detach()), ids[:, 1:]), mask, adv)


@shape(APPLY)
def old_logp_is_detached_logp(hidden, weight, ids, mask, adv):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    return _clip_pg(lp, lp.detach(), adv, mask[:, 1:])


@shape(APPLY, seldom=True)
def ratio_of_kinds_of_mean(hidden, weight, ids, mask, adv):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    base = (lp * mask[:, 1:]).sum(0) / mask[:, 1:].sum(0).clamp(min=1)
    return -_mean((lp - base) * adv[:, None], mask[:, 1:])


@shape(APPLY, seldom=True)
def metrics_beside_the_loss(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    lp = _logp(z, ids[:, 1:])
    return _pg(lp, mask, adv), {"logp": lp.detach().mean(), "top": z.detach().amax(-1).mean()}


# ---------------------------------------------------------------- refuse: logits leave
@shape(REFUSE)
def logits_returned(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(z, ids[:, 1:]), mask, adv), {"logits": z}


@shape(REFUSE, seldom=True)
def probabilities_returned(hidden, weight, ids, mask, adv):
    p = head(hidden, weight).softmax(-1)
    return _pg(p.gather(-1, ids[:, 1:, None])[..., 0].log(), mask, adv), {"p": p.detach()}


@shape(REFUSE)
def logits_retain_grad(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z.retain_grad()
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(HOOKED)
def logits_hooked(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z.register_hook(lambda g: g * 0.5)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def logits_item_control_flow(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    if z.max().item() > 0.0:
        z = z * 0.5
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def logits_to_numpy(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    scale = float(z.detach().numpy().std())
    return _pg(_logp(z / scale, ids[:, 1:]), mask, adv)


@shape(REFUSE)
def chosen_logits_by_value(hidden, weight, ids, mask):
    p = head(hidden, weight).softmax(-1)
    return -p[p > 0.1].log().mean()


@shape(REFUSE, seldom=True)
def logits_masked_by_full_mask(hidden, weight, allowed):
    return head(hidden, weight)[allowed[:, :-1]].square().mean()


@shape(REFUSE)
def positions_of_likely_tokens(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    count = (z > 0).nonzero().size(0)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + 0.0 * count


# ---------------------------------------------------------------- refuse: random numbers
@shape(REFUSE)
def dropout_on_logits(hidden, weight, ids, mask, adv):
    torch.manual_seed(0)
    return _pg(_logp(F.dropout(head(hidden, weight), 0.5), ids[:, 1:]), mask, adv)


@shape(REFUSE)
def sampled_tokens(hidden, weight, mask):
    lp = head(hidden, weight).log_softmax(-1)
    picked = torch.multinomial(lp.detach().exp().flatten(0, 1), 1).view(*lp.shape[:2], 1)
    return 0.0 * _mean(lp.gather(-1, picked)[..., 0], mask[:, 1:])


@shape(REFUSE)
def dropped_logits(hidden, weight, mask):
    return _mean(0.0 * F.dropout(head(hidden, weight)).logsumexp(-1), mask[:, 1:])


# ---------------------------------------------------------------- refuse: tokens are mixed
@shape(REFUSE)
def softmax_over_tokens(hidden, weight, mask):
    return head(hidden, weight).softmax(1).square().sum()


@shape(REFUSE)
def normalised_over_tokens(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z = z / z.norm(dim=1, keepdim=True)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(REFUSE, seldom=True)
def centred_over_batch(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(z - z.mean((0, 1)), ids[:, 1:]), mask, adv)


@shape(REFUSE)
def smoothed_over_tokens(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight)
    z = 0.5 * (z[:, :-1] + z[:, 1:])
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(REFUSE)
def rolled_over_tokens(hidden, weight, mask):
    p = head(hidden, weight).softmax(-1)
    return _mean((p * p.roll(1, 1)).sum(-1), mask[:, 1:])


@shape(REFUSE)
def flipped_over_batch(hidden, weight, mask):
    p = head(hidden, weight).softmax(-1)
    return _mean((p * p.flip(0)).sum(-1), mask[:, 1:])


@shape(REFUSE)
def sorted_over_tokens(hidden, weight, mask):
    z = head(hidden, weight).sort(1).values
    return _mean(z.logsumexp(-1), mask[:, 1:])


@shape(REFUSE)
def cumsum_over_tokens(hidden, weight, ids, mask, adv):
    return _pg(_logp(head(hidden, weight).cumsum(1), ids[:, 1:]), mask, adv)


@shape(REFUSE)
def entropy_of_the_mean_distribution(hidden, weight):
    p = head(hidden, weight).softmax(-1).mean((0, 1))
    return (p * p.log()).sum()


@shape(REFUSE)
def gram_matrix(hidden, weight):
    p = head(hidden, weight).softmax(-1)
    return (p @ p.transpose(1, 2)).square().mean()


@shape(REFUSE)
def max_over_everything(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(z - z.max(), ids[:, 1:]), mask, adv)


@shape(REFUSE, seldom=True)
def tokens_added_in_place(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight).clone()
    z[:, 1:] += z[:, :-1].clone()
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(REFUSE)
def guidance_between_halves_of_the_batch(hidden, weight, ids, mask):
    cond, uncond = head(hidden, weight).chunk(2)
    n = cond.size(0)
    return -_mean(_logp(uncond + 2.0 * (cond - uncond), ids[:n, 1:]), mask[:n, 1:])


@shape(REFUSE)
def convolved_over_tokens(hidden, weight, ids, mask, adv):
    z = F.avg_pool1d(F.linear(hidden, weight).transpose(1, 2), 2, 1).transpose(1, 2)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def soft_embedding_into_the_head(hidden, weight, ids, mask, adv):
    p = F.linear(hidden, weight).softmax(-1)
    return _pg(_logp(head(p @ weight, weight), ids[:, 1:]), mask, adv)


# ---------------------------------------------------------------- either, as long as it is right
@shape(APPLY, seldom=True)
def top_k_ids_embedded(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    near = F.embedding(z.topk(3, -1).indices, weight).mean(2)
    return _pg(_logp(z, ids[:, 1:]), mask, adv) + (near * hidden[:, :-1]).sum(-1).mean()


@shape(APPLY, seldom=True)
def greedy_ids_fed_to_the_head_again(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    again = F.linear(F.embedding(z.argmax(-1), weight), weight)
    return _pg(_logp(again, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def layer_norm_over_vocab(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(F.layer_norm(z, z.shape[-1:]), ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def logits_where_rows_differ(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z = torch.where(mask[:, 1:, None] > 0, z, torch.zeros_like(z))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(EITHER, seldom=True)
def padded_with_a_row(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z = torch.cat([z, torch.zeros_like(z[:, :1])], 1)
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def padded_column(hidden, weight, ids, mask, adv):
    z = F.pad(head(hidden, weight), (0, 3), value=-1e9)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def stacked_sequences(hidden, weight, ids, mask, adv):
    z = torch.stack([F.linear(h, weight) for h in hidden])
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY)
def new_tensor_from_logits(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    return _pg(_logp(z + z.new_full(z.shape, 0.5), ids[:, 1:]), mask, adv)


@shape(EITHER)
def one_sided_broadcast(hidden, weight, ids):
    z = head(hidden, weight)[:, :1].log_softmax(-1)
    return -z.expand(-1, ids.size(1), -1).gather(-1, ids[..., None]).mean()


@shape(EITHER)
def shorter_index_than_rows(hidden, weight, ids):
    z = F.linear(hidden, weight).log_softmax(-1)
    return -z.gather(-1, ids[:, 1:, None]).mean()


@shape(EITHER)
def first_sequence_against_others(hidden, weight, mask):
    p = head(hidden, weight).softmax(-1)
    return _mean((p[:1] * p).sum(-1), mask[:, 1:])


# ---------------------------------------------------------------- one row of logits
def one_row(hidden, weight):
    """[1, 1, V]: one sequence of two tokens."""
    return F.linear(hidden[:1, :2], weight)[:, :-1]


@shape(APPLY, seldom=True)
def one_row_gathered(hidden, weight, ids):
    return -_logp(one_row(hidden, weight), ids[:1, 1:2]).mean()


@shape(APPLY, seldom=True)
def one_row_cross_entropy(hidden, weight, ids):
    return F.cross_entropy(one_row(hidden, weight).flatten(0, 1), ids[0, 1:2])


@shape(APPLY, seldom=True)
def one_row_advanced_index(hidden, weight, ids):
    z = one_row(hidden, weight).flatten(0, 1).log_softmax(-1)
    return -z[torch.arange(z.size(0)), ids[0, 1:2]].sum()


@shape(APPLY)
def one_row_advanced_index_of_two_dims(hidden, weight, ids):
    z = one_row(hidden, weight).log_softmax(-1)
    return -z[torch.arange(1)[:, None], torch.arange(1)[None], ids[:1, 1:2]].sum()


@shape(EITHER)  # that the mask lets the one row through is known when it runs
def one_row_masked(hidden, weight, ids, mask):
    z = one_row(hidden, weight)[mask[:1, 1:2] > -1]
    return -_logp(z, ids[:1, 1:2].flatten()).sum()


@shape(APPLY, seldom=True)
def one_row_needs_the_region(hidden, weight, ids):
    z = one_row(hidden, weight)
    top = z.topk(5, -1).values.logsumexp(-1)
    return (top - z.gather(-1, ids[:1, 1:2, None])[..., 0]).mean()


@shape(APPLY, seldom=True)
def one_row_scattered(hidden, weight, ids):
    z = one_row(hidden, weight).scatter(-1, ids[:1, :2, None][:, 1:], -3.0)
    return z.logsumexp(-1).sum()


@shape(APPLY, seldom=True)
def one_row_one_hot(hidden, weight, ids):
    z = one_row(hidden, weight).log_softmax(-1)
    return -(z * F.one_hot(ids[:1, 1:2], z.size(-1))).sum(-1).mean()


@shape(APPLY)
def one_row_greedy_hit(hidden, weight, ids):
    z = one_row(hidden, weight)
    hit = (z.argmax(-1) == ids[:1, 1:2]).float()
    return -_logp(z, ids[:1, 1:2]).sum() * (1 + hit.sum())


@shape(APPLY, seldom=True)
def one_token_of_each_sequence(hidden, weight, ids):
    z = F.linear(hidden[:, 3:4], weight)
    return -_logp(z, ids[:, 4:5]).mean() + z.topk(2, -1).values.sum()


@shape(APPLY, seldom=True)
def one_sequence(hidden, weight, ids):
    z = F.linear(hidden[:1], weight)[:, :-1]
    return -_logp(z, ids[:1, 1:]).mean() + z.topk(2, -1).values.sum()


@shape(APPLY, seldom=True)
def one_token_picked_out(hidden, weight, ids):
    z = F.linear(hidden, weight)[2, 3].log_softmax(-1)
    return -z.gather(0, ids[2, 4:5]).sum() + z.topk(3).values.sum()


# ---------------------------------------------------------------- rows that the model selects
@shape(APPLY, seldom=True)
def logits_to_keep_as_positions(hidden, weight, ids, mask, adv):
    keep = torch.arange(4, hidden.size(1) - 1)
    z = F.linear(hidden[:, keep, :], weight)
    return _pg(_logp(z, ids[:, 5:]), mask[:, 4:], adv)


@shape(APPLY, seldom=True)
def logits_to_keep_from_the_batch(hidden, weight, ids, prompt_len):
    keep = (torch.cumsum(torch.ones_like(ids[0]), 0) - 1)[prompt_len:-1]
    z = F.linear(hidden[:, keep, :], weight)
    return -_logp(z, ids[:, keep + 1]).mean()


@shape(APPLY, seldom=True)
def logits_of_listed_positions_flattened(hidden, weight, ids):
    keep = torch.tensor([2, 5, 6])
    z = F.linear(hidden[:, keep], weight).flatten(0, 1)
    return F.cross_entropy(z, ids[:, keep + 1].flatten())


# ---------------------------------------------------------------- writes in place
@shape(APPLY, seldom=True)
def temperature_in_place_on_a_slice(hidden, weight, ids, mask, adv, prompt_len):
    z = F.linear(hidden, weight)[:, prompt_len - 1 : -1]
    z /= 0.7 + 1e-7
    return _pg(_logp(z, ids[:, prompt_len:]), mask[:, prompt_len - 1 :], adv)


@shape(APPLY)
def several_writes_into_one_slice(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight)[:, :-1]
    z.div_(0.7)
    z.sub_(z.detach().amax(-1, keepdim=True))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def writes_through_two_slices(hidden, weight, ids):
    z = F.linear(hidden, weight)[1:][:, 2:-1]
    z.mul_(1.3).clamp_(-4, 4)
    return -_logp(z, ids[1:, 3:]).mean()


@shape(APPLY, seldom=True)
def write_through_a_view_of_a_slice(hidden, weight, ids):
    z = F.linear(hidden, weight)[:, 1:-1]
    z.view(z.shape).div_(0.7)
    return -_logp(z, ids[:, 2:]).mean()


@shape(APPLY, seldom=True)
def slice_assigned(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight).clone()
    z[:, :-1] = z[:, :-1] / 0.7
    return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def mask_filled_in_place_in_a_slice(hidden, weight, ids, allowed):
    z = F.linear(hidden, weight)[:, 2:]
    z.masked_fill_(~allowed[:, 2:].bool(), -1e9)
    return z.logsumexp(-1).mean()


@shape(APPLY, seldom=True)
def last_token_in_place(hidden, weight, ids):
    z = F.linear(hidden, weight)[:, -2]
    z /= 0.5
    return -_logp(z, ids[:, -1]).mean() + z.topk(2, -1).values.sum()


@shape(REFUSE)
def slice_written_and_all_read(hidden, weight, ids):
    z = F.linear(hidden, weight)
    z[:, :3] /= 0.5
    return -_logp(z[:, :-1], ids[:, 1:]).mean()


@shape(APPLY)
def banned_columns_filled(hidden, weight, ids, mask, adv, banned):
    z = head(hidden, weight).index_fill(-1, torch.tensor([3, 90, 95]), -1e9)
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def banned_columns_filled_in_place(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z.index_fill_(2, torch.tensor([90, 95]), float("-inf"))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def banned_columns_filled_with_a_tensor(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z = z.index_fill(-1, torch.tensor([90]), z.new_tensor(-50.0))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY)
def columns_added_and_copied(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    z = z.index_add(-1, torch.tensor([1, 2]), z[..., 5:7] * 0.5)
    z = z.index_copy(-1, torch.tensor([8]), torch.zeros_like(z[..., :1]))
    return _pg(_logp(z, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def tokens_filled(hidden, weight, ids):
    z = head(hidden, weight).index_fill(1, torch.tensor([2]), 0.0)
    return -_logp(z, ids[:, 1:]).mean()


# ---------------------------------------------------------------- statistics of all logits
def logged(*statistics):
    """A shape whose loss stands beside numbers that somebody logs."""

    def loss(hidden, weight, ids, mask, adv):
        z = F.linear(hidden, weight)
        with torch.no_grad():
            watched = {str(i): function(z) for i, function in enumerate(statistics)}
        return _pg(_logp(z[:, :-1], ids[:, 1:]), mask, adv), watched

    return loss


for _name, _statistics in {
    "largest": (lambda z: z.max(), lambda z: z.amax((0, 1, 2)), lambda z: z[:, :-1].max()),
    "smallest": (lambda z: z.min(), lambda z: z.amin()),
    "mean": (lambda z: z.mean(), lambda z: z.double().mean((0, 2)), lambda z: z.detach().sum()),
    "counts": (lambda z: (z > 1).double().mean(), lambda z: (z > 1).sum()),
    "bad_values": (lambda z: z.isnan().any(), lambda z: z.isfinite().all()),
    "norms": (lambda z: z.norm(), torch.linalg.vector_norm, lambda z: z.abs().max()),
    "log_sum_exp": (lambda z: z.logsumexp((0, 1, 2)), lambda z: z.square().mean().sqrt()),
    "spread": (lambda z: z.std(), lambda z: z.var((0, 1, 2)), lambda z: z.var(unbiased=False)),
    "of_probabilities": (lambda z: z.softmax(-1).max(), lambda z: z.log_softmax(-1).mean()),
}.items():
    _loss = logged(*_statistics)
    _loss.__name__ = f"logged_{_name}"
    shape(APPLY)(_loss)


@shape(APPLY, seldom=True)
def statistics_that_are_trained(hidden, weight, ids):
    z = head(hidden, weight)
    return -_logp(z, ids[:, 1:]).mean() + 1e-2 * z.square().mean() + z.norm() + z.std()


# ---------------------------------------------------------------- copies outside of the logits
@shape(APPLY, seldom=True)
def written_behind_the_first_token(hidden, weight, ids, mask, adv):
    out = torch.zeros_like(mask)
    out[:, 1:] = _logp(head(hidden, weight), ids[:, 1:])
    return _pg(out[:, 1:], mask, adv) + out.sum()


@shape(APPLY, seldom=True)
def written_row_by_row(hidden, weight, ids):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    out = lp.new_zeros(lp.size(0))
    for i in range(lp.size(0)):
        out[i] = lp[i].mean()
    return -out.sum()


@shape(APPLY, seldom=True)
def copied_into_a_buffer(hidden, weight, ids, mask, adv):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    out = torch.empty_like(lp)
    out.copy_(lp)
    return _pg(out, mask, adv)


@shape(APPLY)
def copied_with_a_cast(hidden, weight, ids, mask, adv):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    out = torch.zeros(lp.shape, dtype=torch.float32)
    out[:] = lp
    return _pg(out, mask, adv)


@shape(APPLY)
def copied_with_a_broadcast(hidden, weight, ids, mask):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    out = torch.zeros_like(lp)
    out[:, 2:] = lp.mean(1, keepdim=True)
    out[0] = lp.sum()
    return -(out * mask[:, 1:]).sum()


@shape(APPLY)
def copied_where_masked(hidden, weight, ids, mask):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    out = torch.zeros_like(lp)
    where = mask[:, 1:] > 0
    out[where] = lp[where]
    out[0, :3] += lp[0, :3]
    return -out.sum()


@shape(APPLY, seldom=True)
def copied_over_trained_values(hidden, weight, ids, value_w):
    lp = _logp(head(hidden, weight), ids[:, 1:])
    values = (hidden @ value_w)[:, :-1].clone()
    values[:, ::2] = lp[:, ::2]
    values[-1].copy_(lp[0])
    return values.square().mean()


@shape(APPLY, seldom=True)
def extremes_read_as_numbers(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    scale = 1 / (z.max().item() - z.min().item())
    return _pg(_logp(z, ids[:, 1:]), mask, adv) * scale


# ---------------------------------------------------------------- shifted by rows of zeros
@shape(APPLY, seldom=True)
def zeros_ahead_of_the_logits(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight)
    first = torch.zeros(z.size(0), 1, z.size(2), dtype=z.dtype)
    logp = _logp(torch.cat([first, z[:, :-1]], dim=1) / 0.7, ids)
    return _pg(logp[:, 1:], mask, adv)


@shape(APPLY)
def zeros_ahead_and_an_entropy(hidden, weight, ids, mask):
    z = F.linear(hidden, weight) * 2
    z = torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1)
    p = torch.softmax(z, -1)
    entropy = torch.logsumexp(z, -1) - (p * z).sum(-1)
    return ((_logp(z, ids) + 0.1 * entropy) * mask).sum()


@shape(APPLY)
def wider_zeros_ahead_of_the_logits(hidden, weight, ids):
    z = F.linear(hidden, weight).float()
    first = torch.zeros(z.size(0), 1, z.size(2), dtype=torch.float64)
    return _logp(torch.cat([first, z[:, :-1]], dim=1), ids)[:, 1:].sum()


@shape(APPLY)
def padded_behind_the_last_token(hidden, weight, ids):
    z = F.pad(F.linear(hidden, weight)[:, 1:], (0, 0, 0, 1))
    return -z.topk(3, -1)[0].log_softmax(-1)[..., 0].mean()


@shape(APPLY)
def zeros_ahead_of_logits_with_a_bias(hidden, weight, bias, ids):
    z = F.linear(hidden, weight, bias)
    return _logp(torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1), ids).sum()


@shape(APPLY, seldom=True)
def ones_ahead_of_the_logits(hidden, weight, ids):
    z = F.linear(hidden, weight)
    return _logp(torch.cat([torch.ones_like(z[:, :1]), z[:, :-1]], dim=1), ids).sum()


@shape(REFUSE)
def zeros_ahead_of_logits_at_each_rows_temperature(hidden, weight, ids, temp_vec):
    z = F.linear(hidden, weight) / temp_vec[:, None, None]  # a row of zeros would be 0 / 0
    return _logp(torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1), ids).sum()


# Before torch 2.13, torch.quantile takes no size that varies.
@shape(APPLY if torch.__version__ >= "2.13" else REFUSE)
def mask_from_a_quantile_of_entropies(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    lp = _logp(z, ids[:, 1:])
    with torch.no_grad():
        entropy = Categorical(logits=z).entropy()
        keep = entropy >= torch.quantile(entropy.flatten(), 0.8)
    return _pg(lp, mask * F.pad(keep, (1, 0)), adv)


# ---------------------------------------------------------------- a vocabulary for some tokens
@shape(APPLY, seldom=True)
def bias_of_each_sequence(hidden, weight, bias, ids, mask, adv):
    own = adv[:, None, None] * bias  # [B, 1, V], trained
    return _pg(_logp(head(hidden, weight) + own, ids[:, 1:]), mask, adv)


@shape(APPLY)
def words_that_each_sequence_may_use(hidden, weight, ids, allowed):
    may = allowed[:, 0] | F.one_hot(ids, allowed.size(-1)).bool().any(1)
    return -_logp(head(hidden, weight).masked_fill(~may[:, None], -1e9), ids[:, 1:]).mean()


@shape(APPLY, seldom=True)
def bag_of_words_of_each_sequence(hidden, weight, ids, mask):
    words = F.one_hot(ids, len(weight)).sum(1).to(hidden.dtype)
    lp = head(hidden, weight).log_softmax(-1)
    return _mean(-(lp * words[:, None]).sum(-1), mask[:, 1:])


@shape(APPLY)
def prior_of_each_position(hidden, weight, soft_targets, mask):
    lp = head(hidden, weight).log_softmax(-1).transpose(1, 2)  # [B, V, T]
    prior = soft_targets[:1].log().transpose(1, 2)
    return _mean((lp.exp() * (lp - prior)).sum(1), mask[:, 1:])


# ---------------------------------------------------------------- rows that are listed twice
@shape(APPLY)
def smoothed_targets_with_padding_rows_filled(hidden, weight, ids):
    lp = head(hidden, weight).log_softmax(-1).flatten(0, 1)
    target = ids[:, 1:].flatten()
    truth = torch.full_like(lp, 0.1).detach().scatter(1, target[:, None], 0.9)
    padding = (target % 3 == 0).nonzero().squeeze(1)
    return F.kl_div(lp, truth.index_fill(0, padding, 0.0), reduction="sum")


@shape(APPLY)
def one_sequence_filled(hidden, weight, ids, value_w):
    lp = head(hidden, weight).log_softmax(-1)
    lp = lp.index_fill(0, torch.tensor([1]), value_w[0])
    return -lp.gather(-1, ids[:, 1:, None]).mean()


@shape(APPLY)
def teacher_and_student_selected_by_equal_masks(hidden, weight, soft_targets, mask):
    keep = mask[:, 1:]
    student, teacher = head(hidden, weight)[keep == 1], soft_targets[keep == 1]
    return F.kl_div(student.log_softmax(-1), teacher, reduction="batchmean")


@shape(APPLY)
def further_columns_from_a_teacher(hidden, weight, soft_targets, mask):
    z = F.pad(head(hidden, weight), (0, 3))
    teacher = F.pad(soft_targets, (0, 3), value=0.2)
    z[..., -3:] = teacher[..., -3:]
    return _mean((teacher * -z.log_softmax(-1)).sum(-1), mask[:, 1:])


@shape(APPLY, seldom=True)
def rows_picked_by_masked_select(hidden, weight, soft_targets, mask):
    keep = (mask[:, 1:, None] == 1).expand_as(soft_targets)
    student, teacher = (
        torch.masked_select(one, keep).view(-1, one.size(-1))
        for one in (head(hidden, weight), soft_targets)
    )
    return F.kl_div(student.log_softmax(-1), teacher, reduction="batchmean")


# Before torch 2.13, two masked_selects by one mask have sizes of their own.
@shape(APPLY if torch.__version__ >= "2.13" else EITHER)
def rows_picked_by_a_mask_that_broadcasts(hidden, weight, ids, mask):
    keep = mask[:, 1:] == 1
    rows = torch.masked_select(head(hidden, weight), keep[..., None]).view(-1, len(weight))
    return F.cross_entropy(rows, torch.masked_select(ids[:, 1:], keep))


@shape(APPLY)
def unlikelihood_of_earlier_tokens(hidden, weight, ids, mask):
    z, y = head(hidden, weight), ids[:, 1:]
    earlier = y[:, None].expand(-1, y.size(1), -1).tril(-1)
    unlike = torch.zeros_like(z).scatter_(-1, earlier, 1.0).scatter_(-1, y[..., None], 0.0)
    lp = z.log_softmax(-1)
    return _mean(-(torch.log1p(-lp.exp()) * unlike).sum(-1), mask[:, 1:]) - lp.mean()


@shape(APPLY, seldom=True)
def an_entry_of_each_row_written_from_the_end(hidden, weight, ids, mask, adv):
    z, y = head(hidden, weight).flatten(0, 1), ids[:, 1:].flatten()
    z = z.index_put((torch.arange(len(z)), y - len(weight)), z.new_tensor(0.5))
    lp = z.log_softmax(-1)
    return -(lp * lp.exp()).sum(-1).mean() + lp.square().mean()


@shape(APPLY)
def counts_of_earlier_tokens(hidden, weight, ids, mask, adv):
    z, y = head(hidden, weight), ids[:, :-1]
    n = y.size(1)
    ones = torch.ones(n, n, dtype=z.dtype).tril()[None].expand(len(z), -1, -1)
    counts = torch.zeros_like(z).scatter_add(-1, y[:, None].expand(-1, n, -1), ones)
    return _pg(_logp(z - 0.1 * counts, ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def logits_written_into_a_padded_batch(hidden, weight, ids, mask, adv):
    keep = mask == 1
    padded = hidden.new_zeros(*mask.shape, len(weight))
    padded[keep] = F.linear(hidden[keep], weight)
    return _pg(_logp(padded[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def logits_written_to_their_positions(hidden, weight, ids, mask, adv):
    rows = mask.flatten().nonzero()[:, 0]
    padded = hidden.new_zeros(mask.numel(), len(weight))
    padded[rows] = F.linear(hidden.flatten(0, 1)[rows], weight)
    return _pg(_logp(padded.view(*mask.shape, -1)[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY)
def logits_written_to_rows_and_columns(hidden, weight, ids, mask, adv):
    at = torch.where(mask == 1)
    padded = torch.zeros(*mask.shape, len(weight), dtype=hidden.dtype)
    padded[at] = F.linear(hidden[at], weight) / 0.7
    return _pg(_logp(padded[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def logits_with_a_bias_written_into_a_padded_batch(hidden, weight, bias, ids, mask, adv):
    keep = mask == 1
    padded = hidden.new_zeros(*mask.shape, len(weight))
    padded[keep] = F.linear(hidden[keep], weight, bias)
    return _pg(_logp(padded[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def logits_written_into_a_batch_of_ones(hidden, weight, ids, mask, adv):
    keep = mask == 1
    padded = hidden.new_ones(*mask.shape, len(weight))
    padded[keep] = F.linear(hidden[keep], weight)
    return _pg(_logp(padded[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def log_probs_of_every_token_of_a_sequence(hidden, weight, ids, mask):
    """As many entries for each token as there are tokens."""
    lp, later = head(hidden, weight).log_softmax(-1), ids[:, 1:]
    each = lp.gather(-1, later[:, None, :].expand(-1, lp.size(1), -1))
    before = torch.ones_like(each[0]).tril(-1)
    return _mean(-(torch.log1p(-each.exp()) * before).sum(-1), mask[:, 1:])


# ---------------------------------------------------------------- packed rows put side by side
LENGTHS = (11, 8, 10, 7)


def packed(hidden):
    """Four sequences, one behind the other."""
    return torch.cat([row[:n] for row, n in zip(hidden, LENGTHS, strict=True)])


@shape(APPLY, seldom=True)
def ranges_of_packed_logits_written_into_a_batch(hidden, weight, ids, mask, adv):
    z, start = F.linear(packed(hidden), weight) / 0.7, 0
    out = z.new_zeros(*ids.shape, len(weight))
    for i, n in enumerate(LENGTHS):
        out[i, :n] = z[start : start + n]
        start += n
    return _pg(_logp(out[:, :-1], ids[:, 1:]), mask, adv)


# Before torch 2.13, what is copied into a slice must be known to have its length.
@shape(APPLY if torch.__version__ >= "2.13" else EITHER)
def ranges_that_data_bounds_written_into_a_batch(hidden, weight, ids, mask, adv):
    z = F.linear(packed(hidden), weight)
    out = torch.zeros(*ids.shape, len(weight), dtype=z.dtype)
    bounds = F.pad(torch.tensor(LENGTHS) + 0 * ids[:, 0], (1, 0)).cumsum(0).tolist()
    for i, (start, end) in enumerate(zip(bounds, bounds[1:])):  # noqa: B905, RUF007
        out[i, out.size(1) - (end - start) :] = z[start:end]  # padded on the left
    return _pg(_logp(out[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def log_probs_of_packed_rows_written_into_a_batch(hidden, weight, ids, mask, adv):
    lp, start = F.linear(packed(hidden), weight).log_softmax(-1), 0
    out = torch.full((*ids.shape, len(weight)), -9.0, dtype=lp.dtype)
    for i, n in enumerate(LENGTHS):
        out[i, :n] = lp[start : start + n]
        start += n
    return _pg(out[:, :-1].gather(-1, ids[:, 1:, None])[..., 0], mask, adv)


@shape(APPLY, seldom=True)
def packed_logits_by_pad_sequence(hidden, weight, ids, mask, adv):
    z = F.linear(packed(hidden), weight).split(LENGTHS)
    out = torch.nn.utils.rnn.pad_sequence(z, batch_first=True)
    return _pg(_logp(out[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def packed_logits_stacked_with_zeros_behind(hidden, weight, bias, ids, mask, adv):
    z = F.linear(packed(hidden), weight, bias).tensor_split((11, 19, 29))
    out = [torch.cat([row, row.new_zeros(11 - len(row), len(weight))]) for row in z]
    return _pg(_logp(torch.stack(out)[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY, seldom=True)
def sequences_written_in_another_order(hidden, weight, ids, mask, adv):
    z = F.linear(hidden, weight)
    out = torch.zeros_like(z)
    out[0], out[1], out[3] = z[2], z[0], z[1]
    out[1] = z[3]
    return _pg(_logp(out[:, :-1], ids[:, 1:]), mask, adv)


@shape(APPLY)
def spans_of_sequences_stacked(hidden, weight, ids):
    z, at = F.linear(hidden, weight), (1, 2, 0, 3)
    spans = torch.stack([z[i, start : start + 5] for i, start in enumerate(at)])
    targets = torch.stack([ids[i, start + 1 : start + 6] for i, start in enumerate(at)])
    return F.cross_entropy(spans.flatten(0, 1), targets.flatten())


@shape(REFUSE)
def logits_at_each_rows_temperature_written_into_a_batch(hidden, weight, ids, mask, adv):
    z = F.linear(packed(hidden), weight)
    z = (z / (1 + packed(mask)[:, None])).split(LENGTHS)  # a row of zeros could be 0 / 0
    out = torch.nn.utils.rnn.pad_sequence(z, batch_first=True)
    return _pg(_logp(out[:, :-1], ids[:, 1:]), mask, adv)


# ---------------------------------------------------------------- the user's own autograd.Function
class _ManualCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y):
        p = z.softmax(-1)
        ctx.save_for_backward(p, y)
        return -p[torch.arange(len(y)), y].log()

    @staticmethod
    def backward(ctx, grad):
        p, y = ctx.saved_tensors
        d = p.clone()
        d[torch.arange(len(y)), y] -= 1
        return d * grad[:, None], None


class _LogProbAndEntropy(torch.autograd.Function):
    """Saves what it returns, and has in-place ops in its backward, as Megatron's has."""

    @staticmethod
    def forward(ctx, z, y, temperature):
        lp = (z / temperature).log_softmax(-1)
        entropy = -(lp.exp() * lp).sum(-1)
        ctx.save_for_backward(lp, entropy, y)
        ctx.temperature = temperature
        return lp.gather(-1, y[..., None])[..., 0], entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        lp, entropy, y = ctx.saved_tensors
        p = lp.exp()
        d = (lp + entropy[..., None]).mul_(p).mul_(-grad_entropy[..., None])
        d.sub_(p * grad[..., None]).scatter_add_(-1, y[..., None], grad[..., None])
        return d / ctx.temperature, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        lp = z - z.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(lp)
        return lp

    @staticmethod
    def backward(ctx, grad):
        (lp,) = ctx.saved_tensors
        return grad - lp.exp() * grad.sum(-1, keepdim=True)


class _ClassWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y, weight):
        lp = z.log_softmax(-1)
        ctx.save_for_backward(lp, y, weight)
        return -(lp * weight).gather(-1, y[..., None])[..., 0]

    @staticmethod
    def backward(ctx, grad):
        lp, y, weight = ctx.saved_tensors
        scaled = (grad * weight[y])[..., None]
        return (lp.exp() * scaled).scatter_add(-1, y[..., None], -scaled), None, None


class _TopK(torch.autograd.Function):
    """A filter: the mask comes back too, and has no gradient."""

    @staticmethod
    def forward(ctx, z, k):
        keep = z >= z.topk(k, -1).values[..., -1:]
        ctx.save_for_backward(keep)
        ctx.mark_non_differentiable(keep)
        return z.masked_fill(~keep, -1e4), keep

    @staticmethod
    def backward(ctx, grad, _):
        (keep,) = ctx.saved_tensors
        return grad.masked_fill(~keep, 0.0), None


class _ClippedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.view_as(z)

    @staticmethod
    def backward(ctx, grad):
        return torch.where(grad.abs() > 1e-3, 1e-3 * grad.sign(), grad)


class _NormedGradient(_ClippedGradient):
    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class _NoisyLogits(_ClippedGradient):
    @staticmethod
    def forward(ctx, z):
        return z + torch.rand_like(z)


@shape(APPLY)
def function_with_one_entry_written_in_its_backward(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    lp = -_ManualCE.apply(z.flatten(0, 1), ids[:, 1:].flatten())
    return _pg(lp.view(ids.size(0), -1), mask, adv)


@shape(APPLY, seldom=True)
def function_of_two_values_beside_other_readers(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    lp, entropy = _LogProbAndEntropy.apply(z, ids[:, 1:], 0.8)
    z_loss = _mean(z.logsumexp(-1) ** 2, mask[:, 1:])
    loss = _pg(lp, mask, adv) - 0.01 * _mean(entropy, mask[:, 1:]) + 1e-3 * z_loss
    return loss, {"entropy": entropy.mean(), "hits": (z.argmax(-1) == ids[:, 1:]).double().mean()}


@shape(APPLY, seldom=True)
def function_of_each_sequence(hidden, weight, ids, mask, adv):
    rows = zip(head(hidden, weight), ids[:, 1:], strict=True)
    return _pg(torch.stack([_LogProbAndEntropy.apply(z, y, 1.0)[0] for z, y in rows]), mask, adv)


@shape(APPLY)
def function_in_a_checkpoint(hidden, weight, ids, mask, adv):
    def logp(z, y):
        return _LogProbAndEntropy.apply(z, y, 0.9)[0]

    z = head(hidden, weight)
    return _pg(checkpoint(logp, z, ids[:, 1:], use_reentrant=False), mask, adv)


@shape(APPLY, seldom=True)
def function_that_saves_what_it_returns(hidden, weight, ids, mask, adv):
    lp = _LogSoftmax.apply(head(hidden, weight))
    return _pg(lp.gather(-1, ids[:, 1:, None])[..., 0], mask, adv)


@shape(APPLY)
def function_with_weights_of_classes(hidden, weight, ids, mask, bias):
    return _mean(_ClassWeighted.apply(head(hidden, weight), ids[:, 1:], bias.detach()), mask[:, 1:])


@shape(APPLY)
def function_that_filters(hidden, weight, ids, mask, adv):
    z, keep = _TopK.apply(head(hidden, weight), 40)
    kept = _mean(keep.double().mean(-1), mask[:, 1:])
    return _pg(_logp(z, ids[:, 1:]), mask, adv), {"kept": kept}


@shape(APPLY, seldom=True)
def function_that_clips_the_gradient(hidden, weight, ids, mask, adv):
    return _pg(_logp(_ClippedGradient.apply(head(hidden, weight)), ids[:, 1:]), mask, adv)


@shape(REFUSE)
def function_whose_backward_mixes_tokens(hidden, weight, ids, mask, adv):
    return _pg(_logp(_NormedGradient.apply(head(hidden, weight)), ids[:, 1:]), mask, adv)


@shape(REFUSE)
def function_that_draws(hidden, weight, ids, mask, adv):
    torch.manual_seed(0)
    return _pg(_logp(_NoisyLogits.apply(head(hidden, weight)), ids[:, 1:]), mask, adv)


# ---------------------------------------------------------------- entries of what is no row itself
@shape(APPLY)
def given_entries_of_own_best(hidden, weight, ids, mask, adv):
    logp, best = head(hidden, weight).log_softmax(-1).topk(4)
    given = torch.linspace(-9, -1, weight.size(0), dtype=logp.dtype).expand(*ids[:, 1:].shape, -1)
    return _mean((logp.exp() * (given.contiguous().gather(-1, best) - logp)).sum(-1), mask[:, 1:])


@shape(APPLY)
def best_written_among_blanks(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    best, at = z.topk(4)
    p = torch.full_like(z, float("-inf")).scatter(-1, at, best).softmax(-1)
    return _mean((p * z.log_softmax(-1)).sum(-1), mask[:, 1:])


@shape(APPLY)
def probabilities_of_groups(hidden, weight, ids, mask, adv):
    p = head(hidden, weight).softmax(-1)
    blank, group = p.new_zeros(*p.shape[:-1], 8), torch.arange(p.size(-1)) % 8
    summed = blank.index_add(-1, group, p)
    most = blank.scatter_reduce(-1, group.expand_as(p), p, "amax")
    return _mean((summed.log() + most).mean(-1), mask[:, 1:])


@shape(APPLY)
def columns_written_over(hidden, weight, ids, mask, adv):
    z = head(hidden, weight)
    out = adv.view(-1, 1, 1).expand(z.shape).clone()
    out[..., :5] = z[..., 3:8]
    return _mean(out.logsumexp(-1), mask[:, 1:])


# ---------------------------------------------------------------- noise, and slopes of their own
@shape(APPLY)
def gumbel_softmax(hidden, weight, ids, mask, adv):
    torch.manual_seed(0)
    z = head(hidden, weight)
    noisy = z + 0.1 * torch.randn_like(z)
    drawn = F.gumbel_softmax(z, tau=0.7, hard=True)
    return _mean((drawn * noisy.log_softmax(-1)).sum(-1), mask[:, 1:])


@shape(APPLY)
def trained_slopes(hidden, weight, ids, mask, adv):
    return _pg(_logp(F.prelu(head(hidden, weight), hidden[0, 0, :1].abs()), ids[:, 1:]), mask, adv)


@shape(REFUSE)
def taken_from_all(hidden, weight, ids, mask, adv):
    logp = head(hidden, weight).log_softmax(-1)
    at = torch.arange(logp.numel() // logp.size(-1)) * logp.size(-1) + ids[:, 1:].flatten()
    return _pg(logp.take(at).view(ids.size(0), -1), mask, adv)
