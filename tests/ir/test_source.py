"""Which frame of a trace is the user's."""

import os
import sysconfig

import pytest
import torch
from torch import fx

import fxrl
from fxrl.ir.source import source_of_trace, user_source

SITE = f"{sysconfig.get_paths()['purelib']}/transformers/models/qwen3/modeling_qwen3.py"
TORCH = f"{os.path.dirname(torch.__file__)}/nn/modules/linear.py"
STDLIB = f"{sysconfig.get_paths()['stdlib']}/contextlib.py"


def trace(*frames):
    return "".join(f'  File "{file}", line {line}, in f\n    x = y\n' for file, line in frames)


def test_innermost_user_frame_wins():
    frames = ("/home/me/train.py", 3), ("/home/me/loss.py", 7), (SITE, 9), (STDLIB, 1), (TORCH, 4)
    assert source_of_trace(trace(*frames)) == "/home/me/loss.py:7"


def test_only_library_frames():
    assert source_of_trace(trace((SITE, 9), (TORCH, 4))) == f"{TORCH}:4"


def test_checkout_of_a_library_is_not_the_user():
    checkout = "/home/me/src/transformers/models/qwen3/modeling_qwen3.py"
    assert source_of_trace(trace(("/home/me/loss.py", 7), (checkout, 1))) == "/home/me/loss.py:7"


FXRL = os.path.dirname(fxrl.__file__)


@pytest.mark.parametrize("inside", ["compile/step.py", "core/graph.py", "ops/region.py"])
def test_fxrl_itself_is_not_the_user(inside):
    ours = f"{FXRL}/{inside}"
    assert source_of_trace(trace(("/home/me/loss.py", 7), (ours, 107))) == "/home/me/loss.py:7"


@pytest.mark.parametrize("inside", ["losses/clipped.py", "rl/updater.py"])
def test_the_losses_of_fxrl_are_user_code(inside, monkeypatch):
    monkeypatch.chdir("/")
    frames = ("/home/me/train.py", 3), (f"{FXRL}/{inside}", 12), (f"{FXRL}/compile/step.py", 107)
    assert source_of_trace(trace(*frames)).endswith(f"fxrl/{inside}:12")


def test_relative_inside_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_of_trace(trace((str(tmp_path / "a" / "loss.py"), 7))) == "a/loss.py:7"


def test_generated_code_is_no_place():
    assert source_of_trace(trace(("/x/loss.py", 7), ("<eval_with_key>.3", 2))) == "/x/loss.py:7"
    assert source_of_trace(trace(("<string>", 2))) == ""


def test_unknown():
    node = fx.Graph().placeholder("x")
    assert user_source(node) == ""
    node.meta["stack_trace"] = None
    assert user_source(node) == ""
    node.meta["stack_trace"] = trace(("/x/loss.py", 7))
    assert user_source(node) == "/x/loss.py:7"
