"""Implements `penstock launch`, which starts a coding agent or similar program with Penstock as its server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Exit, Option, Rest, UsageError
from penstock.cli.terminal import note
from penstock.config import DEFAULTS
from penstock.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"  # default of `penstock serve`
KEY = "PENSTOCK_API_KEY"  # environment variable with the key of a server
NO_KEY = "penstock"  # sent by programs that insist on a key
STARTING_SECONDS = 600.0  # a large model takes minutes to load
LOOKING_SECONDS = 5.0


class AgentServer(NamedTuple):
    """Describes the server for a program."""

    url: str
    model: str
    context: int  # tokens
    key: str


class AgentStart(NamedTuple):
    """Describes a program's start: arguments before the user's, and environment variables."""

    arguments: list[str]
    environment: dict[str, str]


class AgentProgram(NamedTuple):
    command: str
    install: str
    configure: Callable[[AgentServer], AgentStart]


def _claude(target: AgentServer) -> AgentStart:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    environment = {"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.key}
    environment |= dict.fromkeys(models, target.model) | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return AgentStart([], environment)


def _codex(target: AgentServer) -> AgentStart:
    provider = {"name": "Penstock", "base_url": f"{target.url}/v1", "wire_api": "responses", "env_key": KEY}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = [
        f"model={json.dumps(target.model)}",  # as a setting, so that the user's own -m has precedence
        f"model_context_window={target.context}",
        "model_provider=penstock",
        f"model_providers.penstock={{{table}}}",
    ]
    return AgentStart([word for setting in settings for word in ("-c", setting)], {KEY: target.key})


def _opencode(target: AgentServer) -> AgentStart:
    limits = {"context": target.context, "output": target.context // 2}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Penstock",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model, "limit": limits}},
    }
    name = f"penstock/{target.model}"
    config = {"provider": {"penstock": provider}, "model": name, "small_model": name}
    return AgentStart([], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(target: AgentServer) -> AgentStart:
    environment = {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key}
    return AgentStart(["--model", f"openai/{target.model}"], environment)


PROGRAMS = {
    "claude": AgentProgram("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": AgentProgram("codex", "npm install -g @openai/codex", _codex),
    "opencode": AgentProgram("opencode", "npm install -g opencode-ai", _opencode),
    "aider": AgentProgram("aider", "pip install aider-chat", _aider),
}

ProgramName = Annotated[str, Argument(metavar="PROGRAM", help=f"One of {', '.join(PROGRAMS)}.")]
Arguments = Annotated[list[str], Rest(metavar="ARGUMENT ...", help="Arguments for the program.")]
ModelOption = Annotated[str, Option(help="Model to serve if no server runs.")]
Url = Annotated[str, Option(help="Server to use. Default: the one on port 8000, or else a new one.")]
PrintOnly = Annotated[
    bool, Option(name="--print", help="Print the environment and the command without starting anything.")
]


def launch(
    program: ProgramName,
    model: ModelOption = options.DEFAULT_MODEL,
    url: Url = "",
    print_only: PrintOnly = False,
    arguments: Arguments = [],  # noqa: B006
    *,
    engine: options.EngineSettings,
) -> None:
    """Start a coding agent that uses this engine: claude, codex, opencode or aider.

      penstock launch claude
      penstock launch codex --model ./model.gguf --max-len 32768 -- exec "Explain this repository."
      penstock launch aider --url http://192.168.1.5:8000 -- notes.txt
      penstock launch claude --print

    A running server on port 8000 is used, or else one is started with --model and the engine options and ends with the
    program. PENSTOCK_API_KEY is the key for a server that needs one. Agents send long prompts: 30,000 tokens is common.
    """
    if program not in PROGRAMS:
        raise UsageError(f"PROGRAM is one of {', '.join(PROGRAMS)}; got {program!r}")
    known = PROGRAMS[program]
    if not print_only and shutil.which(known.command) is None:
        raise ConfigError(f"{known.command} is not installed: run `{known.install}`, then this again")
    address = url.rstrip("/") or DEFAULT_URL
    if (target := _find(address)) is None and (url or print_only):
        raise ConfigError(f"no server answers at {address}: start one with `penstock serve`, or give another --url")
    if target is not None:
        _replace_process(known, known.configure(target), arguments, print_only)
        return
    with _serving(model, engine) as started:
        raise Exit(_run(known, known.configure(started), arguments))


def _find(url: str) -> AgentServer | None:
    """Describes the server at an address; None without a server."""
    import urllib.error  # slow to import, and --help does not need it

    try:
        models = _get(url, "/v1/models")
        running = _get(url, "/api/ps")["models"][0]
        return AgentServer(url, models["data"][0]["id"], running["context_length"], os.environ.get(KEY) or NO_KEY)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(f"the server at {url} needs an API key: set {KEY} to it") from error
        raise ConfigError(f"the server at {url} is not Penstock's: it answers {error}") from error
    except (urllib.error.URLError, OSError):
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"the server at {url} is not Penstock's: its list of models cannot be read") from error


def _get(url: str, path: str) -> Any:
    import urllib.request

    headers = {"authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}
    request = urllib.request.Request(f"{url}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=LOOKING_SECONDS) as answer:
        return json.load(answer)


# ---- starting the program ----


def _replace_process(program: AgentProgram, launch: AgentStart, arguments: list[str], print_only: bool) -> None:
    command = [program.command, *launch.arguments, *arguments]
    if print_only:
        lines = [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
        print("\n".join([*lines, shlex.join(command)]))
        return
    os.execvpe(command[0], command, os.environ | launch.environment)


def _run(program: AgentProgram, launch: AgentStart, arguments: list[str]) -> int:
    command = [program.command, *launch.arguments, *arguments]
    process = subprocess.Popen(command, env=os.environ | launch.environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


# ---- starting a server ----


@contextmanager
def _serving(model: str, engine: dict[str, Any]) -> Iterator[AgentServer]:
    """Runs a server on a free port. Its output goes to a log, because the program uses the terminal."""
    flags = [flag for name, value in engine.items() if value != DEFAULTS[name] for flag in _flags(name, value)]
    command = [sys.executable, "-m", "penstock", "serve", model, "--port", "0", *flags]
    note(f"starting {shlex.join(['penstock', *command[3:]])}")
    with tempfile.NamedTemporaryFile(prefix="penstock-", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            target = _find(_address(process, Path(log.name)))
            if target is None:
                raise ConfigError("the server that was started does not answer")
            yield target
        finally:
            process.terminate()
            process.wait()


def _flags(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [f"{flag}={each}" for each in values]


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        text = log.read_text("utf-8", "replace")
        if found := re.search(r"^serving .* on (http://\S+)", text, re.MULTILINE):
            return found[1]
        if ended:
            errors = re.findall(r"^error: (.*)", text, re.MULTILINE) or [text.strip()[-2000:]]
            raise ConfigError(f"the server did not start: {errors[-1]}")
        time.sleep(0.05)
    raise ConfigError(f"the server did not start within {STARTING_SECONDS:g} seconds")
