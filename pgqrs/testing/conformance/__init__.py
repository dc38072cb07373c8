"""What every backend must do, as tests by theme, for pytest.

A backend is tested by importing the modules into a test file and providing one fixture, `harness`,
a `Harness`. The same tests run for sync and async stores; see `pgqrs.testing.portal`. Nothing here
is skipped: a backend that cannot do something fails.
"""
