"""A toy in place of a model: its tokens are bytes, and it says what it is told to say.

The answer to a prompt with [text] in it is that text; with [*text] it is that text again and again without end; with
[=hex] it is the text whose bytes are spelled so. Its hidden state at a byte is a 1 among eight numbers, by the byte's
last three bits.
Run as a program it is an engine process, as penstock.ipc.host is.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from penstock.backend.base import Batch, Ints
from penstock.backend.pooling import Pools
from penstock.core.drafting.lengths import Proposal
from penstock.engine.assemble import assemble
from penstock.engine.drafts.drafting import PREDICTION
from penstock.engine.drafts.speculation import Drafter
from penstock.engine.engine import Engine
from penstock.engine.grammars.grammar import Constraint, Costs
from penstock.ipc.host import host
from penstock.ipc.launchers import SpawnLauncher
from penstock.server.models.directory import Alias, client_aliases
from penstock.server.models.pool import ModelPool, PoolSettings
from penstock.server.models.source import ModelSource
from penstock.server.telemetry.compat_metrics import DEFAULT_SETS
from penstock.text import ChatPrompt, ChatTemplate, Text
from penstock.text.sampling_defaults import FALLBACK
from penstock.text.tool_formats import PLAIN, AnswerFormat, find_tool_format
from penstock.types import Grammar, Limits, Request, RowResult, StepResult, TokenLogprob

END = 256
ENDLESS = 2**15  # tokens: no test waits for so many
LIMITS = Limits(max_len=512, max_rows=16, step_tokens=64, block_size=16, num_blocks=256, vocab=257, dim=8)


def pool_of(
    client: Any,
    text: Any,
    name: str,
    path: Path | None = None,
    aliases: Sequence[str] = (),
    lenient: bool = True,
    **settings: Any,
) -> ModelPool:
    """Returns a pool of one model, whose engine is the client's."""
    sets, foreign = settings.pop("metric_sets", DEFAULT_SETS), settings.pop("foreign", None)
    names = (*(Alias(pattern, name) for pattern in aliases), *(client_aliases() if lenient else ()))
    source = ModelSource(name, lambda: client, lambda: text, path)
    return ModelPool([source], PoolSettings(aliases=names, **settings), sets, foreign=foreign)


class ToyTokenizer:
    vocab_size = 257
    eos_ids = frozenset({END})
    special_ids = frozenset({END})
    prefix_space = False
    closing = ()
    names: ClassVar[dict[str, str]] = {"eos_token": "<end>"}

    def token_bytes(self, id: int) -> bytes:
        return b"<end>" if id == END else bytes([id])

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", "replace")

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, special: bool = False, continuing: bool = False) -> str:
        return b"".join(self.token_bytes(id) for id in ids if special or id != END).decode("utf-8", "replace")


class ToyText:
    tokenizer = ToyTokenizer()
    template = SimpleNamespace(source="{{ messages }}")
    chat_template = ChatTemplate({"default": "a toy needs none"}, {})
    format = AnswerFormat(PLAIN)
    opened = False
    sampling_defaults: Mapping[str, Any] = FALLBACK
    sampling = Text.sampling
    preamble: tuple[Any, ...] = ()
    other_template: ChatTemplate | None = None
    _after_preamble = Text._after_preamble

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_whole(self, text: str) -> list[int]:
        return self.encode_prompt(text)

    def render_chat(self, messages: Sequence[dict[str, Any]], **_: Any) -> str:
        chat = self._after_preamble(messages)
        if self.other_template is not None:
            return self.other_template.render(chat)
        return "".join(f"{message['role']}:{message['content']}\n" for message in chat) + "assistant:"

    def encode_chat(self, messages: Sequence[dict[str, Any]], **_: Any) -> list[int]:
        return self.encode_prompt(self.render_chat(messages))

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> ChatPrompt:
        return ChatPrompt(self.encode_chat(messages, **kwargs), self.opened)

    def with_template(self, template: ChatTemplate) -> ToyText:
        return self._with(other_template=template)

    def with_preamble(self, messages: Sequence[dict[str, Any]]) -> ToyText:
        return self._with(preamble=tuple(messages))

    def with_sampling(self, defaults: Mapping[str, Any]) -> ToyText:
        return self._with(sampling_defaults={**self.sampling_defaults, **defaults})

    def _with(self, **changed: Any) -> ToyText:
        twin = copy(self)
        vars(twin).update(changed)
        return twin

    def takes(self, name: str) -> bool:
        return False

    def special_in(self, *markers: str) -> frozenset[int]:
        return frozenset()


class Hermes(ToyText):
    """Speaks as Hermes does, and keeps what it was given to render; its template knows these words."""

    format = AnswerFormat(find_tool_format("", "hermes"), ("<think>", "</think>"))

    def __init__(self, *words: str) -> None:
        self._words = words

    def chat_prompt(self, messages: Any, **kwargs: Any) -> ChatPrompt:
        self.given = {"messages": messages, **kwargs}
        return super().chat_prompt(messages)

    def with_preamble(self, messages: Sequence[dict[str, Any]]) -> ToyText:
        return self

    def with_sampling(self, _: Mapping[str, Any]) -> ToyText:
        return self

    def takes(self, name: str) -> bool:
        return name in self._words


