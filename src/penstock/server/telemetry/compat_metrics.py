"""Exports Penstock's metrics again under the names that dashboards and routers of other engines read.

Each dialect declares the names of its engine, as a set that can be left out. Only metrics with the same meaning are
exported: a missing figure is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from penstock.server.http.endpoint import Dialect

FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)

DEFAULT_SETS = ("vllm", "llamacpp")
BUCKETS = {  # the buckets of theirs that we have
    "penstock_time_to_first_token_seconds": FIRST_TOKEN,
    "penstock_inter_token_seconds": INTER_TOKEN,
    "penstock_request_token_seconds": INTER_TOKEN,
    "penstock_request_seconds": REQUEST,
    "penstock_request_queue_seconds": REQUEST,
    "penstock_request_prefill_seconds": REQUEST,
    "penstock_request_decode_seconds": REQUEST,
}
LABELS = {"reason": "finished_reason", "blocks": "num_gpu_blocks"}


class DerivedSample(NamedTuple):
    """Is a figure of another engine that is computed from one of our metrics."""

    name: str
    value: float
    kind: str = "gauge"  # unknown: a counter whose name does not end in _total
    label: tuple[str, str] | None = None  # its own, next to its set's
    model: str = ""  # the model that it is about, if there is one


Derive = Callable[[Metric], Iterable[DerivedSample]]


def _nothing(_: Mapping[str, Metric]) -> Iterable[Metric]:
    return ()


class MetricNames(NamedTuple):
    """Lists the metric names of another engine."""

    renamed: Mapping[str, Sequence[str]]  # ours: theirs, by the name without _total
    derived: Mapping[str, Derive]  # ours: what makes figures of theirs from it
    labels: Mapping[str, str] = {}  # common to its metrics
    further: Callable[[Mapping[str, Metric]], Iterable[Metric]] = _nothing  # makes metrics from all of ours


def metric_sets() -> dict[str, Callable[[str], MetricNames]]:
    """Returns a function for each set of names, which makes it for a default model."""
    from penstock.server.dialects import dialects  # which import the metrics
    from penstock.server.telemetry import dynamo_metrics

    found: dict[str, Callable[[str], MetricNames]] = {"dynamo": dynamo_metrics.names}
    for dialect in dialects():
        found |= {name: partial(_made, dialect, reference) for name, reference in dialect.metrics.items()}
    return found


def _made(dialect: Dialect, reference: str, model: str) -> MetricNames:
    names = dialect.find(reference)(model)
    assert isinstance(names, MetricNames)
    return names


class CompatMetrics:
    """Collects the chosen `sets` of names from the collectors of our own metrics."""

    def __init__(self, sources: Iterable[Collector], model: str, sets: Collection[str] = DEFAULT_SETS) -> None:
        self._sources = list(sources)
        known = metric_sets()
        self._sets = [known[name](model) for name in sets if name in known]  # a default set's dialect may be missing

    def collect(self) -> Iterator[Metric]:
        metrics = {metric.name: metric for source in self._sources for metric in source.collect()}
        for names in self._sets:
            yield from names.further(metrics)
            for metric in metrics.values():
                for name in names.renamed.get(metric.name, ()):
                    yield _renamed(metric, name, names.labels)
                if metric.name in names.derived:
                    yield from _derived(metric, names.derived[metric.name](metric), names.labels)


def _renamed(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [
        sample._replace(
            name=name + sample.name.removeprefix(metric.name),
            labels={**labels, **{LABELS.get(label, label): value for label, value in sample.labels.items()}},
        )
        for sample in metric.samples
        if not sample.name.endswith("_created") and _kept(sample, BUCKETS.get(metric.name))
    ]
    return copy


def _derived(metric: Metric, samples: Iterable[DerivedSample], labels: Mapping[str, str]) -> Iterable[Metric]:
    found: dict[str, Metric] = {}
    for name, value, kind, label, model in samples:
        made = found.setdefault(name, Metric(name.removesuffix("_total"), metric.documentation, kind))
        own = ({} if label is None else {label[0]: label[1]}) | ({"model": model} if model else {})
        made.add_sample(name, {**labels, **own}, value)
    return found.values()


def _kept(sample: Sample, bounds: Collection[float] | None) -> bool:
    bound = float(sample.labels.get("le", "inf"))
    return bounds is None or bound == inf or bound in bounds


def by_state(metric: Metric) -> dict[str, float]:
    return {sample.labels["state"]: sample.value for sample in metric.samples}


def total(metric: Metric) -> float:
    return next(sample.value for sample in metric.samples if sample.name.endswith("_sum"))


class FinishedCounts(NamedTuple):
    """Counts the requests that have ended. A request failed if it ended in an error or its client left."""

    done: float
    errors: float
    aborts: float


def finished_counts(metric: Metric) -> FinishedCounts:
    ends = {sample.labels["reason"]: sample.value for sample in metric.samples if sample.name.endswith("_total")}
    errors, aborts = ends.pop("error", 0.0), ends.pop("abort", 0.0)
    return FinishedCounts(sum(ends.values()), errors, aborts)


def used_share(metric: Metric) -> float:
    """Returns the share of the KV blocks that requests use. Cached blocks that no request uses are free, as in vLLM and
    SGLang."""
    states = by_state(metric)
    return states["used"] / max(sum(states.values()), 1)
