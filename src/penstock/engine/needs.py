"""Has prepared what requests need before they can run: grammars, adapters, and KV blocks that lie elsewhere."""

from __future__ import annotations

from penstock.engine.adapter_control import AdapterControl
from penstock.engine.carry.peers import PeerBlocks
from penstock.engine.grammar import Grammars
from penstock.engine.kv_disk.prefixes import NoDiskPrefixes
from penstock.engine.record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import InvalidGrammar
from penstock.types import Grammar, WeightState


class RequestNeeds:
    """Begins to prepare what requests need, and says what they have to wait for."""

    def __init__(
        self, grammars: Grammars | None, adapters: AdapterControl, peers: PeerBlocks, disk: NoDiskPrefixes
    ) -> None:
        self._grammars = grammars
        self._adapters = adapters
        self._peers = peers
        self._disk = disk

    def of(self, record: RequestRecord) -> list[Need]:
        """Returns what a request that has arrived needs; raises PenstockError if it cannot have that."""
        needs, grammar = [], record.request.sampling.grammar
        if grammar is not None and grammar.kind != "free":
            needs.append(self._compile(record, grammar))
        if uses := [use for use in record.request.adapters if use.scale]:
            record.lease = self._adapters.adapters.hold(uses)
            if record.lease.in_slot:
                record.adapt()
            else:
                needs.insert(0, Need("adapter", record.lease, record.adapt))
        return needs

    def blocks_of(self, record: RequestRecord, weights: WeightState) -> list[Need]:
        """Returns the blocks that a request which could run now should wait for: another engine's, else the disk's.
        Each is asked once for each request."""
        return self._peers.needs(record, weights) or self._disk.needs(record, weights)

    def _compile(self, record: RequestRecord, grammar: Grammar) -> Need:
        """Begins to compile a request's grammar."""
        if self._grammars is None:
            raise InvalidGrammar("structured output is unavailable: this engine was started without a tokenizer")
        grammars, compiling = self._grammars, self._grammars.compile(grammar)
        return Need("grammar", compiling, lambda: record.constrain(grammars.follow(compiling, grammar)))
