"""Small models of repeated layers: what a pass over layers meets, in a few milliseconds."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxrl.passes.outline_layers import OutlineLayers
from tests.passes.lowered import lowered


class Block(nn.Module):
    """Norm, attention, residual, MLP, residual."""

    def __init__(self, width=8, heads=2, dropout=0.0, scale=1.0):
        super().__init__()
        self.heads, self.scale = heads, scale
        self.norm = nn.Parameter(torch.rand(width) + 0.5)
        self.qkv = nn.ModuleDict({n: nn.Linear(width, width, bias=False) for n in "qkv"})
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        rows, length, width = x.shape
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm

        def heads(name):
            flat = self.qkv[name](normed)
            return flat.view(rows, length, self.heads, width // self.heads).transpose(1, 2)

        attended = F.scaled_dot_product_attention(
            heads("q"), heads("k"), heads("v"), is_causal=True
        )
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(x))

    def mlp(self, x):
        return self.down(F.silu(self.up(x)) * self.scale)


class GatedBlock(Block):
    """With a gated MLP whose projections have adapters, as LoRA adds them."""

    def __init__(self, width=8, heads=2, wide=20, **options):
        super().__init__(width, heads, **options)
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)
        pairs = {"gate": (width, wide), "up": (width, wide), "down": (wide, width)}
        self.a = nn.ModuleDict({n: nn.Linear(i, 2, bias=False) for n, (i, _) in pairs.items()})
        self.b = nn.ModuleDict({n: nn.Linear(2, o, bias=False) for n, (_, o) in pairs.items()})
        for name in pairs:
            getattr(self, name).requires_grad_(False)

    def mlp(self, x):
        wide = F.silu(self.adapted("gate", x)) * self.adapted("up", x) * self.scale
        return self.adapted("down", wide)

    def adapted(self, name, x):
        return getattr(self, name)(x) + 2.0 * self.b[name](self.a[name](x))


class Stack(nn.Module):
    """Embedding, blocks (each checkpointed, or those that are told), a small head."""

    def __init__(self, blocks, *, width=8, vocab=11, checkpointed=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 3)
        every = isinstance(checkpointed, bool)
        self.checkpointed = [checkpointed] * len(blocks) if every else checkpointed

    def forward(self, ids):
        x = self.embed(ids)
        for block, again in zip(self.blocks, self.checkpointed, strict=True):
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(x)


def make_stack(layers=3, *, block=Block, width=8, seed=0, checkpointed=False, **options):
    torch.manual_seed(seed)
    blocks = [block(width, **options) for _ in range(layers)]
    return Stack(blocks, width=width, checkpointed=checkpointed).double()


def ids_batch(rows=2, length=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, 11, (rows, length), generator=generator)}


def square_loss(model, batch):
    return model(batch["ids"]).square().mean()


def outlined(layers=2, **options):
    """The lowered graph of a stack's loss, its layers outlined."""
    model = make_stack(layers, **options)
    gm = lowered(lambda b: square_loss(model, b), ids_batch())
    OutlineLayers().run(gm)
    return gm
