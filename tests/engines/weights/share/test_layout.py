"""Placements from names, packing and shapes alone, on the meta device."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxrl.engines.weights.share.layout import LayoutPlanner, Placement

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def layer(name: str, *shape: int, root: nn.Module | None = None, **attributes) -> nn.Module:
    """A tree with one meta parameter of this name; ``attributes`` on the module that has it."""
    root = root or nn.Module()
    *path, leaf = name.split(".")
    owner = root
    for part in path:
        if part not in dict(owner.named_children()):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter(leaf, nn.Parameter(torch.empty(*shape, device="meta")))
    for key, value in attributes.items():
        setattr(owner, key, value)
    return root


def plan(model: nn.Module, **shapes):
    shapes = {name.replace("__", "."): torch.Size(shape) for name, shape in shapes.items()}
    own = dict(model.named_parameters(remove_duplicate=False))
    return LayoutPlanner(model, own, shapes).plan()


@given(
    heads=st.integers(1, 12),
    kv_heads=st.integers(1, 12),
    head_dim=st.sampled_from([8, 32, 80, 128]),
    hidden=st.integers(1, 64),
    bias=st.booleans(),
)
def test_parts_of_a_fused_projection(heads, kv_heads, head_dim, hidden, bias):
    """Row ranges are those of ``cat([q, k, v])``, for weights and biases, whatever the order in
    which the names come."""
    q, kv = heads * head_dim, kv_heads * head_dim
    tail = () if bias else (hidden,)
    leaf = "bias" if bias else "weight"
    model = layer(f"a.0.qkv_proj.{leaf}", q + 2 * kv, *tail, output_sizes=[q, kv, kv])
    model.packed_modules_mapping = PACKED
    names = {f"a.0.{p}_proj.{leaf}": (n, *tail) for p, n in (("v", kv), ("q", q), ("k", kv))}
    found = plan(model, **names)
    ranges = [found[f"a.0.{part}_proj.{leaf}"].placements for part in "qkv"]
    assert [(p.start, p.length) for (p,) in ranges] == [(0, q), (q, kv), (q + kv, kv)]
    assert {p.name for (p,) in ranges} == {f"a.0.qkv_proj.{leaf}"}


def test_the_mapper_may_declare_the_packing():
    """As newer vLLM does, with the parts' own ids instead of an order."""
    model = layer("lm.qkv_proj.weight", 8 + 4 + 4, 3)
    stacked = {f".{p}_proj": (".qkv_proj", p) for p in "vkq"}
    model.hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_stacked=stacked, map_name=lambda name: f"lm.{name}"
    )
    found = plan(model, **{f"{p}_proj.weight": (8 if p == "q" else 4, 3) for p in "qkv"})
    assert [found[f"{p}_proj.weight"].placements[0].start for p in "qkv"] == [0, 8, 12]


def test_an_older_mapper_with_a_private_name():
    model = layer("lm.norm.weight", 5)
    model.hf_to_vllm_mapper = SimpleNamespace(_map_name=lambda name: f"lm.{name}")
    (place,) = plan(model, norm__weight=(5,))["norm.weight"].placements
    assert (place.name, place.start, place.length) == ("lm.norm.weight", 0, 5)


def test_names_of_layers_that_lora_wraps():
    model = layer("a.o_proj.base_layer.weight", 6, 3)
    (place,) = plan(model, a__o_proj__weight=(6, 3))["a.o_proj.weight"].placements
    assert place.name == "a.o_proj.base_layer.weight"


def test_padded_vocabulary():
    model = layer("embed.weight", 384, 8, org_vocab_size=330)
    (place,) = plan(model, embed__weight=(330, 8))["embed.weight"].placements
    assert (place.start, place.length) == (0, 330)
    assert plan(model, embed__weight=(329, 8))["embed.weight"].placements == ()


def test_a_transposed_layer():
    """GPT-2 keeps [in, out]; a square one might be either, and the bytes decide."""
    model = layer("c_attn.weight", 12, 4)
    (place,) = plan(model, c_attn__weight=(4, 12))["c_attn.weight"].placements
    assert place.transposed
    weight = torch.arange(48.0).view(12, 4)
    assert place.view(weight).shape == (4, 12)
    assert place.view(weight).data_ptr() == weight.data_ptr()
    square = layer("c_proj.weight", 4, 4)
    both = plan(square, c_proj__weight=(4, 4))["c_proj.weight"].placements
    assert [p.transposed for p in both] == [False, True]


def test_a_view_shares_and_is_detached():
    weight = nn.Parameter(torch.randn(10, 3))
    view = Placement("w", 4, 3, False, "").view(weight)
    assert not view.requires_grad
    assert torch.equal(view, weight[4:7])
    assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("model", "shapes", "reason"),
    [
        (layer("x.weight", 2), {"y.weight": (2,)}, "no parameter of this name"),
        (layer("x.weight", 2, 3), {"x.weight": (2, 4)}, r"is \[2, 3\], not \[2, 4\]"),
        (layer("qkv_proj.weight", 8, 3), {"q_proj.weight": (4, 3)}, "fuses 3 parts .* 1 are known"),
        (
            layer("qkv_proj.weight", 9, 3),
            {f"{p}_proj.weight": (2, 3) for p in "qkv"},
            r"is \[9, 3\], its parts have \[2, 2, 2\] rows",
        ),
        (
            layer("qkv_proj.weight", 8, 3, output_sizes=[2, 4, 2]),
            {"q_proj.weight": (4, 3), "k_proj.weight": (2, 3), "v_proj.weight": (2, 3)},
            r"splits qkv_proj.weight into \[2, 4, 2\]",
        ),
    ],
)
def test_why_there_is_no_placement(model, shapes, reason):
    model.packed_modules_mapping = PACKED
    for proposal in plan(model, **shapes).values():
        assert proposal.placements == ()
        assert re.search(reason, proposal.reason), proposal.reason
