"""Batch jobs: JSONL files of prompts in, numbered part files of answers out.

How this works. `Source` (source.py) cuts the input into parts of a few hundred rows. Grain deals the parts out to the
shards of the job and reads them ahead of the engine (run.py). `rows.py` makes a request of a row, or says what is
wrong with it. A window of several parts is put in an order that shares prompts and mixes long answers with long
prompts (order.py), and goes through the engine; `answers.py` makes the output lines. As soon as all rows of a part
are done, the part is written, at once and whole (parts.py): so the parts that exist are what is done, and a run that
was killed goes on with the others.
"""

from jaxserve.batch.parts import Manifest, Parts
from jaxserve.batch.rows import BadRow, Row, parse_row
from jaxserve.batch.run import Totals, count_done, run_batch
from jaxserve.batch.source import Source, require_apart

__all__ = [
    "BadRow",
    "Manifest",
    "Parts",
    "Row",
    "Source",
    "Totals",
    "count_done",
    "parse_row",
    "require_apart",
    "run_batch",
]
