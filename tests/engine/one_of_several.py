"""One of the two processes of an engine: `python one_of_several.py PROCESS PORT OUT MODEL OPTIONS`.

Process 0 answers each line of its stdin with a line in OUT, a file descriptor: the tokens of all prompts, or the error
that it met, which ends it.
"""

import json
import os
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

from meshes import EDITED, GREEDY, OPTIONS, PROMPTS, SEEDED  # noqa: E402

from jaxserve import LLM, EngineDeadError, peers  # noqa: E402
from jaxserve.scheduler import layered  # noqa: E402

PARAMS = {"greedy": GREEDY, "seeded": SEEDED, "edited": EDITED}


def main(process: str, port: str, out: str, model: str, options: str) -> None:
    peers.HEARTBEAT_S, peers.SILENCE_S, peers.GRACE_S = 0.2, 4.0, 2.0
    layered.TOKENS_OF_A_GROUP = 4
    where = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": 2, "process_id": int(process)}
    sizes = {"kv_parallel_size": 2, "tensor_parallel_size": 4}
    with os.fdopen(int(out), "w") as answers, LLM(model, **(OPTIONS | sizes | where | json.loads(options))) as llm:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            try:
                outputs = llm.generate(PROMPTS, PARAMS[line.strip()], use_tqdm=False)
            except EngineDeadError as error:
                print(error, file=answers, flush=True)
                raise
            print(json.dumps([output.outputs[0].token_ids for output in outputs]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
