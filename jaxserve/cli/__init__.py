"""The `jaxserve` command: parses, runs, and turns a caller's mistake into one line on stderr.

Nothing here imports jax before a command needs it, so that `jaxserve --help` answers at once.
"""

import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from jaxserve.cli import batch, bench, calibrate, chat, compile, convert, evaluate, generate, info, plan, serve
from jaxserve.cli.options import require_command
from jaxserve.exceptions import EngineDeadError, JaxserveError

INTERRUPTED = 130

app = typer.Typer(
    name="jaxserve",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options at 80 columns
)
for command in (
    generate.generate, chat.chat, serve.serve, batch.batch, convert.convert, info.info, plan.plan, compile.compile,
):  # fmt: skip
    app.command()(command)
app.command("eval")(evaluate.evaluate)
app.command()(calibrate.calibrate)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxserve {importlib.metadata.version('jaxserve')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models on GPU, TPU and CPU."""
    require_command(context)


def main() -> None:
    """The console script."""
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a usual exit waits for the programs that are being compiled
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code.

    0: done; 1: the engine died, or nobody reads our output; 2: the caller's mistake; 3: `batch` has failed rows, `plan`
    or `compile` found that nothing fits; 130: Ctrl-C.

    Raises:
        Exception: whatever is neither; it is a defect of ours, and its traceback should be seen.
    """
    try:
        code = app(arguments, prog_name="jaxserve", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    except Exception as error:
        message = users_mistake(error)
        if message is None and not isinstance(error, EngineDeadError):
            raise
        print(f"error: {message or error}", file=sys.stderr)
        return 1 if message is None else 2


def users_mistake(error: Exception) -> str | None:
    """What to tell the caller in one line, or None where the caller is not to blame."""
    if hasattr(error, "format_message"):  # a usage error of the command-line parser
        message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        if message.startswith("Got unexpected extra argument") and _command_of(error) == "generate":
            message += ": give a prompt with --prompt"
    elif isinstance(error, OSError):
        message = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
    elif isinstance(error, EngineDeadError):
        return None
    elif isinstance(error, JaxserveError) or (isinstance(error, ValueError | NotImplementedError) and _ours(error)):
        message = str(error)
    else:
        return None
    return " ".join(message.split())


def _command_of(error: Exception) -> str | None:
    return getattr(getattr(error, "ctx", None), "info_name", None)


def _ours(error: Exception) -> bool:
    """True where jaxserve itself raised the error: one that comes from deeper down is a defect, not bad input."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("jaxserve")
