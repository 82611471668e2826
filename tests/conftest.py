"""Settings that all tests share."""

import atexit
import gc
import logging
import os

import pytest
from hypothesis import HealthCheck, settings

# Sums that threads share differ in their last bits from run to run, and runs are compared bit for
# bit. Read when torch is imported, here and in processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a CPU says of itself is believed: a cold cache has a compiler try it, for six seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A loaded machine draws slowly; that says nothing about the code. Draws are the same every time.
settings.register_profile(
    "fxrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fxrl")


def pytest_addoption(parser):
    parser.addoption(
        "--every-kill",
        action="store_true",
        help="kill runs at every call that writes and at 100 random moments, not at a few of each",
    )


def pytest_configure(config):
    """A GPU is for the tests that ask for one: all others, and what they start, run on the CPU."""
    if "not gpu" in config.option.markexpr or config.option.markexpr == "slow":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_sessionstart():
    gc.disable()  # while all is imported


def pytest_collection_finish():
    """What was imported stays: the collector looks at what tests make, and seldom."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000, 20, 20)
    # pytest hands its handlers to each logger that keeps its records to itself; for one of torch's
    # trace torch would print every graph and guard, which takes a twentieth of the time.
    logging.getLogger("torch.__trace").propagate = True
    # Bindings that count what is left at the end warn of it; pytest's own five looks come before.
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="module")
def _what_is_left_is_looked_at_once():
    """What a file leaves, caches above all, the collector does not look at behind every later test:
    by the end of a run that took a second for each look at everything."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _check_every_value():
    """Every pass in every test leaves fake values that its ops give."""
    from fxrl.ir.pipeline import Pipeline

    Pipeline.check_values = True


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed():
    """Dynamo times its guards once for its log, behind a flush of the CPU's caches, which costs up
    to a quarter of a small capture."""
    import torch._dynamo.guards

    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before a test is found in it, and nothing of it later."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_rank(tmp_path):
    """The process group of a process that is alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
