"""Draws requests of every dialect, with everything that can be asked for at once."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.traffic.material import Material, Message

MODEL = "smollm2"


@dataclass(frozen=True)
class Wish:
    """Says what a request asks for, in the words of no dialect."""

    messages: tuple[Message, ...]
    temperature: float
    limit: int | None
    seed: int | None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    penalties: dict[str, float] = field(default_factory=dict)
    prediction: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    forced: bool = False  # a call must be made
    schema: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "\n\n".join(str(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Ask:
    """Is a request of one dialect. `leave_after` is how many pieces of the answer its client reads before it leaves."""

    dialect: str
    path: str
    wish: Wish
    body: dict[str, Any]
    stream: bool
    leave_after: int | None = None
    ours: bool = True  # nothing in it may be refused or ignored

    @property
    def repeatable(self) -> bool:
        """Says whether every answer must be the same."""
        return self.wish.temperature == 0 or self.wish.seed is not None

    @property
    def limit(self) -> int | None:
        """Is the most tokens of each choice, if there is a limit."""
        return self.wish.limit or DIALECTS[self.dialect].limit

    @property
    def key(self) -> str:
        retried = self.stream and self.wish.schema is not None and not self.ours  # only whole answers are
        return f"{self.path} {retried} {json.dumps(self.body, sort_keys=True)}"

    @property
    def sent(self) -> dict[str, Any]:
        """Is the body as sent."""
        usage = {"stream_options": {"include_usage": True}} if self.stream and self.dialect in ("chat", "text") else {}
        return {**self.body, "stream": self.stream, **usage}

    def curl(self, url: str) -> str:
        words = ["curl", "-sN", f"{url}{self.path}", "-H", "content-type: application/json", "-d"]
        return shlex.join([*words, json.dumps(self.sent, ensure_ascii=False)])


def _set(**fields: Any) -> dict[str, Any]:
    """Returns the fields that ask for something."""
    return {name: value for name, value in fields.items() if value not in (None, (), [], {}, "")}


def _functions(wish: Wish) -> list[dict[str, Any]]:
    return [{"type": "function", "function": tool} for tool in wish.tools]


def _format(wish: Wish) -> dict[str, Any] | None:
    return wish.schema and {"type": "json_schema", "name": "answer", "schema": wish.schema}


def chat(wish: Wish) -> dict[str, Any]:
    form = wish.schema and {"type": "json_schema", "json_schema": {"name": "answer", "schema": wish.schema}}
    return _set(
        messages=wish.messages,
        max_tokens=wish.limit,
        seed=wish.seed,
        stop=wish.stop,
        n=wish.n if wish.n > 1 else None,
        logprobs=wish.logprobs is not None or None,
        top_logprobs=wish.logprobs,
        tools=_functions(wish),
        tool_choice="required" if wish.forced else None,
        response_format=form,
        prediction=wish.prediction and {"type": "content", "content": wish.prediction},
        **wish.penalties,
    )


def text(wish: Wish) -> dict[str, Any]:
    form = {"json": wish.schema} if wish.schema else None
    n = wish.n if wish.n > 1 else None
    fields = _set(max_tokens=wish.limit, seed=wish.seed, stop=wish.stop, n=n, logprobs=wish.logprobs)
    return {"prompt": wish.text, **fields, **_set(structured_outputs=form), **wish.penalties}


def responses(wish: Wish) -> dict[str, Any]:
    form = _format(wish)
    return _set(
        input=wish.messages,
        store=False,
        max_output_tokens=wish.limit,
        seed=wish.seed,
        tools=[{"type": "function", **tool} for tool in wish.tools],
        tool_choice="required" if wish.forced else None,
        text=form and {"format": form},
    )


def messages(wish: Wish) -> dict[str, Any]:
    told = [message for message in wish.messages if message["role"] != "system"]
    form = wish.schema and {"format": {"type": "json_schema", "schema": wish.schema}}
    return _set(
        messages=told,
        system="\n".join(str(message["content"]) for message in wish.messages if message["role"] == "system"),
        max_tokens=wish.limit or 100,
        stop_sequences=wish.stop,
        tools=[
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in wish.tools
        ],
        tool_choice={"type": "any"} if wish.forced else None,
        output_config=form,
    )


def _options(wish: Wish) -> dict[str, Any]:
    return _set(num_predict=wish.limit, seed=wish.seed, stop=wish.stop, **wish.penalties)


def ollama_chat(wish: Wish) -> dict[str, Any]:
    fields = _set(messages=wish.messages, tools=_functions(wish), format=wish.schema)
    return fields | {"options": {"temperature": wish.temperature, **_options(wish)}}


def ollama_text(wish: Wish) -> dict[str, Any]:
    options = {"temperature": wish.temperature, **_options(wish)}
    return {"prompt": wish.text, "options": options, **_set(format=wish.schema)}


def llamacpp(wish: Wish) -> dict[str, Any]:
    fields = _set(seed=wish.seed, stop=wish.stop, n_probs=wish.logprobs, json_schema=wish.schema)
    return {"prompt": wish.text, **_set(n_predict=wish.limit), **fields, **wish.penalties}


@dataclass(frozen=True)
class Dialect:
    """Says how a dialect asks, and which wishes it can express."""

    path: str
    body: Callable[[Wish], dict[str, Any]]
    knows: frozenset[str]
    weight: int
    limit: int | None = None  # the most tokens of an answer if a request names no limit


EVERYTHING = frozenset({"seed", "stop", "n", "logprobs", "penalties", "prediction", "tools", "forced", "schema"})
DIALECTS = {
    "chat": Dialect("/v1/chat/completions", chat, EVERYTHING, 5),
    "text": Dialect("/v1/completions", text, EVERYTHING - {"prediction", "tools", "forced"}, 2, limit=16),
    "responses": Dialect("/v1/responses", responses, frozenset({"seed", "tools", "forced", "schema"}), 2),
    "messages": Dialect("/v1/messages", messages, frozenset({"stop", "tools", "forced", "schema"}), 3, limit=100),
    "ollama chat": Dialect("/api/chat", ollama_chat, frozenset({"seed", "stop", "penalties", "tools", "schema"}), 2),
    "ollama text": Dialect("/api/generate", ollama_text, frozenset({"seed", "stop", "penalties", "schema"}), 1),
    "llama.cpp": Dialect("/completion", llamacpp, EVERYTHING - {"n", "prediction", "tools", "forced"}, 2),
}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repeat_penalty": 1.1}
STOPS = (("\n",), (".", "?"), (" the",), ("</end>",))


class Drawer:
    """Draws requests. Many are drawn again, streamed or not."""

    def __init__(self, material: Material, random: Random, again: float = 0.4) -> None:
        self._material, self._random, self._again = material, random, again
        self._drawn: list[Ask] = []

    def draw(self) -> Ask:
        random = self._random
        if self._drawn and random.random() < self._again:
            ask = random.choice(self._drawn)
        else:
            ask = self._new()
            self._drawn.append(ask)
        leave_after = random.randrange(4) if random.random() < 0.07 else None
        return replace(ask, stream=random.random() < 0.6, leave_after=leave_after)

    def lasting(self) -> Ask:
        """Draws a stream of many tokens whose answers are all the same."""
        while True:
            ask = self._new()
            if ask.repeatable and ask.wish.schema is None and not ask.wish.stop:
                return with_limit(replace(ask, stream=True), self._random.randrange(60, 120))

    def _new(self) -> Ask:
        random = self._random
        name = random.choices([*DIALECTS], [dialect.weight for dialect in DIALECTS.values()])[0]
        return replace(ask_for(name, self._wish(DIALECTS[name].knows)), ours=self._material.ours)

    def _wish(self, knows: frozenset[str]) -> Wish:
        random, material = self._random, self._material
        temperature = 0.0 if random.random() < 0.6 else 1.0
        seed = random.randrange(2**31) if "seed" in knows and random.random() < 0.75 else None
        limit = random.choice([1, 2, 8, 16, 24, 32, 48, 64, 64, 200])
        wish = Wish(random.choice(material.conversations), temperature, limit, seed, **self._extras(knows))
        if temperature == 0 and wish.n == 1 and not wish.penalties and random.random() < 0.08:
            wish = replace(wish, limit=None)  # the loop guard ends its answer, if nothing else does
        if "schema" in knows and random.random() < 0.2:
            return replace(wish, schema=random.choice(material.schemas), stop=(), limit=random.choice([24, 64, 160]))
        if "tools" in knows and random.random() < 0.3:
            asked, tools = random.choice(material.tool_sets)
            return replace(wish, messages=asked, tools=tools, forced="forced" in knows and random.random() < 0.4)
        return wish

    def _extras(self, knows: frozenset[str]) -> dict[str, Any]:
        random = self._random
        all_extras: dict[str, Callable[[], Any]] = {
            "stop": lambda: random.choice(STOPS),
            "n": lambda: random.choice([2, 3]),
            "logprobs": lambda: random.choice([1, 3]),
            "penalties": lambda: dict([random.choice([*PENALTIES.items()])]),
            "prediction": lambda: random.choice(self._material.conversations)[-1]["content"][:400],
        }
        return {name: draw() for name, draw in all_extras.items() if name in knows and random.random() < 0.15}


def ask_for(dialect: str, wish: Wish) -> Ask:
    about = DIALECTS[dialect]
    temperature = {} if dialect.startswith("ollama") else {"temperature": wish.temperature}
    return Ask(dialect, about.path, wish, {"model": MODEL, **about.body(wish), **temperature}, stream=False)


def with_limit(ask: Ask, limit: int) -> Ask:
    wish = replace(ask.wish, limit=limit)
    return replace(ask, wish=wish, body=ask_for(ask.dialect, wish).body)
