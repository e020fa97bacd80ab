"""`jaxserve bench`: how fast an engine is on this machine, under the names of `vllm bench`."""

import typer

from jaxserve.cli.bench import latency, serve, throughput
from jaxserve.cli.options import require_command

app = typer.Typer(
    help="Measure an engine on this machine.",
    callback=require_command,
    invoke_without_command=True,
    rich_markup_mode=None,
)
for command in (latency.latency, throughput.throughput, serve.serve):
    app.command()(command)
