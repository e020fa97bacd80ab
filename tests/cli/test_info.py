import json

import pytest

from jaxserve import weights


def test_info_names_versions_and_devices(run):
    code, out, _, _ = run("info")
    assert code == 0
    assert "versions jax" in out
    assert "devices 0" in out


def test_info_knows_a_models_size_without_its_weights(run):
    code, out, _, _ = run("info", "--model", "llama-3.1-8b", "--load-format", "dummy", "--json")
    model = json.loads(out)["model"]
    assert code == 0
    assert model["num_params"] == 8_030_261_248
    assert model["weights_bytes"] == 2 * model["num_params"]
    assert model["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2


def test_info_of_an_unknown_model_is_one_line(run, tmp_path):
    code, _, err, _ = run("info", "--model", str(tmp_path))
    assert code == 2
    assert "config.json" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("given", "dtype"), [((), "auto"), (("--dtype", "bfloat16"), "bfloat16")])
def test_convert_hands_over_what_it_was_given(run, monkeypatch, tmp_path, given, dtype):
    calls = []
    monkeypatch.setattr(weights, "convert", lambda *args, **options: calls.append((args, options)) or tmp_path)
    target = tmp_path / "new"
    code, out, _, _ = run("convert", "source", str(target), *given, "--json")
    assert code == 0
    assert json.loads(out)["path"] == str(tmp_path)
    assert calls == [(("source", target), {"dtype": dtype})]
