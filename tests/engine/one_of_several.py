"""One of the processes of an engine: `python one_of_several.py PROCESS PORT MODEL OPTIONS` prints what process 0 says.

Process 0 answers each line of its stdin with one line: the tokens of all prompts, or the error that it met.
"""

import json
import sys
import time

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

from meshes import EDITED, GREEDY, OPTIONS, PROMPTS, SEEDED  # noqa: E402

from jaxserve import LLM, peers  # noqa: E402

PARAMS = {"greedy": GREEDY, "seeded": SEEDED, "edited": EDITED}


def main(process: str, port: str, model: str, options: str) -> None:
    peers.HEARTBEAT_S, peers.SILENCE_S, peers.GRACE_S = 0.2, 3.0, 3.0
    where = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": 2, "process_id": int(process)}
    llm = LLM(model, **(OPTIONS | where | json.loads(options)))
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.monotonic()
        try:
            outputs = llm.generate(PROMPTS, PARAMS[line.strip()], use_tqdm=False)
            print(json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
        except Exception as error:
            print(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}", flush=True)
            raise SystemExit(3) from error
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
