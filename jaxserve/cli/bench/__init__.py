"""`jaxserve bench`: how fast an engine is on this machine, under the names of `vllm bench`."""

import typer

from jaxserve.cli.bench import latency, serve, throughput

app = typer.Typer(help="Measure an engine on this machine.", no_args_is_help=True)
for command in (latency.latency, throughput.throughput, serve.serve):
    app.command()(command)
