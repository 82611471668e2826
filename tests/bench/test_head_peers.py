"""Adapters of the peers: what they cannot do, and a package that cannot be imported whole."""

import sys

import pytest
import torch

from bench.lib import head_case, head_peers


def test_unsupported_modes_say_so():
    with pytest.raises(head_peers.UnsupportedError, match="no softcap"):
        head_peers.VARIANTS["liger"].make(head_case.MODES["frozen+softcap"])
    with pytest.raises(head_peers.UnsupportedError, match="no entropy"):
        head_peers.VARIANTS["cce"].make(head_case.MODES["frozen+entropy"])


def test_verl_without_ray(tmp_path, monkeypatch):
    """A package like verl's: its ``__init__`` needs what is missing, the kernel does not."""
    kernel = tmp_path / "verl" / "utils" / "kernel"
    kernel.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("import no_such_cluster\n")
    (tmp_path / "verl" / "utils" / "__init__.py").write_text("import no_such_config\n")
    (tmp_path / "verl" / "utils" / "device.py").write_text("NAME = 'here'\n")
    (kernel / "__init__.py").write_text("")
    (kernel / "linear_cross_entropy.py").write_text(
        "from verl.utils.device import NAME\n"
        "class LinearCrossEntropy:\n"
        "    apply = staticmethod(lambda h, w, t, temperature, reduction: (t * 2, t * 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = head_peers.VARIANTS["verl"].make(head_case.MODES["frozen+entropy"])
    found = made(None, None, torch.ones(2))
    assert [value.tolist() for value in found] == [[2, 2], [3, 3]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    (kernel / "linear_cross_entropy.py").write_text("import verl.missing\n")
    with pytest.raises(ModuleNotFoundError, match=r"verl\.missing"):
        head_peers.VARIANTS["verl"].make(head_case.MODES["frozen"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
