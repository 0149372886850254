"""Follows the load of a fleet's gateways, within bounds that can be changed while the fleet runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf

import msgspec

from penstock.fleet.scale import MeasuredLoad, ScaleBounds, Scaler, ServiceTargets, add_loads
from penstock.fleet.steward_wire import FleetSpec, ScaleSpec
from penstock.fleet.timing import EngineTiming
from penstock.ipc.placement import ScaleStatus

log = logging.getLogger(__name__)


class Autoscaler:
    """Decides how many replicas there are to be, unless somebody has said so. Times are in seconds."""

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec.scaling or ScaleSpec(spec.replicas, spec.replicas)
        self._fleet = spec.name
        self._reason = ""
        self._scaler = self._make()

    def use(self, least: int, most: int) -> None:
        """Takes other bounds, and the targets from before. If they are the same, nothing is decided here."""
        self.spec = msgspec.structs.replace(self.spec, least=least, most=most)
        self._scaler, self._reason = self._make(), ""

    def _make(self) -> Scaler | None:
        spec = self.spec
        if spec.most == spec.least:
            return None
        bounds = ScaleBounds(spec.least, spec.most, spec.patience)
        return Scaler(EngineTiming(), ServiceTargets(spec.ttft, spec.itl or inf), bounds)

    def decide(self, measured: Sequence[MeasuredLoad], replicas: int, now: float) -> int:
        if self._scaler is None or not measured:
            return replicas
        self._scaler.timing = max(measured, key=lambda each: each.load.arrivals).timing
        decision = self._scaler.decide(add_loads([each.load for each in measured]), replicas, now)
        self._reason = decision.reason
        if decision.replicas != replicas:
            log.info("%s: %d replicas in place of %d: %s", self._fleet, decision.replicas, replicas, decision.reason)
        return decision.replicas

    def status(self, wanted: int) -> ScaleStatus:
        if self._scaler is None:
            return ScaleStatus(wanted, wanted, wanted)
        return ScaleStatus(wanted, self.spec.least, self.spec.most, self._reason)
