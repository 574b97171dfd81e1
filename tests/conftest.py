"""Shared by all tests: property tests never fail for being slow on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("etserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("etserve")
