"""Hypothesis on two busy cores: no deadline an example, few examples, and the failing one as something to paste."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "echelon", deadline=None, max_examples=50, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("echelon")
