"""`penstock serve` runs the HTTP server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli import options
from penstock.cli.command import Option, OptionGroup, UsageError
from penstock.cli.terminal import obtain

if TYPE_CHECKING:
    from penstock.server import Space
    from penstock.server.access.guard import Rules
    from penstock.server.telemetry.tracing import Traces
    from penstock.text import Text


class ListenOptions(NamedTuple):
    host: Annotated[str, Option(help="Address to listen on. 0.0.0.0 accepts connections from other machines.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option(minimum=0, maximum=65535, help="Port to listen on. 0: any free port.")] = 8000
    name: Annotated[str, Option(help="Name of the model for clients. By default, the name given here.")] = ""
    alias: Annotated[
        list[str] | None,
        Option(
            help="Further name of the model, such as 'gpt-4o=smollm2' or '*=smollm2': NAME may have wildcards. May be "
            "repeated. Without --strict, claude*, gpt-*, chatgpt*, codex*, o[0-9]*, tgi, dummy and default are names "
            "of it anyway.",
        ),
    ] = None


class StorageOptions(NamedTuple):
    data: Annotated[
        str, Option(help="Folder for uploaded files and batches. By default, data/NAME in PENSTOCK_HOME.")
    ] = ""
    max_file: Annotated[int, Option(minimum=1, help="Most bytes of one uploaded file.")] = 209_715_200
    max_files: Annotated[int, Option(minimum=1, help="Most files kept: uploads and results of batches.")] = 10_000
    max_data: Annotated[
        int, Option(minimum=1, help="Most bytes of all files together; further uploads are refused.")
    ] = 10_737_418_240

    def space(self) -> Space:
        """Returns what the server may store, and where."""
        from penstock.server import Space

        folder = Path(self.data).expanduser().absolute() if self.data else None
        return Space(folder, self.max_file, self.max_data, self.max_files)


class AccessOptions(NamedTuple):
    keys: Annotated[
        str,
        Option(
            help="File of API keys (see penstock keys add). Requests without a valid key are refused.",
            env="PENSTOCK_KEYS",
        ),
    ] = ""
    cors: Annotated[
        list[str] | None,
        Option(help="Origin whose web pages may use the server, such as https://example.org. May be repeated."),
    ] = None
    max_waiting: Annotated[
        int | None,
        Option(
            minimum=0, help="Most requests that may wait; further ones are refused (503). By default, 16 for each row."
        ),
    ] = None
    strict: Annotated[
        bool,
        Option(
            help="Refuse unknown fields, unsupported settings and other models' names. By default, they are ignored "
            "and listed in the answer."
        ),
    ] = False
    ignore_unknown_fields: Annotated[bool, Option(help="The default, kept for older scripts: see --strict.")] = False

    def rules(self, aliases: tuple[str, ...], *, trust_templates: bool) -> Rules:
        """Returns who may send what to the server."""
        from penstock.server.access.guard import Rules

        if self.strict and self.ignore_unknown_fields:
            raise UsageError("--strict and --ignore-unknown-fields contradict each other: leave one out")
        if self.ignore_unknown_fields:
            print("note: --ignore-unknown-fields is the default now: leave it out", file=sys.stderr, flush=True)
        return Rules(
            Path(self.keys).expanduser() if self.keys else None,
            tuple(self.cors or ()),
            self.max_waiting,
            lenient=not self.strict,
            aliases=aliases,
            trust_templates=trust_templates,
        )


class TemplateOptions(NamedTuple):
    chat_template: Annotated[
        str,
        Option(
            help="Chat template in place of the model's own: Jinja text, a file, or a name such as chatml or llama3."
        ),
    ] = ""
    chat_template_file: Annotated[str, Option(help="File with the chat template, in Jinja.")] = ""
    trust_request_chat_template: Annotated[
        bool,
        Option(
            help="Render chat templates that come in requests (vLLM's chat_template). They are programs: one could use "
            "up the server's memory."
        ),
    ] = False
    override_generation_config: Annotated[
        str,
        Option(
            help="Sampling of requests that do not say, in place of the model's own, as JSON: "
            """'{"temperature": 0.8, "top_k": 40, "seed": 42, "max_tokens": 256}'."""
        ),
    ] = ""

    def sampling(self) -> dict[str, Any]:
        """Returns the sampling defaults that the option names."""
        from penstock.text.sampling_defaults import defaults_in_option

        return defaults_in_option(self.override_generation_config)

    def source(self) -> str:
        """Returns the chat template that the options name; empty: the model's own."""
        from penstock.errors import ConfigError
        from penstock.text.named_templates import template_in, template_text

        if self.chat_template and self.chat_template_file:
            raise ConfigError("--chat-template and --chat-template-file name two templates: give one of them")
        return (
            template_in(Path(self.chat_template_file)) if self.chat_template_file else template_text(self.chat_template)
        )