def spoken(context: bytes) -> int:
    """The byte that comes next, or END."""
    told, _, said = context.partition(b"[")[2].partition(b"]")
    said = said.partition(b"assistant:")[2] if b"assistant:" in said else said
    if re.fullmatch(rb"=([0-9a-f]{2})*", told):
        told = bytes.fromhex(told[1:].decode())
    if told.startswith(b"*") and len(told) > 1:
        return told[1:][len(said) % (len(told) - 1)]
    return told[len(said)] if len(said) < len(told) else END


class Parrot:
    """A backend that reads each context back through its block table and goes on with what it is told to say."""

    device = "toy"
    own_memory = False
    states = sharing = None  # no recurrent layers, no device that others share

    def __init__(self, limits: Limits, pace: float = 0.0) -> None:
        self.kv = np.zeros((limits.num_blocks, limits.block_size), np.int64)
        self._pace = pace
        self._pools = Pools()
        self._results: dict[int, StepResult] = {}

    def prepare_in_idle(self) -> bool:
        return False

    def tell_of_compiling(self, tell: Callable[[bool], None]) -> None: ...

    def launch(self, batch: Batch) -> int:
        rows = tuple(self._row(batch, row) for row in range(len(batch.slots)))
        states = np.eye(8, dtype=np.float32)[batch.tokens % 8]
        result = StepResult(batch.step, rows)
        self._results[batch.step] = self._pools.answer(batch, result, lambda first, last: states[first:last])
        return batch.step

    def constrain(self, ticket: int, words: Ints) -> None:
        """Does nothing: what it is told to say is what the grammar asks for."""

    def wait(self, ticket: int) -> StepResult:
        time.sleep(self._pace)
        return self._results.pop(ticket)

    def is_lost(self) -> bool:
        return False

    def close(self) -> None: ...

    def _row(self, batch: Batch, row: int) -> RowResult:
        mine = slice(batch.row_start[row], batch.row_start[row + 1])
        places, table, size = batch.positions[mine], batch.tables[0, row], self.kv.shape[1]
        self.kv[table[places // size], places % size] = batch.tokens[mine]
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        scores: list[TokenLogprob] = []
        for sample in range(batch.sample_start[row], batch.sample_start[row + 1]):
            length = int(batch.positions[batch.sampled[sample]]) + 1
            context = self.kv[table[: -(-length // size)]].reshape(-1)[:length]
            target, top = int(batch.sample.target[sample]), int(batch.sample.logprobs[sample])
            token = spoken(bytes(t for t in context.tolist() if t != END)) if target < 0 else target
            entry = TokenLogprob(token, -token / 64, ((token, -token / 64), (65, -8.0), (66, -9.0))[: max(top, 0)])
            if target >= 0:
                scores.append(entry)
                continue
            tokens.append(token)
            if top >= 0:
                logprobs.append(entry)
        return RowResult(tuple(tokens), tuple(logprobs), tuple(scores))


class Reciter:
    """Drafts a request's prediction, as far as its answer is that so far."""

    def __init__(self, request: Request) -> None:
        self._left = request.prediction

    def propose(self, most: int) -> Proposal:
        tokens = self._left[:most]
        return Proposal(tokens, (0.9,) * len(tokens), PREDICTION)

    def append(self, tokens: Sequence[int]) -> None:
        count = len(tokens)
        self._left = self._left[count:] if self._left[:count] == tuple(tokens) else ()


class Reciting:
    """Drafts all that requests predict."""

    def open(self, request: Request) -> Reciter:
        return Reciter(request)

    def close(self, drafter: Drafter) -> None: ...

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> list[int]:
        chosen = []
        for proposal in proposals:
            chosen.append(min(len(proposal.tokens), budget))
            budget -= chosen[-1]
        return chosen

    def observe(self, rows: int, tokens: int, seconds: float) -> None: ...

    def observe_gap(self, rows: int, seconds: float) -> None: ...

    def halves(self, rows: int) -> bool:
        return False

    def room(self, rows: int) -> int:
        return 8

    def index(self) -> None: ...


def open_parrot() -> Engine:
    return assemble(Parrot(LIMITS), LIMITS, drafting=Reciting())  # type: ignore[arg-type]


def open_plain_parrot() -> Engine:
    """Drafts nothing, as with --speculation off."""
    return assemble(Parrot(LIMITS), LIMITS)  # type: ignore[arg-type]


def open_slow_parrot() -> Engine:
    """Takes two milliseconds a step, and a minute for an answer without end: there is a middle of a stream."""
    return open_paced_parrot(0.002)


class FreeGrammars:
    """Takes every grammar, and constrains nothing: a parrot says what the grammar asks for."""

    costs = Costs()

    def compile(self, grammar: Grammar) -> Any:
        return SimpleNamespace(begun=True, ready=True, wait=lambda seconds: None)

    def follow(self, compiling: Any, grammar: Grammar) -> Constraint:
        return Constraint.free(grammar.thinking)


def open_paced_parrot(pace: float, *, grammars: FreeGrammars | None = None, **limits: int) -> Engine:
    """Takes `pace` seconds a step."""
    paced = LIMITS._replace(**{"max_len": ENDLESS, "num_blocks": 4 * ENDLESS // LIMITS.block_size, **limits})
    return assemble(Parrot(paced, pace), paced, grammars=grammars)  # type: ignore[arg-type]


HOST = SpawnLauncher((sys.executable, __file__))

if __name__ == "__main__":
    host(lambda *_: open_slow_parrot())
