"""Hypothesis on two busy cores: no deadline an example, and the failing example as something to paste."""

from hypothesis import HealthCheck, settings

settings.register_profile("echelon", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("echelon")
