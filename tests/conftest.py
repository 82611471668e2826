"""Settings that all tests share."""

from hypothesis import HealthCheck, settings

# A loaded machine draws slowly; that says nothing about the code. Draws are the same every time.
settings.register_profile(
    "fxrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fxrl")
