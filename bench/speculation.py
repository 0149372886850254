"""Measures draft-free speculation.

    python bench/speculation.py index TOKENIZER TEXT [--characters 1000000]
    python bench/speculation.py record MODEL PROMPTS OUT [--count 4] [--temperature 0] [--tokens 256]
    python bench/speculation.py replay --tokenizer FILE [--edits REPO:SUFFIX ...] [--prose FILE] [--agent DIR]
                                       [--answers FILE ...] [--cost cpu] [--rows 1 8]
    python bench/speculation.py online MODEL [--edits REPO:SUFFIX ...] [--prose FILE] [--agent DIR] [--answers FILE ...]
                                       [--rows 1 8] [--count 8] [--tokens 400] [--rounds 5] [--threads 2]

`index` measures the suffix automaton.

`record` lets a model answer the first `--count` prompts of each category of Spec-Bench (a JSON line each: `category`,
`turns`) and writes token ids.

`replay` drafts for recorded answers: a draft is accepted where it equals the record. It uses the engine's own drafters
and its choice of lengths. Only the seconds of steps come from a table, so it predicts what drafts are worth on any
machine. `--cost` is `cpu` (measured on two cores), `cpu-bound` (six tokens are free, the next weigh a sixth each),
`h200` (shapes of 8 to 64 tokens), or TOKENS=MILLISECONDS,... of your own.

`online` runs the records on the real engine, with drafts and without in turn: every step is computed, and what it
samples is replaced by the record (scripted.py). Prompts longer than LONGEST_PROMPT tokens are left out.

Edits are the last commits of a repository that changed one file with SUFFIX: the prompt has the old file and the
commit's subject, the answer is the new file; in `diffs` it is the unified diff. `--prose` is a text that nobody copied,
cut in pieces. `--agent` has sessions of SWE-agent (`traj_*.json`).
"""

from __future__ import annotations

import argparse
import difflib
import json
import lzma
import random
import subprocess
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scripted import Recorded, Runner, Script, described

from penstock.config import Config
from penstock.engine import build
from penstock.engine.drafts.drafting import INDEXED, Drafting, RequestDrafter, common_prefix, suffix_classes
from penstock.types import Request, SamplingParams

COSTS = {  # milliseconds by the number of tokens in a step
    "cpu": "1=3.03,2=3.58,3=4.18,4=4.51,5=6.64,8=9.19,9=9.5,16=14.8,24=20.9,32=26,40=31.5,72=53.3,136=100,264=200",
    "cpu-bound": "1=3.03,6=3.03,12=6.06,24=12.12,48=24.24,264=133",
    "h200": "1=4.07,16=4.14,64=4.36,128=4.75,256=6.79,512=13.6",
}
SHAPES = {"h200": (8, 16, 32, 64, 128, 256)}
LONGEST = 20_000  # characters of a file that is edited
COMMITS = 50
BUDGET = 256  # drafted tokens of a step
LONGEST_PROMPT = 3000  # tokens
PIECE = 1000  # tokens of prose that are an answer, after half as many that are its prompt


class Outcome(NamedTuple):
    """Says what a replay took."""

    tokens: int
    row_steps: int  # steps, counted once for each row in them
    seconds: float  # of steps, by the table
    drafting: float  # processor seconds that proposing and choosing took here


class CostTable:
    """Knows what a step costs: seconds by its number of tokens, interpolated."""

    def __init__(self, text: str, shapes: Sequence[int] = ()) -> None:
        pairs = (pair.split("=") for pair in text.split(","))
        self._known = [(int(tokens), float(ms) / 1000) for tokens, ms in pairs]
        self.shapes = shapes

    def __call__(self, tokens: int) -> float:
        tokens = next((shape for shape in self.shapes if tokens <= shape), tokens) if tokens > 1 else tokens
        at = min(max(bisect_left(self._known, (tokens,)), 1), len(self._known) - 1)
        (below, lower), (above, upper) = self._known[at - 1 : at + 1]
        return lower + (upper - lower) * (tokens - below) / (above - below)


