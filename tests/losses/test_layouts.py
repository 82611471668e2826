"""Every loss gives the same numbers for prompts padded on the left and rows padded on the right."""

import pytest
import torch
from loss_models import LANGUAGE, VOCAB, Output, TokenValues, loss_of
from torch import nn

from fxrl import losses
from fxrl.losses.batch import model_inputs

ROWS = ((2, 5), (4, 1), (1, 3), (3, 4))  # prompt and completion tokens
PER_TOKEN = ("old_logps", "rollout_logps", "ref_logps", "returns", "values")
EVERYTHING = {
    "beta": 0.1,
    "entropy_coef": 0.01,
    "temperature": 0.7,
    "off_policy_mask_threshold": 0.1,
    "top_entropy_quantile": 0.8,
}
CASES = [(name, {}) for name in LANGUAGE]
CASES += [(name, EVERYTHING) for name in LANGUAGE if name not in ("dpo", "kto", "sft", "distill")]
CASES += [
    ("grpo", {"vllm_importance_sampling_mode": mode})
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
]
CASES += [("gspo", {"importance_sampling_level": "sequence_token"})]
CASES += [
    ("dpo", {"loss_type": "ipo"}),
    ("distill", {"beta": 0.4, "temperature": 2.0}),
    ("kto", {"loss_type": "apo_zero_unpaired"}),
    ("dr_grpo", {"max_completion_length": 9}),
]


class CausalLM(nn.Module):
    """Exact for either layout: softmax attention over real tokens at or before each place."""

    def __init__(self, hidden=6):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.score = nn.Linear(hidden, 1)
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)
        self.value_head = nn.Linear(hidden, 1)
        self.masks = []

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, output_hidden_states=False):
        self.masks.append(attention_mask)
        x = self.embed(input_ids)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = self.score(x).squeeze(-1).exp() * real
        total = (weights.unsqueeze(-1) * x).cumsum(1)
        hidden = torch.tanh(x + total / weights.cumsum(1).clamp(min=1e-30).unsqueeze(-1))
        logits = self.lm_head(hidden)[:, -logits_to_keep:]
        return Output(logits=logits, hidden_states=(x, hidden) if output_hidden_states else None)


def batches(seed, extra_right=0, per_token_advantages=False):
    """The same sequences, padded on the left and on the right."""
    g = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(1, VOCAB, (p + c,), generator=g) for p, c in ROWS]
    extras = [
        {k: torch.randn(c, generator=g, dtype=torch.float64) * 0.3 - 1 for k in PER_TOKEN}
        | {"advantages": torch.randn(c, generator=g, dtype=torch.float64)}
        for _, c in ROWS
    ]
    longest_prompt, longest = max(p for p, _ in ROWS), max(c for _, c in ROWS)
    width = max(p + c for p, c in ROWS) + extra_right
    shortest = min(p for p, _ in ROWS)
    found = []
    for left in (True, False):
        total = longest_prompt + longest if left else width
        columns = longest if left else width - shortest
        ids = torch.zeros(len(ROWS), total, dtype=torch.int64)
        batch = {
            "input_ids": ids,
            "attention_mask": torch.zeros_like(ids),
            "completion_mask": torch.zeros(len(ROWS), columns, dtype=torch.float64),
        } | {k: torch.full((len(ROWS), columns), torch.nan).double() for k in extras[0]}
        for row, (p, c) in enumerate(ROWS):
            start = longest_prompt - p if left else 0
            ids[row, start : start + p + c] = sequences[row]
            batch["attention_mask"][row, start : start + p + c] = 1
            first = 0 if left else p - shortest
            batch["completion_mask"][row, first : first + c] = 1
            for key, values in extras[row].items():
                batch[key][row, first : first + c] = values
        if not per_token_advantages:
            batch["advantages"] = torch.stack([e["advantages"][0] for e in extras])
        batch |= {"desirable": torch.tensor([1.0, 0.0, 1.0, 0.0]), "kl": torch.tensor(0.2)}
        if not left:
            batch["right_padded"] = True
        found.append(batch)
    return found


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("name", "kw"), CASES)
def test_both_layouts_give_the_same_loss_gradient_and_metrics(name, kw, per_token):
    loss_fn = loss_of(name, CausalLM, **kw)
    for seed in range(3):
        results = []
        for batch in batches(seed, extra_right=seed, per_token_advantages=per_token):
            torch.manual_seed(seed)
            model = CausalLM().double()
            loss, metrics = loss_fn(model, batch)
            loss.backward()
            results.append((loss, metrics, [p.grad for p in model.parameters()]))
            assert all((m is None) == ("right_padded" in batch) for m in model.masks)
        (loss, metrics, grads), (loss2, metrics2, grads2) = results
        assert torch.isfinite(loss)
        torch.testing.assert_close(loss2, loss, rtol=1e-12, atol=1e-14)
        assert metrics.keys() == metrics2.keys()
        for key, value in metrics.items():
            torch.testing.assert_close(metrics2[key], value, rtol=1e-12, atol=1e-14, msg=key)
        assert max(g.abs().max() for g in grads if g is not None) > 1e-6
        for a, b in zip(grads, grads2, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-14)


def test_a_value_network_of_its_own_sees_the_same_values():
    found = []
    for batch in batches(0):
        torch.manual_seed(0)
        model = CausalLM().double()
        model.value_model = TokenValues().double()
        found.append(losses.by_name("ppo")(model, batch)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_only_the_flag_takes_the_mask_away():
    left, right = batches(0)
    assert "attention_mask" in model_inputs(left)
    assert model_inputs(right).keys() == {"input_ids"}
    assert "attention_mask" in model_inputs(right | {"right_padded": False})
