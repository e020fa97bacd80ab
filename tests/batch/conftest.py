import json

import pytest
from batch_engine import lines_in, make_engine

from jaxserve.batch import Manifest, Parts, Source, count_done, run_batch


class Job:
    """A batch job over a fast engine, in a folder of its own."""

    def __init__(self, folder, engine):
        self.engine = engine
        self.source, self.target = str(folder / "in.jsonl"), str(folder / "out")

    def give(self, rows):
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        with open(self.source, "w", encoding="utf-8") as file:
            file.write(text)

    def run(self, rows=None, *, part_rows=4, shard=0, num_shards=1, seed=0, overwrite=False, **options):
        """Runs one shard and returns its totals."""
        if rows is not None:
            self.give(rows)
        source = Source(self.source, part_rows=part_rows)
        manifest = Manifest(
            input_sha256=source.sha256,
            num_rows=source.num_rows,
            part_rows=part_rows,
            num_shards=num_shards,
            options={"seed": seed},
        )
        parts = Parts(self.target, manifest, shard=shard, overwrite=overwrite)
        totals = count_done(source, parts)
        options.setdefault("window_rows", 4096)
        run_batch(
            self.engine,
            source,
            parts,
            totals,
            model_name="demo",
            seed=seed,
            **options,
        )
        return totals

    def lines(self):
        """All output lines, in the order of the input."""
        return lines_in(self.target)


@pytest.fixture
def engine():
    return make_engine()


@pytest.fixture
def job(tmp_path, engine):
    return Job(tmp_path, engine)