class Stream:
    """Replays one recorded answer."""

    def __init__(self, recorded: Recorded, drafting: Drafting) -> None:
        self._answer, self._at = recorded.answer, 0
        asked = Request(0, tuple(recorded.prompt), SamplingParams(), len(recorded.answer), owner=recorded.owner)
        self.drafter: RequestDrafter = drafting.open(asked)

    @property
    def left(self) -> int:
        return len(self._answer) - self._at

    def accepted(self, draft: Sequence[int]) -> int:
        """Returns how many drafted tokens equal the record."""
        return common_prefix(draft, self._answer[self._at : self._at + len(draft)])

    def next(self, count: int) -> list[int]:
        """Returns the next tokens of the record."""
        self._at += count
        return self._answer[self._at - count : self._at]


class Replay:
    """Answers recorded requests, some at a time, and counts what that takes."""

    def __init__(self, table: CostTable, rows: int, most: int, noise: float) -> None:
        self._table, self._rows, self._most, self._noise = table, rows, most, noise
        self._chance = random.Random(0)
        self._drafting = Drafting(table.shapes)
        self._tokens = self._row_steps = 0
        self._seconds = self._spent = 0.0

    def run(self, records: Sequence[Recorded]) -> Outcome:
        waiting, running = list(reversed(records)), list[Stream]()
        while waiting or running:
            while waiting and len(running) < self._rows:
                running.append(Stream(waiting.pop(), self._drafting))
                self._drafting.index(1 << 30)
            self._step(running)
            for stream in [stream for stream in running if not stream.left]:
                self._drafting.close(stream.drafter)
                running.remove(stream)
            self._drafting.index()
        return Outcome(self._tokens, self._row_steps, self._seconds, self._spent)

    def _step(self, running: Sequence[Stream]) -> None:
        rows, began = len(running), time.thread_time()
        drafts = self._drafts(running) if self._most else [()] * rows
        self._spent += time.thread_time() - began
        size = rows + sum(map(len, drafts))
        seconds = self._table(size)
        self._drafting.observe(rows, size, seconds * (1 + self._noise * self._chance.expovariate(1.0)))
        self._seconds += seconds
        self._row_steps += rows
        for stream, draft in zip(running, drafts, strict=True):
            committed = stream.next(1 + stream.accepted(draft))
            began = time.thread_time()
            stream.drafter.append(committed)
            self._spent += time.thread_time() - began
            self._tokens += len(committed)

    def _drafts(self, running: Sequence[Stream]) -> list[tuple[int, ...]]:
        proposals = [stream.drafter.propose(min(self._most, stream.left - 1)) for stream in running]
        lengths = self._drafting.lengths(proposals, len(running), len(running), BUDGET)
        return [proposal.tokens[:length] for proposal, length in zip(proposals, lengths, strict=True)]


def git(repository: str, *words: str) -> str:
    done = subprocess.run(["git", "-C", repository, *words], capture_output=True, check=False)
    return done.stdout.decode(errors="replace")


