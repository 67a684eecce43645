"""Settings of all tests."""

from hypothesis import settings

# A deadline would make a test fail on a busy machine, and time is measured in benchmarks, not here.
settings.register_profile("omniload", deadline=None)
settings.load_profile("omniload")
