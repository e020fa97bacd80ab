"""The example's own program, from its command line on, over a fake token core."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    from gated_echo import gated_echo

    import jaxserve

    AsyncLLM = jaxserve.AsyncLLM
    jaxserve.AsyncLLM = lambda **options: AsyncLLM.over(gated_echo, {"step_s": 0.001})
    folder = Path(__file__).parents[2] / "examples" / "grpc_server"
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / "server.py"), run_name="__main__")