def edited_files(repository: str, suffix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yields (subject, path, old, new) of the first fitting file of each of the last commits."""
    words = (
        "log",
        "--no-merges",
        "--diff-filter=M",
        "--format=@%H %s",
        "--name-only",
        "-n",
        "2000",
        "--",
        f"*{suffix}",
    )
    found, commit, subject = 0, "", ""
    for line in git(repository, *words).splitlines():
        if line.startswith("@"):
            commit, _, subject = line[1:].partition(" ")
        elif line.endswith(suffix) and commit and found < COMMITS:
            old, new = (git(repository, "show", f"{at}:{line}") for at in (f"{commit}^", commit))
            if min(len(old), len(new)) > 1000 and max(len(old), len(new)) < LONGEST:
                yield subject, line, old, new
                found, commit = found + 1, ""


class Reader:
    """Reads what is replayed. `encode` turns text into token ids."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.encode = encode

    @classmethod
    def of_file(cls, path: str) -> Reader:
        """Returns a reader with the tokenizer of a tokenizer.json, which may be compressed."""
        from tokenizers import Tokenizer

        data = Path(path).read_bytes()
        tokenizer = Tokenizer.from_str((lzma.decompress(data) if path.endswith(".xz") else data).decode())
        return cls(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def edits(self, repositories: Sequence[str]) -> dict[str, list[Recorded]]:
        """Returns whole new files and diffs."""
        kinds: dict[str, list[Recorded]] = {"edits": [], "diffs": []}
        for name in repositories:
            for subject, path, old, new in edited_files(*name.rsplit(":", 1)):
                prompt = self.encode(f"{subject}\n\nEdit {path}:\n```\n{old}```\n")
                diff = "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), path, path))
                kinds["edits"].append(Recorded(prompt, self.encode(new), str(len(kinds["edits"]))))
                kinds["diffs"].append(Recorded(prompt, self.encode(diff), str(len(kinds["diffs"]))))
        return kinds

    def prose(self, path: str, pieces: int = 16) -> list[Recorded]:
        """Returns pieces of a text, each with what comes before it as its prompt."""
        text = Path(path).read_text(errors="replace")
        ids = self.encode(text[len(text) // 4 :][: pieces * PIECE * 8])
        cuts = [ids[at : at + PIECE * 3 // 2] for at in range(0, pieces * PIECE * 3 // 2, PIECE * 3 // 2)]
        return [
            Recorded(cut[: PIECE // 2], cut[PIECE // 2 :], str(at)) for at, cut in enumerate(cuts) if len(cut) > PIECE
        ]

    def agent(self, folder: str) -> list[Recorded]:
        """Returns every turn of an agent, with the session before it as its prompt."""
        turns = []
        for path in sorted(Path(folder).glob("traj_*.json")):
            session = ""
            for message in json.loads(path.read_text())["history"]:
                content = message["content"] if isinstance(message["content"], str) else json.dumps(message["content"])
                session += f"\n{message['role']}: "
                if message["role"] == "assistant":
                    content += json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
                    turns.append(Recorded(self.encode(session), self.encode(content), path.name))
                session += content
        return turns


def answers(path: str) -> list[Recorded]:
    """Returns the answers that `record` wrote."""
    lines = (json.loads(line) for line in Path(path).read_text().splitlines())
    return [Recorded(line["prompt"], line["answer"], str(at)) for at, line in enumerate(lines)]


def kinds_of(args: argparse.Namespace, reader: Reader | None) -> dict[str, list[Recorded]]:
    """Returns the records that were asked for, by kind."""
    kinds: dict[str, list[Recorded]] = {}
    if reader is not None:
        kinds |= reader.edits(args.edits) if args.edits else {}
        kinds |= {"agent": reader.agent(args.agent)} if args.agent else {}
        kinds |= {"prose": reader.prose(args.prose)} if args.prose else {}
    return kinds | {Path(path).stem: answers(path) for path in args.answers}


def run_online(args: argparse.Namespace) -> None:
    """Runs records on the real engine, with drafts and without in turn."""
    from penstock.model.load import load_text

    build.assemble = partial(build.assemble, more=(Script(),))  # type: ignore[assignment]
    engine = build.open_engine(Config(model=args.model, threads=args.threads, max_len=8192))
    runner, tokenizer = Runner(engine), load_text(Path(args.model)).tokenizer
    for kind, records in kinds_of(args, Reader(tokenizer.encode)).items():
        fit = [each for each in records if len(each.prompt) <= LONGEST_PROMPT and len(each.answer) >= args.tokens]
        for rows in args.rows:
            some = [each._replace(answer=each.answer[: args.tokens]) for each in fit[: max(args.count, rows)]]
            print(f"{kind}, {rows} rows: {described(*runner.compare(some, rows, args.rounds))}", flush=True)


def replay_all(args: argparse.Namespace) -> None:
    reader = Reader.of_file(args.tokenizer) if args.tokenizer else None
    for kind, records in kinds_of(args, reader).items():
        for cost in args.cost:
            table = CostTable(COSTS.get(cost, cost), SHAPES.get(cost, ()))
            for rows in args.rows:
                tell(kind, cost, rows, records, table, args)


def tell(
    kind: str, cost: str, rows: int, records: Sequence[Recorded], table: CostTable, args: argparse.Namespace
) -> None:
    """Prints one line: how many tokens a step gives and how much faster that is than without drafts."""
    plain, found = (Replay(table, rows, most, args.noise).run(records) for most in (0, args.most))
    print(
        f"{kind:>10} {cost:>10} {rows:3} rows: {found.tokens:7} tokens, {found.tokens / found.row_steps:5.2f} a step "
        f"and row, {plain.seconds / found.seconds:5.3f}x; drafting {1e6 * found.drafting / found.row_steps:.1f} us",
        flush=True,
    )


def measure_index(args: argparse.Namespace) -> None:
    """Prints what the suffix automaton costs: to build, to hold and to ask."""
    text = Reader.of_file(args.tokenizer).encode(Path(args.text).read_text(errors="replace")[: args.characters])
    new_index, new_cursor = suffix_classes()
    built, asked, followed = [], [], []
    for _ in range(args.rounds):
        index, began = new_index(len(text) + len(text[:1000])), time.thread_time()
        for at in range(0, len(text), INDEXED):
            index.extend(text[at : at + INDEXED])
        built.append(time.thread_time() - began)
        began = time.thread_time()
        for token in text[:1000]:
            index.extend((token,))
            index.continuation(16)
        asked.append(time.thread_time() - began)
        cursor, began = new_cursor(index), time.thread_time()
        for token in text[-1000:]:
            cursor.advance((token,))
            cursor.continuation(16)
        followed.append(time.thread_time() - began)
    print(
        f"{len(text)} tokens: {1e6 * min(built) / len(text):.3f} us and {index.nbytes / len(index):.0f} bytes a token; "
        f"a step {1e3 * min(asked):.2f} us in its own text, {1e3 * min(followed):.2f} us in another"
    )


def record_all(args: argparse.Namespace) -> None:
    """Lets a model answer prompts, and writes the token ids of both."""
    from penstock import LLM, SamplingParams

    chosen: dict[str, list[str]] = {}
    for line in Path(args.prompts).read_text().splitlines():
        prompt = json.loads(line)
        chosen.setdefault(prompt["category"], []).append(prompt["turns"][0])
    messages = [[{"role": "user", "content": text}] for texts in chosen.values() for text in texts[: args.count]]
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, seed=1)
    with LLM(args.model) as llm, Path(args.out).open("w") as out:
        for found in llm.chat(messages, sampling, use_tqdm=False):
            ids = {"prompt": list(found.prompt_token_ids), "answer": list(found.outputs[0].token_ids)}
            print(json.dumps(ids), file=out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(required=True)
    records = argparse.ArgumentParser(add_help=False)
    records.add_argument("--edits", action="append", default=[], metavar="REPO:SUFFIX")
    records.add_argument("--prose")
    records.add_argument("--agent")
    records.add_argument("--answers", action="append", default=[])
    records.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    mode = modes.add_parser("online", parents=[records])
    mode.add_argument("model")
    mode.add_argument("--count", type=int, default=8, help="records of each kind")
    mode.add_argument("--tokens", type=int, default=400, help="of each answer")
    mode.add_argument("--rounds", type=int, default=5)
    mode.add_argument("--threads", type=int, default=0)
    mode.set_defaults(run=run_online)
    mode = modes.add_parser("replay", parents=[records])
    mode.add_argument("--tokenizer")
    mode.add_argument("--cost", nargs="+", default=list(COSTS))
    mode.add_argument("--most", type=int, default=64, help="drafted tokens of a row at most")
    mode.add_argument("--noise", type=float, default=0.1, help="mean share by which steps are measured too long")
    mode.set_defaults(run=replay_all)
    mode = modes.add_parser("index")
    mode.add_argument("tokenizer")
    mode.add_argument("text")
    mode.add_argument("--characters", type=int, default=1_000_000)
    mode.add_argument("--rounds", type=int, default=5)
    mode.set_defaults(run=measure_index)
    mode = modes.add_parser("record")
    for name in ("model", "prompts", "out"):
        mode.add_argument(name)
    mode.add_argument("--count", type=int, default=4)
    mode.add_argument("--temperature", type=float, default=0.0)
    mode.add_argument("--tokens", type=int, default=256)
    mode.set_defaults(run=record_all)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    run: Callable[[argparse.Namespace], None] = args.run
    run(args)


if __name__ == "__main__":
    main()
