"""The page on Cloud TPU and its JobSet: well formed, and their command lines are ones that `jaxserve` takes."""

import re
import shlex
from pathlib import Path

import typer
import yaml

from jaxserve import cli
from jaxserve.topologies import find_topology

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tpu.md").read_text(encoding="utf-8")
JOBSET = ROOT / "examples" / "cloud_tpu_serve" / "jobset.yaml"
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", PAGE, re.MULTILINE)]
# https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm
GCLOUD_FLAGS = {"create": {"zone", "accelerator-type", "version"}, "ssh": {"zone", "worker", "command"}}


def served_with(command: list[str]) -> dict:
    """The options of a `jaxserve serve` command, which its parser takes to the last."""
    at = command.index("jaxserve")
    assert command[at + 1] == "serve"
    parser = typer.main.get_command(cli.app).commands["serve"]
    with parser.make_context("serve", command[at + 2 :]) as context:
        assert not context.args
        return context.params


def flags(command: list[str]) -> dict[str, str]:
    return dict(word[2:].partition("=")[::2] for word in command if word.startswith("--"))


def test_servers_of_the_page_use_all_chips_of_their_machine():
    (of_one_host,) = [command for command in COMMANDS if command[:2] == ["jaxserve", "serve"]]
    machines = [flags(command)["accelerator-type"] for command in COMMANDS if "create" in command and "tpus" in command]
    remote = [shlex.split(flags(command)["command"]) for command in COMMANDS if "ssh" in command]
    of_all_hosts = [command for command in remote if "jaxserve" in command]
    for machine, command in zip(machines, [of_one_host, *of_all_hosts], strict=True):
        options, topology = served_with(command), find_topology(machine)
        assert options["tensor_parallel_size"] == topology.num_devices
        assert (options["coordinator_address"] == "auto") == (topology.num_hosts > 1)


def test_gcloud_is_given_flags_that_it_has():
    of_vms = [command for command in COMMANDS if command[:4] == ["gcloud", "compute", "tpus", "tpu-vm"]]
    assert {command[4] for command in of_vms} == set(GCLOUD_FLAGS)
    for command in of_vms:
        assert set(flags(command)) <= GCLOUD_FLAGS[command[4]]


def test_the_jobset_runs_one_process_on_each_host_of_a_slice():
    jobset = yaml.safe_load(JOBSET.read_text(encoding="utf-8"))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    topology = find_topology("v6e-16")
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": topology.jax_name.partition(":")[2],
    }
    assert job["completions"] == job["parallelism"] == topology.num_hosts
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert container["resources"]["requests"]["google.com/tpu"] == chips == topology.devices_a_host
    shell, flag, script = container["command"]
    assert (shell, flag) == ("bash", "-c")
    install, serve = script.split("&&")
    assert shlex.split(install) == ["pip", "install", "jaxserve[server]", "jax[tpu]"]
    options = served_with(shlex.split(serve))
    assert options["tensor_parallel_size"] == topology.num_devices
    assert (options["coordinator_address"], options["host"]) == ("auto", "0.0.0.0")
    assert container["ports"][0]["containerPort"] == options["port"]
    names = {entry["name"] for entry in container["env"]}
    assert names == {"JAXSERVE_API_KEY", "HF_TOKEN"}
    (secret,) = [command for command in COMMANDS if command[:3] == ["kubectl", "create", "secret"]]
    keys = {entry["valueFrom"]["secretKeyRef"]["key"] for entry in container["env"]}
    assert {word.removeprefix("--from-literal=").partition("=")[0] for word in secret[5:]} == keys
