"""Writes the Grafana dashboards of a server's metrics (docs/grafana.json) and of a fleet's (docs/grafana-fleet.json).
With --check it says whether they are current."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHT = 8  # of a panel

Targets = dict[str, str]  # legend: expression
Rows = dict[str, list[tuple[str, str, Targets]]]  # title of a row: title of a panel, unit, what is drawn


def of_model(series: str) -> str:
    """Metrics do not name the model: one of the same server tells it."""
    return f'{series} * on (job, instance) group_left (model) penstock_model_info{{model=~"$model"}}'


def rate(counter: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({of_model(f'rate({counter}[$__rate_interval])')})"


def gauge(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({of_model(name)})"


def quantiles(histogram: str) -> Targets:
    return {
        f"p{share}": f"histogram_quantile({share / 100}, {rate(f'{histogram}_bucket', 'le')})" for share in (50, 95, 99)
    }


def of_replica(name: str, label: str = "") -> str:
    """Metrics of replicas name their model themselves."""
    chosen = 'model=~"$model", replica=~"$replica"'
    return f"penstock_replica_{name}{{{chosen}{f', {label}' if label else ''}}}"


def replica_gauge(name: str, label: str = "", by: str = "replica") -> str:
    return f"sum by ({by}) ({of_replica(name, label)})"


def replica_rate(name: str, label: str = "", by: str = "replica") -> str:
    return f"sum by ({by}) (rate({of_replica(f'{name}_total', label)}[$__rate_interval]))"


def fleet_gauge(name: str, by: str = "model") -> str:
    return f'sum by ({by}) (penstock_fleet_{name}{{model=~"$model"}})'


def fleet_rate(name: str) -> str:
    return f'sum by (reason) (rate(penstock_fleet_{name}_total{{model=~"$model"}}[$__rate_interval]))'


ROWS: Rows = {
    "Throughput": [
        (
            "Tokens",
            "short",
            {
                "generated": rate("penstock_generated_tokens_total"),
                "of prompts": rate("penstock_prompt_tokens_total"),
                "of prompts, reused": rate("penstock_cached_tokens_total"),
            },
        ),
        ("Requests ended", "reqps", {"{{reason}}": rate("penstock_requests_finished_total", "reason")}),
        ("Engine busy", "percentunit", {"share of time in steps": rate("penstock_engine_busy_seconds_total")}),
        ("Tokens in a step", "short", quantiles("penstock_step_tokens")),
    ],
    "Latency": [
        ("Time to the first token", "s", quantiles("penstock_time_to_first_token_seconds")),
        ("From token to token", "s", quantiles("penstock_inter_token_seconds")),
        ("Whole request", "s", quantiles("penstock_request_seconds")),
        (
            "Prefill and decode",
            "s",
            {f"prefill {name}": each for name, each in quantiles("penstock_request_prefill_seconds").items()}
            | {f"decode {name}": each for name, each in quantiles("penstock_request_decode_seconds").items()},
        ),
    ],
    "Queue": [
        ("Requests in the engine", "short", {"{{state}}": gauge("penstock_requests", "state")}),
        ("Time in the queue", "s", quantiles("penstock_request_queue_seconds")),
        ("Preemptions", "ops", {"sent back to wait": rate("penstock_preemptions_total")}),
    ],
    "KV cache": [
        ("Blocks by state", "short", {"{{state}}": gauge("penstock_kv_blocks", "state")}),
        (
            "Prefix cache hit rate",
            "percentunit",
            {
                "prompt tokens reused": f"{rate('penstock_cached_tokens_total')} / "
                f"{rate('penstock_prompt_tokens_total')}"
            },
        ),
        (
            "Length of prompts and answers",
            "short",
            {f"prompt {name}": each for name, each in quantiles("penstock_request_prompt_tokens").items()}
            | {f"answer {name}": each for name, each in quantiles("penstock_request_generated_tokens").items()},
        ),
    ],
    "Speculation": [
        (
            "Drafted tokens",
            "short",
            {"{{source}}": rate("penstock_drafted_tokens_total", "source")},
        ),
        (
            "Share of drafted tokens that was accepted",
            "percentunit",
            {
                "{{source}}": f"{rate('penstock_accepted_tokens_total', 'source')} / "
                f"{rate('penstock_drafted_tokens_total', 'source')}"
            },
        ),
        (
            "Accepted tokens of a draft",
            "short",
            {
                "{{source}}": f"{rate('penstock_accepted_tokens_total', 'source')} / "
                f"{rate('penstock_drafts_total', 'source')}"
            },
        ),
    ],
    "Structured output": [
        (
            "Time spent on grammars",
            "percentunit",
            {
                "compiling, beside the steps": rate("penstock_grammar_compile_seconds_total"),
                "masks": rate("penstock_grammar_mask_seconds_total"),
            },
        ),
        (
            "Grammars and masks",
            "ops",
            {"compiled": rate("penstock_grammars_total"), "masks": rate("penstock_grammar_masks_total")},
        ),
        ("Tokens that grammars forced", "short", {"forced": rate("penstock_forced_tokens_total")}),
    ],
    "Errors": [
        (
            "Requests that failed or were left",
            "reqps",
            {"{{reason}}": rate('penstock_requests_finished_total{reason=~"error|abort"}', "reason")},
        ),
        ("Engines", "short", {"up": gauge("penstock_engine_up")}),
        ("Engine restarts", "ops", {"restarts": rate("penstock_engine_restarts_total")}),
    ],
}


USED = 'state="used"'
FLEET_ROWS: Rows = {
    "Replicas": [
        ("Ready", "short", {"{{replica}}": replica_gauge("up")}),
        ("Replicas by state", "short", {"{{state}}": replica_gauge("state", by="state")}),
        ("Deaths", "ops", {"{{replica}} {{reason}}": replica_rate("deaths", by="replica, reason")}),
        (
            "Restarts and lost connections",
            "ops",
            {
                "{{replica}} restarts": replica_rate("restarts"),
                "{{replica}} connections lost": replica_rate("connections_lost"),
            },
        ),
    ],
    "Load": [
        ("Running", "short", {"{{replica}}": replica_gauge("requests", 'state="running"')}),
        ("Waiting", "short", {"{{replica}}": replica_gauge("requests", 'state="waiting"')}),
        ("Prompt tokens to compute", "short", {"{{replica}}": replica_gauge("queued_tokens")}),
        ("Tokens generated", "short", {"{{replica}}": replica_rate("generated_tokens")}),
    ],
    "Gateway": [
        ("Requests that wait for room", "short", {"{{model}}": fleet_gauge("waiting_requests")}),
        ("Requests by how they came to a replica", "reqps", {"{{reason}}": fleet_rate("turns")}),
        ("Requests refused", "reqps", {"{{reason}}": rate("penstock_requests_refused_total", "reason")}),
        ("Replicas wanted, and bounds", "short", {"{{model}} {{bound}}": fleet_gauge("replicas", "model, bound")}),
    ],
    "Routing": [
        ("Requests sent", "reqps", {"{{replica}}": replica_rate("routed_requests")}),
        (
            "Cached tokens, expected and reused",
            "short",
            {
                "{{replica}} expected": replica_rate("promised_tokens"),
                "{{replica}} reused": replica_rate("reused_tokens"),
            },
        ),
        ("Requests taken over from another replica", "reqps", {"{{replica}}": replica_rate("resumed_requests")}),
        (
            "Replicas that could not be used",
            "ops",
            {"{{replica}} {{reason}}": replica_rate("refused", by="replica, reason")},
        ),
    ],
    "Blocks between replicas": [
        ("Tokens read from another replica", "short", {"{{replica}}": replica_rate("pulled_tokens")}),
        ("Reads that failed", "ops", {"{{replica}} {{reason}}": replica_rate("pull_failures", by="replica, reason")}),
        ("Offers asked for", "ops", {"{{reason}}": fleet_rate("pulls")}),
        ("Prompts computed elsewhere, or why not", "ops", {"{{reason}}": fleet_rate("splits")}),
    ],
    "KV cache": [
        (
            "In use",
            "percentunit",
            {"{{replica}}": f"{replica_gauge('kv_blocks', USED)} / {replica_gauge('kv_blocks')}"},
        ),
        ("Blocks by state", "short", {"{{state}}": replica_gauge("kv_blocks", by="state")}),
        ("Tokens that requests need", "short", {"{{replica}}": replica_gauge("kv_tokens")}),
    ],
}


def dashboard(title: str, rows: Rows, variables: list[dict[str, Any]]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    at = 0
    for heading, row in rows.items():
        panels.append({"type": "row", "title": heading, "gridPos": {"x": 0, "y": at, "w": 24, "h": 1}, "panels": []})
        width = 24 // len(row)
        panels += [panel(*each, x=place * width, y=at + 1, w=width) for place, each in enumerate(row)]
        at += 1 + HEIGHT
    return {
        "title": title,
        "uid": title.lower().replace(" ", "-"),
        "tags": ["penstock", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [datasource(), *variables]},
        "panels": [each | {"id": id} for id, each in enumerate(panels, 1)],
    }


def panel(title: str, unit: str, drawn: Targets, x: int, y: int, w: int) -> dict[str, Any]:
    stacked = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if "by state" in title else {"fillOpacity": 5}
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": w, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": stacked}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(drawn.items())
        ],
    }


def datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def variable(name: str, query: str) -> dict[str, Any]:
    """Lets a reader choose among the values of a label."""
    asked = {"query": query, "refId": f"{name}s"}
    named = {"name": name, "label": name.capitalize(), "type": "query", "datasource": SOURCE, "definition": query}
    return named | {"query": asked, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*"}


def main() -> None:
    model = variable("model", "label_values(penstock_model_info, model)")
    fleet_model = variable("model", "label_values(penstock_replica_up, model)")
    replica = variable("replica", 'label_values(penstock_replica_up{model=~"$model"}, replica)')
    dashboards = {
        DOCS / "grafana.json": dashboard("Penstock", ROWS, [model]),
        DOCS / "grafana-fleet.json": dashboard("Penstock fleet", FLEET_ROWS, [fleet_model, replica]),
    }
    for file, made in dashboards.items():
        text = json.dumps(made, indent=1) + "\n"
        if sys.argv[1:] != ["--check"]:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file} is not current: run python scripts/make_dashboard.py")


if __name__ == "__main__":
    main()
