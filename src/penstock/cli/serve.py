"""`penstock serve` runs the HTTP server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.command import Option
from penstock.cli.terminal import obtain

if TYPE_CHECKING:
    from penstock.server.telemetry.tracing import Traces


Host = Annotated[str, Option(help="Address to listen on. 0.0.0.0 accepts connections from other machines.")]
Port = Annotated[int, Option(minimum=0, maximum=65535, help="Port to listen on. 0: any free port.")]
ServedName = Annotated[str, Option(help="Name of the model for clients. By default, the name given here.")]
DataFolder = Annotated[
    str, Option(help="Folder for uploaded files and batches. By default, data/NAME in PENSTOCK_HOME.")
]
MaxFile = Annotated[int, Option(minimum=1, help="Most bytes of one uploaded file.")]
MaxFiles = Annotated[int, Option(minimum=1, help="Most files kept: uploads and results of batches.")]
MaxData = Annotated[int, Option(minimum=1, help="Most bytes of all files together; further uploads are refused.")]
Otlp = Annotated[
    str,
    Option(
        help="URL of an OpenTelemetry collector for traces, such as http://127.0.0.1:4318.",
        env="OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
]
KeyFile = Annotated[
    str,
    Option(
        help="File of API keys (see penstock keys add). Requests without a valid key are refused.", env="PENSTOCK_KEYS"
    ),
]
Origins = Annotated[
    list[str] | None,
    Option(help="Origin whose web pages may use the server, such as https://example.org. May be repeated."),
]
MaxWaiting = Annotated[
    int | None,
    Option(minimum=0, help="Most requests that may wait; further ones are refused (503). By default, 16 for each row."),
]
IgnoreUnknown = Annotated[
    bool, Option(help="Ignore unknown fields of requests and list them in the answer, instead of refusing.")
]


def serve(
    model: options.ModelRef = options.DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: ServedName = "",
    data: DataFolder = "",
    max_file: MaxFile = 209_715_200,
    max_files: MaxFiles = 10_000,
    max_data: MaxData = 10_737_418_240,
    otlp: Otlp = "",
    keys: KeyFile = "",
    cors: Origins = None,
    max_waiting: MaxWaiting = None,
    ignore_unknown_fields: IgnoreUnknown = False,
    *,
    engine: options.EngineSettings,
) -> None:
    """Serve a model over HTTP: OpenAI's, Anthropic's and Ollama's APIs on one port.

      penstock serve
      penstock serve ./model.gguf --port 9000 --max-len 4096
      penstock serve --host 0.0.0.0 --keys ~/.config/penstock/keys.json
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'

    Quantized weights stay quantized. On a GPU these are Q4_0 to Q8_0 and Q4_K to Q6_K of GGUF files and FP8 (e4m3);
    other formats become bf16 there, and FP8 becomes bf16 on a CPU: the log says so. --quantize quantizes plain weights.
    """
    traces = _open_traces(otlp) if otlp else None
    path = obtain(model)

    from penstock.config import configure
    from penstock.ipc.spawn import ProcessClient
    from penstock.model.load import load_text
    from penstock.server import Setup, Space
    from penstock.server import serve as listen
    from penstock.server.access.guard import Rules

    served_name = name or _short_name(model, path)
    config = configure(path, engine, name=served_name)
    space = Space(Path(data).expanduser().absolute() if data else None, max_file, max_data, max_files)
    rules = Rules(Path(keys).expanduser() if keys else None, tuple(cors or ()), max_waiting, ignore_unknown_fields)
    listen(
        ProcessClient(config),
        partial(load_text, path, config.config),
        served_name,
        host,
        port,
        Setup(path, space, rules, traces),
    )


def _open_traces(url: str) -> Traces:
    from penstock.errors import ConfigError

    try:
        from penstock.server.telemetry.tracing import traces_to
    except ImportError as error:
        raise ConfigError(
            f"traces cannot be sent to {url}: {error}. Run pip install 'penstock[otel]', or leave out --otlp and "
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from error
    return traces_to(url)


def _short_name(model: str, path: Path) -> str:
    """Returns the name that the model is served by. A derived model is served by its base's name, because only Ollama's
    clients can use its settings."""
    from penstock.store import find, find_derived

    derived = find_derived(model)
    if derived is not None and derived.base:
        return derived.base
    if find(model):
        return model
    return path.stem if path.is_file() else path.resolve().name
