"""The job specs of the Cloud TPU example: well formed, and their command line is one that `jaxserve batch` takes."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from jaxserve import cli

EXAMPLE = Path(__file__).parents[1] / "examples" / "cloud_tpu_batch"
# https://cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources and the flags that all commands share
GCLOUD_FLAGS = {
    "create": {"zone", "node-id", "spot", "async", "accelerator-type", "runtime-version", "metadata",
               "metadata-from-file"},
    "describe": {"zone"},
    "delete": {"zone", "force", "async", "quiet"},
    "list": {"zone", "filter"},
}  # fmt: skip
SETTINGS = {
    "JAXSERVE": "jaxserve[batch]",
    "MODEL": "org/model",
    "IN": "gs://bucket/in",
    "OUT": "gs://bucket/out",
    "NUM_SHARDS": "4",
    "JOB_COMPLETION_INDEX": "3",
}
RECORD = '#!/bin/sh\nprintf "%s\\n" "$(printf "%s\\t" "$@")" >>"$CALLS"\n'


@pytest.fixture
def job():
    return yaml.safe_load((EXAMPLE / "job.yaml").read_text())


@pytest.fixture
def tools(tmp_path):
    """Puts recording programs before all others; `tools(name, script)` -> None, `tools.calls()` -> argument lists."""

    class Tools:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}  # noqa: RUF012

        def __call__(self, name, script=""):
            (tmp_path / name).write_text(RECORD + script)
            (tmp_path / name).chmod(0o755)

        def run(self, script, *arguments, **environment):
            command = ["bash", str(EXAMPLE / script), *arguments]
            return subprocess.run(
                command, env=self.environment | environment, capture_output=True, text=True, check=False
            )

        def calls(self):
            return [line.rstrip("\t").split("\t") for line in (tmp_path / "calls").read_text().splitlines()]

    return Tools()


def assert_parses(arguments):
    """The arguments of `jaxserve` are taken by its parser, to the last."""
    assert arguments[0] == "jaxserve"
    group = typer.main.get_command(cli.app)
    command = group.commands[arguments[1]]
    with command.make_context(arguments[1], arguments[2:]) as context:
        assert not context.args
        return context.params


def test_the_job_asks_for_tpu_hosts_and_gives_each_its_shard(job):
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["NUM_SHARDS"])
    assert set(environment) == set(SETTINGS) - {"JOB_COMPLETION_INDEX"}
    assert all(isinstance(value, str) for value in environment.values())
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "1x1",
        "cloud.google.com/gke-spot": "true",
    }
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"google.com/tpu": 1}


def test_the_job_survives_preemptions(job):
    spec = job["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # what the two fields below ask for
    assert spec["backoffLimitPerIndex"] > 0
    (ignored,) = spec["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}


def test_the_job_runs_the_script_from_its_config_map(job):
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    program, script = container["command"]
    assert (program, os.path.dirname(script)) == ("bash", mount["mountPath"])
    name = os.path.basename(script)
    assert (EXAMPLE / name).exists()
    assert f"kubectl create configmap {volume['configMap']['name']} --from-file={name}" in readme()


def test_the_script_runs_a_command_that_jaxserve_takes(tools):
    tools("uvx")
    result = tools.run("run.sh", **SETTINGS)
    assert (result.returncode, result.stderr) == (0, "")
    (call,) = tools.calls()
    at = call.index("jaxserve")
    assert call[:at] == ["--python", "3.12", "--from", "jaxserve[batch]", "--with", "jax[tpu]", "--with", "gcsfs"]
    params = assert_parses(call[at:])
    assert (params["source"], params["target"], params["model"]) == ("gs://bucket/in", "gs://bucket/out", "org/model")
    assert (params["num_shards"], params["shard_index"], params["as_json"]) == (4, 3, True)


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (3, 0), (1, 1), (2, 2), (137, 137)])
def test_rows_with_errors_are_no_failure_of_the_host(tools, code, seen):
    tools("uvx", f"exit {code}\n")
    assert tools.run("run.sh", **SETTINGS).returncode == seen


def test_on_a_vm_the_settings_come_from_its_metadata(tools):
    cases = "".join(f'*/attributes/{name}) printf "%s" "{value}" ;;\n' for name, value in SETTINGS.items())
    tools("curl", f'for last; do :; done\ncase "$last" in\n{cases}*) exit 22 ;;\nesac\n')
    tools("uvx")
    assert tools.run("run.sh").returncode == 0
    call = tools.calls()[-1]
    assert assert_parses(call[call.index("jaxserve") :])["shard_index"] == 3


def test_a_setting_that_is_missing_stops_the_script(tools):
    tools("curl", "exit 22\n")
    tools("uvx")
    assert tools.run("run.sh", **{**SETTINGS, "OUT": ""}).returncode == 22
    assert not [call for call in tools.calls() if "jaxserve" in call]


def test_queued_resources_are_asked_for_once_each(tools):
    tools("gcloud", '[ "$4" != describe ] || case "$5" in *-1) exit 0 ;; *) exit 1 ;; esac\n')  # shard 1 is there
    settings = {**SETTINGS, "ZONE": "zone-a", "NUM_SHARDS": "3"}
    del settings["JOB_COMPLETION_INDEX"]
    result = tools.run("queued_resources.sh", "create", **settings)
    assert (result.returncode, result.stderr) == (0, "")
    created = [call for call in tools.calls() if call[3] == "create"]
    assert [call[4] for call in created] == ["jaxserve-batch-0", "jaxserve-batch-2"]
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in created[1][5:])
    metadata = dict(entry.split("=", 1) for entry in flags["metadata"].split(","))
    assert metadata == {**SETTINGS, "NUM_SHARDS": "3", "JOB_COMPLETION_INDEX": "2"}
    assert flags["metadata-from-file"] == f"startup-script={EXAMPLE / 'run.sh'}"
    assert (flags["accelerator-type"], flags["zone"], flags["spot"]) == ("v6e-1", "zone-a", "")


@pytest.mark.parametrize("action", ["create", "list", "delete"])
def test_gcloud_has_the_flags_that_are_used(tools, action):
    tools("gcloud", '[ "$4" != describe ] || exit 1\n')
    assert tools.run("queued_resources.sh", action, **SETTINGS, ZONE="zone-a").returncode == 0
    for call in tools.calls():
        assert call[:3] == ["compute", "tpus", "queued-resources"]
        used = {argument.removeprefix("--").split("=")[0] for argument in call[4:] if argument.startswith("--")}
        assert used <= GCLOUD_FLAGS[call[3]]


def test_without_an_action_the_script_says_what_there_is(tools):
    result = tools.run("queued_resources.sh", ZONE="zone-a")
    assert result.returncode == 2
    assert all(action in result.stderr for action in ("create", "list", "delete"))


# ------------------------------------------------------------------------------------------------- what pages show


def readme():
    return (EXAMPLE / "README.md").read_text(encoding="utf-8")


def batch_page():
    return (EXAMPLE.parents[1] / "docs" / "batch.md").read_text(encoding="utf-8")


def test_the_batch_pages_commands_and_rows_are_right(tmp_path):
    from jaxserve.batch import Row, parse_row

    commands, first_rows, answers = re.findall(r"```(?:sh|json)\n(.*?)```", batch_page(), flags=re.DOTALL)
    for line in commands.splitlines():
        assert assert_parses(shlex.split(line, comments=True))["model"] == "smollm2-135m"
    assert len(first_rows.splitlines()) == 3
    for line in first_rows.splitlines():
        assert isinstance(parse_row((0, line.encode())), Row)
    for line in answers.splitlines():
        assert list(json.loads(line)) == ["id", "custom_id", "response", "error"]


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", readme()):
        assert (EXAMPLE / target).exists(), target
