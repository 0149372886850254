"""`penstock serve` runs the HTTP server."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.command import Option, UsageError
from penstock.cli.terminal import obtain

if TYPE_CHECKING:
    from penstock.server.telemetry.tracing import Traces
    from penstock.text import Text


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
Strict = Annotated[
    bool,
    Option(
        help="Refuse unknown fields, unsupported settings and other models' names. By default, they are ignored and "
        "listed in the answer."
    ),
]
IgnoreUnknown = Annotated[bool, Option(help="The default, kept for older scripts: see --strict.")]
ModelAliases = Annotated[
    list[str] | None,
    Option(
        name="--alias",
        help="Further name of the model, such as 'gpt-4o=smollm2' or '*=smollm2': NAME may have wildcards. May be "
        "repeated. Without --strict, claude*, gpt-*, chatgpt*, codex* and o[0-9]* are names of it anyway.",
    ),
]
ChatTemplateText = Annotated[
    str,
    Option(help="Chat template in place of the model's own: Jinja text, a file, or a name such as chatml or llama3."),
]
ChatTemplateFile = Annotated[str, Option(help="File with the chat template, in Jinja.")]
LogLevel = Annotated[str, Option(help="What is logged to stderr: debug, info (every request), warning or error.")]
LogFormat = Annotated[str, Option(help="Form of the log: text, or json for one object per line.")]

TrustTemplates = Annotated[
    bool,
    Option(
        help="Render chat templates that come in requests (vLLM's chat_template). They are programs: one could use up "
        "the server's memory."
    ),
]
MetricsCompat = Annotated[
    str,
    Option(
        help="Other engines whose metric names /metrics has beside Penstock's own: any of vllm, llamacpp, sglang, tgi "
        "and nv (Triton), with commas between them, or none."
    ),
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
    alias: ModelAliases = None,
    strict: Strict = False,
    ignore_unknown_fields: IgnoreUnknown = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    chat_template: ChatTemplateText = "",
    chat_template_file: ChatTemplateFile = "",
    trust_request_chat_template: TrustTemplates = False,
    metrics_compat: MetricsCompat = "vllm,llamacpp",
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
    _note_default(strict, ignore_unknown_fields)
    traces = _open_traces(otlp) if otlp else None
    path = obtain(model)

    from penstock.config import configure
    from penstock.ipc.spawn import ProcessClient
    from penstock.server import Setup, Space
    from penstock.server import serve as listen
    from penstock.server.access.guard import Rules
    from penstock.server.telemetry.access_log import set_up_logging

    set_up_logging(log_level, log_format)
    served_name = name or _short_name(model, path)
    config = configure(path, engine, name=served_name)
    space = Space(Path(data).expanduser().absolute() if data else None, max_file, max_data, max_files)
    rules = Rules(
        Path(keys).expanduser() if keys else None,
        tuple(cors or ()),
        max_waiting,
        lenient=not strict,
        aliases=_patterns(alias or [], served_name),
        trust_templates=trust_request_chat_template,
    )
    load = partial(_load_text, model, path, _template(chat_template, chat_template_file))
    setup = Setup(path, space, rules, traces, _metric_sets(metrics_compat))
    listen(ProcessClient(config), load, served_name, host, port, setup)


def _template(given: str, file: str) -> str:
    """Returns the chat template that the options name; empty: the model's own."""
    from penstock.errors import ConfigError
    from penstock.text.named_templates import template_in, template_text

    if given and file:
        raise ConfigError("--chat-template and --chat-template-file name two templates: give one of them")
    return template_in(Path(file)) if file else template_text(given)


def _load_text(model: str, path: Path, template: str) -> Text:
    """Loads the tokenizer, the chat template and the sampling defaults, a derived model's own included. Warns about a
    model that comes without a template."""
    from penstock.model.load import load_text
    from penstock.store import find_derived
    from penstock.text.sampling_defaults import defaults_in_modelfile

    derived = find_derived(model)
    text = load_text(path).with_sampling(defaults_in_modelfile(derived.parameters if derived else {}))
    if template:
        return text.with_template_text(template)
    if text.template is None and not text.tokenizer.closing:  # an encoder has tokens that close a text, and no chats
        print("the model has no chat template: chats are rendered as ChatML (see --chat-template)", file=sys.stderr)
    return text


def _note_default(strict: bool, ignore_unknown_fields: bool) -> None:
    if strict and ignore_unknown_fields:
        raise UsageError("--strict and --ignore-unknown-fields contradict each other: leave one out")
    if ignore_unknown_fields:
        print("note: --ignore-unknown-fields is the default now: leave it out", file=sys.stderr, flush=True)


def _patterns(aliases: list[str], served_name: str) -> tuple[str, ...]:
    """Returns the names of aliases; raises if one is not for the served model."""
    patterns = []
    for alias in aliases:
        name, _, model = alias.rpartition("=")
        if not name or model != served_name:
            raise UsageError(f"--alias is written NAME={served_name}, for the model that is served; got {alias!r}")
        patterns.append(name)
    return tuple(patterns)


def _metric_sets(given: str) -> tuple[str, ...]:
    """Returns the engines whose metric names are exported; raises if one is not known."""
    from penstock.server.telemetry.compat_metrics import SETS

    names = tuple(name.strip() for name in given.split(",") if name.strip() not in ("", "none"))
    if unknown := [name for name in names if name not in SETS]:
        raise UsageError(f"--metrics-compat takes {', '.join(SETS)}, or none; got {unknown[0]!r}")
    return names


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
