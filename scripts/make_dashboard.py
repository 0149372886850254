"""Writes docs/grafana.json, the Grafana dashboard of a server's metrics; with --check, says whether it is current."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docs" / "grafana.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHT = 8  # of a panel

Targets = dict[str, str]  # legend: expression


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


ROWS: dict[str, list[tuple[str, str, Targets]]] = {  # title, unit, what is drawn
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


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    at = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": at, "w": 24, "h": 1}, "panels": []})
        width = 24 // len(row)
        panels += [panel(*each, x=place * width, y=at + 1, w=width) for place, each in enumerate(row)]
        at += 1 + HEIGHT
    return {
        "title": "Penstock",
        "uid": "penstock",
        "tags": ["penstock", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [datasource(), model()]},
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


def model() -> dict[str, Any]:
    query = "label_values(penstock_model_info, model)"
    asked = {"query": query, "refId": "models"}
    named = {"name": "model", "label": "Model", "type": "query", "datasource": SOURCE, "definition": query}
    return named | {"query": asked, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*"}


def main() -> None:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if sys.argv[1:] == ["--check"]:
        if not FILE.exists() or FILE.read_text(encoding="utf-8") != text:
            sys.exit(f"{FILE} is not current: run python scripts/make_dashboard.py")
    else:
        FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
