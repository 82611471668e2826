"""What autograd keeps: the table of derivatives against PyTorch's own."""

import functools
import re
from pathlib import Path

import pytest
import torch

from fxrl.analysis.saved_tensors import _READS, read_later
from tests.passes.lowered import lowered

torchgen = pytest.importorskip("torchgen")
yaml = pytest.importorskip("yaml")
FORMULAS = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
#: What a formula asks of a tensor without keeping it.
ASKED = r"\.((sym_)?(sizes?|numel|strides)|scalar_type|options|dim|layout)\b"
#: Ops of the table that have no formula: they are made of others.
COMPOSITE = {"detach", "copy"}
#: Found in the yaml, but read for sizes alone, or of another kind than values.
NOT_VALUES = {"cat": {"tensors"}, "stack": {"tensors"}}


@functools.cache
def formulas():
    """``op`` and ``op.overload`` -> the clauses of the yaml as ``{argument: names it reads}``."""
    found = {}
    for entry in yaml.safe_load(FORMULAS.read_text()):
        name, signature = entry["name"].split("(", 1)
        signature = signature.rsplit(") ->", 1)[0]
        tensors = {a.split("=")[0].split()[-1] for a in signature.split(", ") if a[:6] == "Tensor"}
        clauses = {}
        for keys, formula in entry.items():
            if keys == "name" or not isinstance(formula, str):
                continue
            for key in keys.split(", "):
                words = {
                    word
                    for word in tensors | {"result"}
                    if re.search(rf"\b{word}\b(?!{ASKED})", formula)
                }
                if key in tensors:
                    clauses[key] = words - NOT_VALUES.get(name, set())
        found[name if "." in name else f"{name}.default"] = clauses
    return found


@pytest.mark.parametrize("op", sorted(op for op in _READS.keys() - COMPOSITE if "fxrl" not in op))
def test_the_table_says_what_pytorch_does(op):
    known = formulas()
    overloads = [op] if "." in op else [name for name in known if name.split(".")[0] == op]
    overloads = [name for name in overloads if name in known] or [op.split(".")[0] + ".default"]
    ours = {key: set(reads) for key, reads in _READS[op]}
    theirs = {}
    for overload in overloads:
        if overload.endswith((".Tensor", ".default", ".self", ".src", ".dim", ".correction")):
            for key, reads in known[overload].items():
                theirs.setdefault(key, set()).update(reads)
    names = theirs.keys() | {"result"}.union(*theirs.values())
    for key in theirs.keys() - {"bias"}:
        assert ours.get(key, set()) & names == theirs[key], key


def test_an_operand_is_kept_only_where_the_other_one_is_differentiated():
    def loss(x, y):
        return (x * y).exp().sum() + (y.detach() * x).sum()

    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    gm = lowered(loss, x, y)
    kept = {node.name: [v.name for v in read_later(node)] for node in gm.graph.nodes}
    first, second = (node.name for node in gm.graph.nodes if "mul" in str(node.target))
    assert len(kept[first]) == 2
    assert len(kept[second]) == 1
    (exp,) = (node.name for node in gm.graph.nodes if "exp" in str(node.target))
    assert kept[exp] == [exp]
