"""A server that speaks OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.command import Option
from penstock.cli.terminal import obtain

if TYPE_CHECKING:
    from penstock.server.telemetry.tracing import Traces


def serve(
    model: options.Model = options.DEFAULT_MODEL,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, Option(minimum=0, maximum=65535, help="0: any that is free.")] = 8000,
    name: Annotated[str, Option(help="What clients call the model; by default as you call it.")] = "",
    data: Annotated[
        str, Option(help="Folder for uploaded files and batches; by default data/NAME in PENSTOCK_HOME.")
    ] = "",
    max_file: Annotated[int, Option(minimum=1, help="Bytes of one uploaded file.")] = 209_715_200,
    max_files: Annotated[int, Option(minimum=1, help="Files kept, uploaded ones and answers of batches.")] = 10_000,
    max_data: Annotated[
        int, Option(minimum=1, help="Bytes of all files; uploads beyond it are refused.")
    ] = 10_737_418_240,
    otlp: Annotated[
        str,
        Option(
            help="URL of an OpenTelemetry collector, such as http://127.0.0.1:4318, to send traces to.",
            env="OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ] = "",
    keys: Annotated[
        str, Option(help="A file of API keys (penstock keys add): no one else is let in.", env="PENSTOCK_KEYS")
    ] = "",
    cors: Annotated[
        list[str] | None, Option(help="An origin whose web pages may use it, such as https://example.org; repeat it.")
    ] = None,
    max_waiting: Annotated[
        int | None,
        Option(minimum=0, help="Requests that may wait; more are refused (503). By default 16 for each row."),
    ] = None,
    ignore_unknown_fields: Annotated[
        bool, Option(help="Ignores the fields of requests that it does not know, and lists them in the answer.")
    ] = False,
    *,
    engine: options.Engine,
) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs on one port.

      penstock serve
      penstock serve ./model.gguf --port 9000 --max-len 4096
      penstock serve --host 0.0.0.0 --keys ~/.config/penstock/keys.json
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'

    Weights of GGUF files in Q4_0 to Q8_0 and Q4_K to Q6_K, and of FP8 checkpoints (e4m3), are kept as they are on a
    GPU; --quantize makes plain ones smaller. Formats a GPU has no kernels for are kept there as bf16, and FP8
    checkpoints on a CPU: the log says so.
    """
    traces = _open_traces(otlp) if otlp else None
    path = obtain(model)

    from penstock.config import configure
    from penstock.ipc.spawn import ProcessClient
    from penstock.model.load import load_text
    from penstock.server import Setup, Space
    from penstock.server import serve as listen
    from penstock.server.access.guard import Rules

    called = name or _short_name(model, path)
    config = configure(path, engine, name=called)
    space = Space(Path(data).expanduser().absolute() if data else None, max_file, max_data, max_files)
    rules = Rules(Path(keys).expanduser() if keys else None, tuple(cors or ()), max_waiting, ignore_unknown_fields)
    listen(ProcessClient(config), partial(load_text, path), called, host, port, Setup(path, space, rules, traces))


def _open_traces(url: str) -> Traces:
    from penstock.errors import ConfigError

    try:
        from penstock.server.telemetry.tracing import traces_to
    except ImportError as error:
        raise ConfigError(
            f"traces were to go to {url}, and what sends them is not here ({error}): pip install 'penstock[otel]', or "
            "leave out --otlp and OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from error
    return traces_to(url)


def _short_name(model: str, path: Path) -> str:
    """What was made of another model is served by that one's name: it is the same but for Ollama's clients."""
    from penstock.store import find, find_made

    made = find_made(model)
    if made is not None and made.base:
        return made.base
    if find(model):
        return model
    return path.stem if path.is_file() else path.resolve().name
