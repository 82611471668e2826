"""Settings that all tests share."""

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine draws slowly; that says nothing about the code. Draws are the same every time.
settings.register_profile(
    "fxrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fxrl")


@pytest.fixture(autouse=True, scope="session")
def _check_every_value():
    """Every pass in every test leaves fake values that its ops give."""
    from fxrl.ir.pipeline import Pipeline

    Pipeline.check_values = True


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before a test is found in it, and nothing of it later."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
