"""Shared by all tests: property tests never fail for being slow, and nobody's own calibration changes a result."""

import os
import tempfile

from hypothesis import HealthCheck, settings

settings.register_profile("etserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("etserve")

os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="etserve-tests-")
