"""A Ray cluster of its own, on this machine, for the tests of this folder, which need the extra [ray]."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster():
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()
