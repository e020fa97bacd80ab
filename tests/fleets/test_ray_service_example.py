"""examples/ray/service.py takes the arguments that `serve run service:app NAME=VALUE` gives it."""

import runpy
from pathlib import Path

import pytest

SERVICE = Path(__file__).parents[2] / "examples" / "ray" / "service.py"


@pytest.mark.parametrize(
    ("arguments", "model", "replicas"),
    [({}, "smollm2-135m", 2), ({"model": "org/model", "replicas": "3"}, "org/model", 3)],
)
def test_the_example_builds_what_it_is_told(arguments, model, replicas):
    front_end = runpy.run_path(str(SERVICE))["app"](arguments)._bound_deployment
    engine = front_end.init_args[0]._bound_deployment
    assert (front_end.name, engine.name, engine.init_args[0]) == ("front_end", "engine", model)
    assert engine.num_replicas == replicas
