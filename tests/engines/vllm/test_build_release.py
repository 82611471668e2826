"""What a build of the real vLLM had loaded is let go when it fails.

vLLM is to compile the model here, as it does unasked on a GPU: its modules are then in Dynamo's
list of bytecode hooks, which holds what it lists.
"""

import gc
import weakref

import pytest
import torch

from fxrl.engines.vllm import door
from fxrl.engines.vllm.build import EngineLoadError
from tests.engines.conftest import build_engine

pytestmark = pytest.mark.vllm


def watch(model):
    """References to what must be gone, by name."""
    refs = {name: weakref.ref(value) for name, value in model.named_parameters()}
    assert any("_bytecode_hook_handle" in vars(module) for module in model.modules())
    return refs


def left(refs):
    gc.collect()
    return [name for name, ref in refs.items() if ref() is not None]


def test_a_build_that_failed_holds_no_weight(checkpoint, vllm_process, monkeypatch):
    seen = {}

    def full(self, *args):
        seen.update(watch(self.model_runner.model))
        raise torch.OutOfMemoryError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(door.Worker, "determine_available_memory", full)
        with pytest.raises(EngineLoadError, match="OutOfMemoryError: made up") as kept:
            build_engine(checkpoint, enforce_eager=False)
    assert not left(seen)
    assert kept.value.__cause__ is not None
