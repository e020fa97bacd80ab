"""A Ray cluster of its own, on this machine, for the tests of this folder."""

import pytest

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")


@pytest.fixture(scope="session")
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()
