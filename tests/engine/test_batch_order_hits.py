"""The order of a batch job is worth its name: prompts find in the prefix cache what others like them left there."""

import json
import random

import pytest

from jaxserve.batch import Manifest, Parts, Source, count_done, run, run_batch

NUM_PREFIXES, ROWS_EACH, PREFIX_LEN = 16, 8, 64


def cached_tokens(engine, source, target):
    rows = Source(str(source), part_rows=32)
    manifest = Manifest(input_sha256=rows.sha256, num_rows=rows.num_rows, part_rows=32, num_shards=1, options={})
    parts = Parts(str(target), manifest, shard=0)
    totals = count_done(rows, parts)
    run_batch(engine, rows, parts, totals, model_name="tiny", window_rows=4096)
    choices = [json.loads(line)["response"]["body"]["choices"] for part in sorted(target.glob("part-*"))
               for line in part.read_text().splitlines()]  # fmt: skip
    return totals.cached_prompt_tokens, choices


@pytest.mark.full
def test_prefixes_that_come_interleaved_are_found_again(make_llm, tmp_path, monkeypatch):
    draw = random.Random(0)
    prefixes = [[draw.randrange(3, 300) for _ in range(PREFIX_LEN)] for _ in range(NUM_PREFIXES)]
    prompts = [prefix + [draw.randrange(3, 300) for _ in range(6)] for _ in range(ROWS_EACH) for prefix in prefixes]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": p, "max_tokens": 4, "temperature": 0}) + "\n" for p in prompts))
    engine = make_llm(num_pages=1 + 12 * 8).llm_engine  # room for twelve of the prefixes
    grouped, answers = cached_tokens(engine, source, tmp_path / "grouped")
    engine.reset_prefix_cache()
    monkeypatch.setattr(run, "prefix_order", lambda prompts, decode_lens: list(range(len(prompts))))
    as_given, same_answers = cached_tokens(engine, source, tmp_path / "as-given")
    most = (ROWS_EACH - 1) * PREFIX_LEN * NUM_PREFIXES
    assert grouped > 0.5 * most
    assert as_given < 0.1 * most
    assert answers == same_answers
