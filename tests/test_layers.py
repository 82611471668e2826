"""Imports go one way; this file is the architecture diagram.

A layer may import itself and the layers on its right-hand side below; ``errors``, ``options``,
``dtypes``, ``config``, ``files``, ``scoped`` and ``distributed`` import nothing of fxrl but each
other. Doors: ``triton`` only under ``fxrl/kernels/``, ``vllm`` only in
``fxrl/engines/vllm/door.py``, private torch (``torch._dynamo``, ``torch._C``, ...) only in the
doors named below.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASE = {"errors", "options", "dtypes", "config", "scoped"}
LAYERS = {
    "errors": set(),
    "options": {"errors"},
    "dtypes": set(),
    "config": {"errors", "options"},
    "files": {"errors"},
    "scoped": set(),
    "distributed": {"errors", "dtypes"},
    "ir": BASE,
    "analysis": BASE | {"ir"},
    "ops": BASE | {"distributed", "ir"},
    "planner": BASE | {"distributed", "ir", "analysis", "ops"},
    "kernels": BASE | {"ir", "ops"},
    "passes": BASE | {"ir", "analysis", "ops"},
    "capture": BASE | {"ir", "analysis", "passes"},
    "compile": BASE | {"files", "ir", "capture", "analysis", "passes", "planner", "ops", "kernels"},
    "inspect": BASE | {"files", "ir", "capture", "planner", "ops", "compile"},
    "step": BASE | {"ir", "capture", "planner", "ops", "compile", "inspect"},
    "losses": BASE,
    "models": BASE | {"files", "ir", "ops"},
    "engines": BASE | {"ir", "kernels", "models", "ops"},
    "integrations": BASE | {"ir", "losses", "engines", "step"},
    "rl": BASE | {"files", "distributed", "ir", "ops", "losses", "models", "engines", "step"},
}
# The public API: importable by name from `fxrl` itself, so it counts as the layer that makes it.
PUBLIC = {"Config": "config", "losses": "losses", "__version__": "errors"}
TORCH_DOORS = (
    "fxrl/capture/_torch.py",
    "fxrl/capture/_dynamo/",
    "fxrl/compile/_torch.py",
    "fxrl/engines/vllm/door.py",
)
OPEN = {
    "cli",
    "doctor",
    "__init__",
    "__main__",
}  # the front end and the facade may import all


def source_files() -> list[Path]:
    """All of the package's source; ``fxrl/passes`` is read through its real folder."""
    inside = [f for f in (ROOT / "fxrl").rglob("*.py") if "passes" not in f.parts]
    return sorted(inside) + sorted((ROOT / "passes").rglob("*.py"))


def layer_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return "passes" if parts[0] == "passes" else parts[1]


def imported_modules(file: Path) -> set[str]:
    """Absolute dotted names of every import, wherever in the file it stands."""
    package = ("fxrl", *file.relative_to(ROOT).parent.parts)
    package = package[1:] if package[1:2] == ("fxrl",) else package
    names = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(parent + ([node.module] if node.module else []))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imported_layers(file: Path) -> set[str]:
    """Layers of fxrl this file imports; ``from fxrl import optimize`` is the layer ``step``."""
    tails = [n.split(".")[1] for n in imported_modules(file) if n.startswith("fxrl.")]
    known = LAYERS.keys() | OPEN
    return {tail if tail in known else PUBLIC.get(tail, "step") for tail in tails}


def show(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_only_downwards(layer):
    for file in source_files():
        if layer_of(file) == layer:
            extra = imported_layers(file) - LAYERS[layer] - {layer}
            assert not extra, f"{show(file)} imports {sorted(extra)}"


def test_no_two_layers_import_each_other():
    """The table itself: from no layer does a way lead back to it."""

    def above(layer, seen):
        for other in LAYERS[layer] - seen:
            seen.add(other)
            above(other, seen)
        return seen

    assert not [layer for layer in LAYERS if layer in above(layer, set())]


def test_every_file_is_in_a_layer():
    unknown = [show(f) for f in source_files() if layer_of(f) not in LAYERS.keys() | OPEN]
    assert not unknown, f"add to LAYERS or move: {unknown}"


def test_losses_import_nothing_of_fxrl_but_leaves():
    for file in source_files():
        if layer_of(file) == "losses":
            assert imported_layers(file) <= {"losses", "errors", "options", "dtypes"}, show(file)


def importers(package: str) -> set[str]:
    return {
        show(file)
        for file in source_files()
        if any(n == package or n.startswith(f"{package}.") for n in imported_modules(file))
    }


def test_triton_only_in_kernels():
    outside = {f for f in importers("triton") if not f.startswith("fxrl/kernels/")}
    assert not outside


def test_vllm_only_behind_its_door():
    assert importers("vllm") == {"fxrl/engines/vllm/door.py"}


def test_private_torch_only_through_its_doors():
    """``torch._x`` is private: both as an import and as an attribute spelled out in code."""
    for file in source_files():
        if show(file).startswith(TORCH_DOORS):
            continue
        private = {n for n in imported_modules(file) if is_private_torch(n)}
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and is_private_torch(name := ast.unparse(node)):
                private.add(name)
        assert not private, (
            f"{show(file)} uses {sorted(private)}; take it from one of {TORCH_DOORS}"
        )


def is_private_torch(name: str) -> bool:
    """``torch.ops.aten._softmax`` is an operator's name and ``torch.utils._pytree`` has no public
    twin; every other underscore is private."""
    if name.startswith(("torch.ops.", "torch.utils._pytree")):
        return False
    head, *rest = name.split("(")[0].split(".")  # of a call, not its arguments
    return head == "torch" and any(p.startswith("_") and not p.startswith("__") for p in rest)


def test_passes_is_the_symlink_to_the_real_folder():
    link = ROOT / "fxrl" / "passes"
    assert link.is_symlink(), "fxrl/passes must be a symlink: git config core.symlinks true"
    assert str(link.readlink()) == "../passes"
    assert link.resolve() == ROOT / "passes"


def test_passes_import_once():
    """The package refuses a second identity, which would register every pass twice."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("passes", ROOT / "passes" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="fxrl\\.passes"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    ("file", "code", "layers"),
    [
        ("fxrl/ir/a.py", "from fxrl.passes import x", {"passes"}),
        ("fxrl/ir/a.py", "def f():\n    import fxrl.rl.train", {"rl"}),
        ("fxrl/ir/a.py", "from .. import rl\nfrom . import graph", {"rl", "ir"}),
        ("fxrl/rl/a.py", "from fxrl import optimize, Config", {"step", "config"}),
        ("passes/a.py", "from . import base\nfrom .base import y", {"passes"}),
    ],
)
def test_the_reader_of_imports(tmp_path, monkeypatch, file, code, layers):
    """The judge itself: relative, nested and facade imports are all seen."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(code)
    assert imported_layers(tmp_path / file) == layers