class LoraOptions(NamedTuple):
    lora_modules: Annotated[
        list[str] | None,
        Option(help="The same as --adapter, by vLLM's name: NAME=PATH, or JSON with name and path. May be repeated."),
    ] = None
    enable_lora: Annotated[bool, Option(help="Has no effect: adapters are always enabled.")] = False


class TelemetryOptions(NamedTuple):
    log_level: Annotated[
        str, Option(help="What is logged to stderr: debug, info (every request), warning or error.")
    ] = "info"
    log_format: Annotated[str, Option(help="Form of the log: text, or json for one object per line.")] = "text"
    metrics_compat: Annotated[
        str,
        Option(
            help="Other engines whose metric names /metrics has beside Penstock's own: any of vllm, llamacpp, sglang, "
            "tgi and nv (Triton), with commas between them, or none."
        ),
    ] = "vllm,llamacpp"
    otlp: Annotated[
        str,
        Option(
            help="URL of an OpenTelemetry collector for traces, such as http://127.0.0.1:4318.",
            env="OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ] = ""

    def traces(self) -> Traces | None:
        """Returns where traces are sent; None: nowhere."""
        from penstock.errors import ConfigError

        if not self.otlp:
            return None
        try:
            from penstock.server.telemetry.tracing import traces_to
        except ImportError as error:
            raise ConfigError(
                f"traces cannot be sent to {self.otlp}: {error}. Run pip install 'penstock[otel]', or leave out --otlp "
                "and OTEL_EXPORTER_OTLP_ENDPOINT"
            ) from error
        return traces_to(self.otlp)

    def metric_sets(self) -> tuple[str, ...]:
        """Returns the engines whose metric names are exported; raises if one is not known."""
        from penstock.server.telemetry.compat_metrics import SETS

        names = tuple(name.strip() for name in self.metrics_compat.split(",") if name.strip() not in ("", "none"))
        if unknown := [name for name in names if name not in SETS]:
            raise UsageError(f"--metrics-compat takes {', '.join(SETS)}, or none; got {unknown[0]!r}")
        return names


def serve(
    model: options.ModelRef = options.DEFAULT_MODEL,
    *,
    listen: Annotated[ListenOptions, OptionGroup()],
    storage: Annotated[StorageOptions, OptionGroup()],
    access: Annotated[AccessOptions, OptionGroup()],
    template: Annotated[TemplateOptions, OptionGroup()],
    telemetry: Annotated[TelemetryOptions, OptionGroup()],
    lora: Annotated[LoraOptions, OptionGroup()],
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
    traces = telemetry.traces()
    path = obtain(model)

    from penstock import server
    from penstock.config import configure
    from penstock.ipc.spawn import ProcessClient
    from penstock.server.telemetry.access_log import LogSettings

    name = listen.name or _short_name(model, path)
    adapters = (*(engine["adapter"] or ()), *(lora.lora_modules or ()))
    config = configure(path, engine | {"adapter": adapters}, name=name)
    rules = access.rules(_patterns(listen.alias or [], name), trust_templates=template.trust_request_chat_template)
    log = LogSettings(telemetry.log_level, telemetry.log_format)
    setup = server.Setup(path, storage.space(), rules, traces, telemetry.metric_sets(), log)
    load = partial(_load_text, model, path, config.config, template.source(), template.sampling())
    server.serve(ProcessClient(config), load, name, listen.host, listen.port, setup)


def _load_text(model: str, path: Path, changes: Sequence[str], template: str, sampling: dict[str, Any]) -> Text:
    """Loads the tokenizer, the chat template and the sampling defaults, a derived model's own included. `template` and
    `sampling` replace the model's own. Warns about a model that comes without a template."""
    from penstock.model.load import load_text
    from penstock.store import find_derived
    from penstock.text.sampling_defaults import defaults_in_modelfile

    derived = find_derived(model)
    derived_sampling = defaults_in_modelfile(derived.parameters if derived else {})
    text = load_text(path, changes).with_sampling(derived_sampling | sampling)
    if template:
        return text.with_template_text(template)
    if text.template is None and not text.tokenizer.closing:  # an encoder has tokens that close a text, and no chats
        print("the model has no chat template: chats are rendered as ChatML (see --chat-template)", file=sys.stderr)
    return text


def _patterns(aliases: list[str], served_name: str) -> tuple[str, ...]:
    """Returns the names of aliases; raises if one is not for the served model."""
    patterns = []
    for alias in aliases:
        name, _, model = alias.rpartition("=")
        if not name or model != served_name:
            raise UsageError(f"--alias is written NAME={served_name}, for the model that is served; got {alias!r}")
        patterns.append(name)
    return tuple(patterns)


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
