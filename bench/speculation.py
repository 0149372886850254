"""Measures draft-free speculation.

    python bench/speculation.py record MODEL PROMPTS OUT [--count 4] [--temperature 0] [--tokens 256]
    python bench/speculation.py replay --tokenizer FILE [--edits REPO:SUFFIX ...] [--prose FILE] [--agent DIR]
                                       [--answers FILE ...] [--cost cpu] [--rows 1 8]

`record` lets a model answer the first `--count` prompts of each category of Spec-Bench (a JSON line each: `category`,
`turns`) and writes token ids.

`replay` drafts for recorded answers: a draft is accepted where it equals the record. It uses the engine's own drafters
and its choice of lengths. Only the seconds of steps come from a table, so it predicts what drafts are worth on any
machine. `--cost` is `cpu` (measured on two cores), `cpu-bound` (six tokens are free, the next weigh a sixth each),
`h200` (shapes of 8 to 64 tokens), or TOKENS=MILLISECONDS,... of your own.

Edits are the last commits of a repository that changed one file with SUFFIX: the prompt has the old file and the
commit's subject, the answer is the new file; in `diffs` it is the unified diff. `--prose` is a text that nobody copied,
cut in pieces. `--agent` has sessions of SWE-agent (`traj_*.json`).
"""

from __future__ import annotations

import argparse
import difflib
import json
import lzma
import subprocess
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.core.speculation import DraftPlanner, StepCost
from penstock.engine.drafting import Drafting, RequestDrafter, common_prefix
from penstock.types import Request, SamplingParams

COSTS = {  # milliseconds by the number of tokens in a step
    "cpu": "1=3.03,2=3.58,3=4.18,4=4.51,5=6.64,8=9.19,9=9.5,16=14.8,24=20.9,32=26,40=31.5,72=53.3,136=100,264=200",
    "cpu-bound": "1=3.03,6=3.03,12=6.06,24=12.12,48=24.24,264=133",
    "h200": "1=4.07,16=4.14,64=4.36,128=4.75,256=6.79,512=13.6",
}
SHAPES = {"h200": (8, 16, 32, 64, 128, 256)}
LONGEST = 20_000  # characters of a file that is edited
COMMITS = 50
PIECE = 1000  # tokens of prose that are an answer, after half as many that are its prompt


class Recorded(NamedTuple):
    """Holds a prompt and the answer that it got."""

    prompt: list[int]
    answer: list[int]
    owner: str  # recent answers of the same owner may be drafted from


class Outcome(NamedTuple):
    """Says what a replay took."""

    tokens: int
    row_steps: int  # steps, counted once for each row in them
    seconds: float  # of steps, by the table
    drafting: float  # processor seconds that proposing and choosing took here

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.row_steps


class CostTable:
    """Knows what a step costs: seconds by its number of tokens, interpolated."""

    def __init__(self, text: str, shapes: Sequence[int] = ()) -> None:
        pairs = (pair.split("=") for pair in text.split(","))
        self._known = [(int(tokens), float(ms) / 1000) for tokens, ms in pairs]
        self._shapes = shapes

    def __call__(self, tokens: int) -> float:
        tokens = next((shape for shape in self._shapes if tokens <= shape), tokens) if tokens > 1 else tokens
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

    def commit(self, count: int) -> None:
        self.drafter.append(self._answer[self._at : self._at + count])
        self._at += count


def replay(records: Sequence[Recorded], table: CostTable, planner: DraftPlanner, rows: int, most: int) -> Outcome:
    """Answers all requests, `rows` at a time, with at most `most` drafted tokens a row."""
    drafting, waiting, running = Drafting(), list(reversed(records)), list[Stream]()
    tokens = row_steps = 0
    seconds = spent = 0.0
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(Stream(waiting.pop(), drafting))
            drafting.index(1 << 30)
        began = time.thread_time()
        proposals = [stream.drafter.propose(min(most, stream.left - 1)) for stream in running] if most else []
        lengths = planner.lengths(proposals, len(running), len(running), 256) if most else [0] * len(running)
        spent += time.thread_time() - began
        took = table(len(running) + sum(lengths))
        planner.cost.observe(len(running), len(running) + sum(lengths), took)
        seconds += took
        row_steps += len(running)
        for stream, length, proposal in zip(list(running), lengths, proposals or lengths, strict=True):
            accepted = stream.accepted(proposal.tokens[:length]) if most else 0
            began = time.thread_time()
            stream.commit(accepted + 1)
            spent += time.thread_time() - began
            tokens += accepted + 1
            if not stream.left:
                drafting.close(stream.drafter)
                running.remove(stream)
        drafting.index()
    return Outcome(tokens, row_steps, seconds, spent)


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
    """Reads what is replayed."""

    def __init__(self, tokenizer: str) -> None:
        from tokenizers import Tokenizer

        data = Path(tokenizer).read_bytes()
        self._tokenizer = Tokenizer.from_str((lzma.decompress(data) if tokenizer.endswith(".xz") else data).decode())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

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


def replay_all(args: argparse.Namespace) -> None:
    kinds: dict[str, list[Recorded]] = {}
    if args.tokenizer:
        reader = Reader(args.tokenizer)
        kinds |= reader.edits(args.edits)
        kinds |= {"agent": reader.agent(args.agent)} if args.agent else {}
        kinds |= {"prose": reader.prose(args.prose)} if args.prose else {}
    kinds |= {Path(path).stem: answers(path) for path in args.answers}
    for kind, records in kinds.items():
        for cost in args.cost:
            table = CostTable(COSTS.get(cost, cost), SHAPES.get(cost, ()))
            for rows in args.rows:
                tell(kind, cost, rows, records, table, args)


def tell(
    kind: str, cost: str, rows: int, records: Sequence[Recorded], table: CostTable, args: argparse.Namespace
) -> None:
    """Prints one line: how many tokens a step gives and how much faster that is than without drafts."""
    shapes = SHAPES.get(cost, ())
    slope = 0.02 if shapes else 0.15
    plain = replay(records, table, DraftPlanner(StepCost()), rows, 0)
    found = replay(records, table, DraftPlanner(StepCost(slope=slope, shapes=shapes)), rows, args.most)
    lookup = 1e6 * found.drafting / found.row_steps
    print(
        f"{kind:>10} {cost:>10} {rows:3} rows: {found.tokens:7} tokens, {found.tokens_per_step:5.2f} a step and row, "
        f"{plain.seconds / found.seconds:5.3f}x; drafting {lookup:.1f} us a step and row",
        flush=True,
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
    mode = modes.add_parser("replay")
    mode.add_argument("--tokenizer")
    mode.add_argument("--edits", action="append", default=[], metavar="REPO:SUFFIX")
    mode.add_argument("--prose")
    mode.add_argument("--agent")
    mode.add_argument("--answers", action="append", default=[])
    mode.add_argument("--cost", nargs="+", default=list(COSTS))
    mode.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    mode.add_argument("--most", type=int, default=64, help="drafted tokens of a row at most")
    mode.set_defaults(run=replay_all)
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
