"""Step programs compile for accelerators that are not here, and hide no copy of the weights or the KV cache.

The temporary memory of a compiled program is the cheapest detector of such a copy: arguments are donated or read in
place, so what is left is activations.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "ahead_of_time.py"


COMPILERS = Path(sys.prefix) / "ahead-of-time"  # scripts/check installs them there, apart from jax


def compiled_for(platform: str) -> dict:
    command = [sys.executable, str(PROGRAM), platform]
    environment = {**os.environ, "PYTHONPATH": str(COMPILERS)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def needs(package: str) -> pytest.MarkDecorator:
    found = (COMPILERS / package).is_dir()
    return pytest.mark.skipif(not found, reason=f"{package} is not in {COMPILERS}; scripts/check puts it there")


@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param("tpu", marks=needs("libtpu")),
        pytest.param("cuda", marks=[pytest.mark.full, needs("jax_cuda13_plugin")]),
    ],
)
def test_step_programs_copy_neither_the_weights_nor_the_cache(platform):
    found = compiled_for(platform)
    for name, program in found["programs"].items():
        assert program["alias_bytes"] >= found["cache_bytes"], f"{name}: the cache is not donated"
        assert program["temp_bytes"] < found["weights_bytes"] / 2, name
        assert program["temp_bytes"] < found["cache_bytes"] / 8, name
