"""Toy models and random batches for the tests of the losses."""

from dataclasses import dataclass

import torch
from torch import nn

from fxrl import losses

VOCAB = 7
LANGUAGE = sorted(losses.FACTORIES.keys() - {"reward_model"})
"""Losses of models that give each token's distribution."""


@dataclass
class Output:
    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


class FreeLogits(nn.Module):
    """A 'model' whose logits [B, T, V] are its parameter, so that gradients are taken by hand."""

    def __init__(self, logits, honours=True):
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.honours = honours
        self.kept = None

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0):
        self.kept = logits_to_keep
        keep = logits_to_keep if self.honours else 0
        return Output(logits=self.logits[:, -keep:] if keep else self.logits)


class ToyLM(nn.Module):
    """A causal model with the forward of Hugging Face's; ``hidden`` is a running mean."""

    def __init__(self, vocab=VOCAB, hidden=6, value_head=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        if value_head:
            self.value_head = nn.Linear(hidden, 1)

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, output_hidden_states=False):
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).unsqueeze(-1)
        hidden = torch.tanh(self.mix(x.cumsum(1) / steps))
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        states = (x, hidden) if output_hidden_states else None
        return Output(logits=logits, hidden_states=states)


def loss_of(name, teacher=ToyLM, **kw):
    """``losses.by_name``; one that compares with a teacher gets one."""
    if name == "distill":
        with torch.random.fork_rng():
            torch.manual_seed(5)
            kw["teacher"] = teacher().double()
    return losses.by_name(name, **kw)


class TokenValues(nn.Module):
    """A value network of its own: ``.logits`` is [B, T, 1]."""

    def __init__(self, vocab=VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, 1)

    def forward(self, input_ids, attention_mask=None):
        return Output(logits=self.embed(input_ids))


def random_batch(seed=0, batch=3, prompt=3, completion=4, spread=0.3, dtype=torch.float64):
    """A batch with everything a loss may read, and the logits of its tokens.

    ``old``, ``rollout`` and ``ref`` log-probs are the logits' own plus noise of ``spread``.
    """
    g = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype)

    length = prompt + completion
    ids = torch.randint(0, VOCAB, (batch, length), generator=g)
    logits = noise(batch, length, VOCAB)
    mask = torch.ones(batch, completion)
    for row in range(1, batch):
        mask[row, completion - row % completion :] = 0
    shifted = logits[:, prompt - 1 : -1].log_softmax(-1)
    logps = shifted.gather(-1, ids[:, prompt:, None]).squeeze(-1)
    items = {
        "input_ids": ids,
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": noise(batch),
        "old_logps": logps + spread * noise(batch, completion),
        "rollout_logps": logps + spread * noise(batch, completion),
        "ref_logps": logps + spread * noise(batch, completion),
        "returns": noise(batch, completion),
        "values": noise(batch, completion),
        "desirable": torch.arange(batch) % 2,
        "kl": torch.tensor(0.3, dtype=dtype),
    }
    return items, logits
