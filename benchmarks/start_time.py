"""From `jaxserve generate` to the first character of its answer, in a new process each time, on a warm compile cache.

python -m benchmarks.start_time
"""

import statistics
import subprocess
import sys
import time

from benchmarks._report import Row, report

NUM_RUNS, TARGET_S = 5, 6.0
COMMAND = [
    *(sys.executable, "-c", "from jaxserve import cli; cli.main()", "generate"),
    *("--model", "smollm2-135m", "--chat", "--prompt", "Why is the sky blue?"),
    *("--max-tokens", "16", "--temperature", "0"),
]


def first_character_s() -> float:
    """Seconds from the start of the process to the first byte on its stdout."""
    began = time.perf_counter()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "no answer came"
        elapsed = time.perf_counter() - began
        process.stdout.read()
    assert process.returncode == 0
    return elapsed


def main() -> None:
    first_character_s()  # fills the compile cache
    times = [first_character_s() for _ in range(NUM_RUNS)]
    name = f"start to first token, median of {NUM_RUNS}"
    report([Row(name=name, value=statistics.median(times), unit="s", target=TARGET_S, lower_is_better=True)])


if __name__ == "__main__":
    main()
