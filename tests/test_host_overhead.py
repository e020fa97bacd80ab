"""The benchmark of the host's time still fits the engine that it drives."""

from benchmarks import host_overhead
from jaxserve.scheduler import layered


def test_it_measures_steady_steps_of_a_real_core(monkeypatch):
    monkeypatch.setattr(host_overhead, "NUM_SEQS", 4)
    build_ms, commit_ms = host_overhead.measure(16)
    assert 0.0 < build_ms < 1000.0
    assert 0.0 < commit_ms < 1000.0


def test_it_measures_steps_of_one_group_of_layers(monkeypatch):
    monkeypatch.setattr(host_overhead, "NUM_SEQS", 4)
    monkeypatch.setattr(host_overhead, "NUM_STEPS", 60)
    monkeypatch.setattr(layered, "TOKENS_OF_A_GROUP", 2)
    build_ms, commit_ms = host_overhead.measure_layered(num_prompts=4, prompt_len=32)
    assert 0.0 < build_ms < 1000.0
    assert 0.0 < commit_ms < 1000.0
