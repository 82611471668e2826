"""The policy losses a second time: loops over tokens, Python floats, case by case.

Nothing here comes from fxrl and no tensor op computes a loss. ``live`` are the log-probs and
entropies that carry gradient, ``frozen`` the same numbers where the paper stops the gradient;
``gradients`` differentiates with respect to ``live`` by central differences.
"""

import math

STEP = 1e-6


def clip_case(ratio, advantage, low, high, delta):
    """-min(rA, clip(r)A), spelled out by the sign of A."""
    if advantage >= 0:
        return -advantage * min(ratio, high)
    capped = ratio if delta is None else min(ratio, delta)
    return -advantage * max(capped, low)


def kl_case(logp, ref, estimator):
    if estimator == "k1":
        return logp - ref
    if estimator == "k2":
        return (logp - ref) ** 2 / 2
    return math.exp(ref) / math.exp(logp) - (ref - logp) - 1


def rollout_weights(data, frozen, kw):
    """{(b, t): weight} for the importance-sampling correction."""
    mode = kw.get("vllm_importance_sampling_mode", "sequence_mask")
    high = kw.get("vllm_importance_sampling_clip_max", 3.0)
    low = kw.get("vllm_importance_sampling_clip_min")
    high, low = math.inf if high is None else high, 0.0 if low is None else low
    weights = {}
    for b, row in enumerate(data["tokens"]):
        gaps = {t: data["old"](frozen, b, t) - data["rollout"][b][t] for t in row}
        for t in row:
            ratio = math.exp(sum(gaps.values()) if mode.startswith("sequence") else gaps[t])
            inside = low <= ratio <= high
            truncated = min(max(ratio, low), high)
            kept = ratio if inside else 0.0
            weights[b, t] = truncated if mode.endswith("truncate") else kept
    return weights


def policy_terms(name, data, live, frozen, kw):
    """{(b, t): the policy's loss of one token}, before any weight."""
    low, high = 1 - kw["epsilon"], 1 + kw["epsilon_high"]
    level = kw.get("importance_sampling_level", "token")
    terms = {}
    for b, row in enumerate(data["tokens"]):
        gap = {t: live[b][t] - data["old"](frozen, b, t) for t in row}
        for t in row:
            a, logp = data["adv"][b][t], live[b][t]
            if name == "reinforce":
                terms[b, t] = -a * logp
            elif name == "cispo":
                ratio = math.exp(frozen[b][t] - data["old"](frozen, b, t))
                terms[b, t] = -min(ratio, kw["cispo_high"]) * a * logp
            elif name == "sapo":
                tau = kw["tau_pos"] if a > 0 else kw["tau_neg"]
                gate = 4 / (tau * (1 + math.exp(-tau * (math.exp(gap[t]) - 1))))
                terms[b, t] = -gate * a
            elif name == "rloo":
                mean_a = sum(data["adv"][b][u] for u in row) / len(row)
                ratio = math.exp(sum(gap.values()))
                terms[b, t] = clip_case(ratio, mean_a, low, high, None)
            elif level == "token":
                terms[b, t] = clip_case(math.exp(gap[t]), a, low, high, kw.get("delta"))
            elif level == "sequence":
                ratio = math.exp(sum(gap.values()) / len(row))
                terms[b, t] = clip_case(ratio, a, low, high, kw.get("delta"))
            else:
                still = sum(frozen[b][u] - data["old"](frozen, b, u) for u in row) / len(row)
                ratio = math.exp(still) * math.exp(logp) / math.exp(frozen[b][t])
                terms[b, t] = clip_case(ratio, a, low, high, kw.get("delta"))
    return terms


def reduce_terms(name, terms, data, kw):
    """The normalisation of each loss, by the definition of its paper."""
    rows = [[terms[b, t] for t in row] for b, row in enumerate(data["tokens"])]
    num_rows, num_tokens = len(rows), sum(len(row) for row in rows)
    total = sum(sum(row) for row in rows)
    if name in ("grpo", "gspo", "sapo", "rloo"):
        return sum(sum(row) / len(row) for row in rows if row) / num_rows
    if name in ("reinforce", "luspo"):
        return total / num_rows
    if name == "dr_grpo":
        return total / (num_rows * kw["max_completion_length"])
    if name in ("dapo", "cispo") and "num_items" in data:
        return total / data["num_items"]
    return total / num_tokens


def uncertain(terms, frozen_entropy, kw):
    """The tokens of highest entropy."""
    place = (1 - kw.get("top_entropy_quantile", 1.0)) * (len(terms) - 1)
    ordered = sorted(frozen_entropy[b][t] for b, t in terms)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    cut = below + (above - below) * (place - math.floor(place))
    return [(b, t) for b, t in terms if frozen_entropy[b][t] >= cut]


def drop_terms(terms, data, frozen, frozen_entropy, kw):
    """Set to 0 what is too far off-policy or not uncertain enough."""
    if (threshold := kw.get("off_policy_mask_threshold")) is not None:
        for b, row in enumerate(data["tokens"]):
            drift = sum(data["rollout"][b][t] - frozen[b][t] for t in row) / max(len(row), 1)
            for t in row:
                if data["adv"][b][t] < 0 and drift > threshold:
                    terms[b, t] = 0.0
    kept = uncertain(terms, frozen_entropy, kw)
    for key in terms.keys() - kept:
        terms[key] = 0.0
    return kept


def loss(name, data, live, live_entropy, frozen, frozen_entropy, kw):
    """The whole loss: weighted policy term, KL, entropy bonus."""
    terms = policy_terms(name, data, live, frozen, kw)
    if data.get("rollout") and kw.get("vllm_importance_sampling_correction", True):
        for key, weight in rollout_weights(data, frozen, kw).items():
            terms[key] *= weight
    kept = drop_terms(terms, data, frozen, frozen_entropy, kw)
    for b, t in terms:
        if beta := kw.get("beta", 0.0):
            kl = kl_case(live[b][t], data["ref"][b][t], kw.get("kl_estimator", "k3"))
            if kw.get("use_bias_correction_kl", True):
                kl *= math.exp(live[b][t] - data["old"](frozen, b, t))
            terms[b, t] += beta * kl
    bonus = sum(live_entropy[b][t] for b, t in kept) / len(kept)
    return reduce_terms(name, terms, data, kw) - kw.get("entropy_coef", 0.0) * bonus


def gradients(name, data, logps, entropy, kw):
    """d loss / d logp and d loss / d entropy of every token, by central differences."""

    def derivative(which, b, t):
        values = []
        for step in (STEP, -STEP):
            live = [[list(row) for row in table] for table in (logps, entropy)]
            live[which][b][t] += step
            values.append(loss(name, data, *live, logps, entropy, kw))
        return (values[0] - values[1]) / (2 * STEP)

    shape = [(b, t) for b, row in enumerate(logps) for t in range(len(row))]
    return [{(b, t): derivative(which, b, t) for b, t in shape} for which in (0, 1)]
