"""The benchmark of the host's time still fits the engine that it drives."""

from benchmarks import host_overhead


def test_it_measures_steady_steps_of_a_real_core(monkeypatch):
    monkeypatch.setattr(host_overhead, "NUM_SEQS", 4)
    build_ms, commit_ms = host_overhead.measure(16)
    assert 0.0 < build_ms < 1000.0
    assert 0.0 < commit_ms < 1000.0
