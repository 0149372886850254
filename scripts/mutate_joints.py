"""Removes guards of joints between features, one at a time, and runs the test that must turn red then.

    python scripts/mutate_joints.py [--world] [WORD ...]

Words choose guards by their names. With --world, each is also tried against the worlds that have everything on at once,
for what those find by themselves. A guard whose absence no test notices is a survivor; there must be none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "penstock"
HANGS = 200  # seconds after which a test is taken to hang: that is red, too
WORLD = "tests/everything/test_everything.py"


class Guard(NamedTuple):
    """Is a line without which two features harm each other."""

    name: str
    file: str  # within the package
    line: str  # what it says, or a part of it that stands there once
    without: str  # what stands there if the guard is missing
    test: str  # that must turn red


GUARDS = (
    Guard(
        "drafts that the loop guard cut are not computed",
        "core/scheduler.py",
        "self._advance(seq, row, min(answer.accepted, len(tokens)))",
        "self._advance(seq, row, answer.accepted)",
        "tests/core/test_drafts.py",
    ),
    Guard(
        "rows of an earlier admission are stale",
        "core/scheduler.py",
        "if plan.step < seq.admission_epoch:",
        "if False:",
        "tests/core/test_properties.py::test_each_request_answers_as_if_alone",
    ),
    Guard(
        "a preempted sequence takes back the blocks it was just given",
        "core/scheduler.py",
        "self._grown = [grown for grown in self._grown if grown.seq != seq.id]",
        "pass",
        "tests/core/test_properties.py::test_each_request_answers_as_if_alone",
    ),
    Guard(
        "a step that failed gives its states back",
        "core/scheduler.py",
        "        self.cache.states.give_back(*plan.rows)\n        failed =",
        "        failed =",
        "tests/core/test_states.py",
    ),
    Guard(
        "a step without memory takes its tokens back",
        "core/requeue.py",
        "seq.end -= 1",
        "pass",
        "tests/engine/test_memory.py",
    ),
    Guard(
        "a prompt that wants scores is computed",
        "core/sequence.py",
        "return self.prefix_cache and self.scored >= self.prompt_len",
        "return self.prefix_cache",
        "tests/core/test_properties.py::test_each_request_answers_as_if_alone",
    ),
    Guard(
        "a grammar's row knows its last token",
        "core/sequence.py",
        "(self.lockstep or self.drafted or self.awaits_drafts)",
        "(self.drafted or self.awaits_drafts)",
        "tests/engine/test_grammar.py::test_noise_becomes_what_was_asked_for",
    ),
    Guard(
        "a row behind a draft waits for it",
        "core/sequence.py",
        "(self.lockstep or self.drafted or self.awaits_drafts)",
        "(self.lockstep or self.awaits_drafts)",
        "tests/core/test_properties.py::test_each_request_answers_as_if_alone_whatever_is_drafted",
    ),
    Guard(
        "the last token is always computed",
        "core/kvcache.py",
        "seq.tokens, (len(seq.tokens) - 1) // self.block_size)",
        "seq.tokens, len(seq.tokens) // self.block_size)",
        "tests/core/test_properties.py::test_each_request_answers_as_if_alone",
    ),
    Guard(
        "a tail is forgotten when its block is taken",
        "core/kvcache.py",
        "        if self.tails:\n            self._forget_tail(block)\n",
        "",
        "tests/core/test_tails.py",
    ),
    Guard(
        "a flush forgets tails",
        "core/kvcache.py",
        "        for block in self.tails.blocks:\n            self._forget_tail(block)\n",
        "",
        "tests/core/test_tails.py",
    ),
    Guard(
        "a sequence that leaves is awaited by nobody",
        "core/kvcache.py",
        "            self._withdraw(seq, hash)\n        self.states.leave(seq)\n        seq.nodes",
        "            pass\n        self.states.leave(seq)\n        seq.nodes",
        "tests/core/test_properties.py::test_each_request_answers_as_if_alone",
    ),
    Guard(
        "places are pinned before blocks are copied in",
        "core/kvcache.py",
        "        for entry in absent:\n            self.host.pin(entry)\n        for entry in absent:\n",
        "        for entry in absent:\n            self.host.pin(entry)\n",
        "tests/core/test_properties.py::test_each_request_answers_as_if_alone",
    ),
    Guard(
        "a published block is full",
        "core/prefix.py",
        "assert len(tokens) >= end",
        "assert True",
        "tests/core/test_check.py",
    ),
    Guard(
        "new weights empty the prefix cache",
        "core/new_weights.py",
        "    scheduler.cache.flush()\n",
        "",
        "tests/core/test_new_weights.py",
    ),
    Guard(
        "KV of two weights is shared with nobody",
        "core/new_weights.py",
        "scheduler.cache.isolate(seq)",
        "pass",
        "tests/core/test_new_weights.py",
    ),
    Guard(
        "a sequence gets the salt of new weights",
        "core/new_weights.py",
        "seq.salt, seq.block_hashes, seq.awaited_hash = salts[seq.id], [], None",
        "seq.block_hashes, seq.awaited_hash = [], None",
        "tests/core/test_new_weights.py",
    ),
    Guard(
        "the ledger notes nothing of new weights",
        "engine/kv_handover/kept_kv.py",
        "        self._ledger.freeze()",
        "        pass",
        "tests/engine/test_kv_ledger.py",
    ),
    Guard(
        "steps in flight are committed before weights change",
        "engine/control/weight_updates.py",
        "        engine.drain()\n",
        "",
        "tests/engine/test_weights.py",
    ),
    Guard(
        "the end of a pause wakes the engine",
        "engine/control/pausing.py",
        "        if self._held:\n            self.engine.find(Sleeping).wake()\n",
        "",
        "tests/engine/test_sleep.py",
    ),
    Guard(
        "the disk has nothing of new weights",
        "engine/kv_disk/prefixes.py",
        "or weights.updates or record.pooling",
        "or record.pooling",
        "tests/engine/test_kv_disk.py::test_updated_weights_use_no_files",
    ),
    Guard(
        "nothing is pulled with new weights",
        "engine/kv_transfer/pulls.py",
        "        if weights.updates:\n            raise TransferRefused(NEW_WEIGHTS)\n",
        "",
        "tests/engine/test_peers.py",
    ),
    Guard(
        "a copy that failed in a pull empties the prefix cache",
        "engine/kv_transfer/pulls.py",
        "                self._distrust()\n",
        "",
        "tests/engine/test_near_peers.py",
    ),
    Guard(
        "an embedding of the first token reads the prompt's beginning",
        "engine/record.py",
        'return self.pooling in ("mean", "cls")',
        'return self.pooling == "mean"',
        "tests/engine/test_pooling.py",
    ),
    Guard(
        "KV of an adapter is its own",
        "engine/record.py",
        "self.request = self.request._replace(salt=self.request.salt + self.lease.salt)",
        "pass",
        "tests/engine/test_adapters.py",
    ),
    Guard(
        "NaN in a row empties the prefix cache",
        "engine/engine.py",
        "        if broken:\n            self.distrust_cache()",
        "        if broken:\n            pass",
        "tests/engine/test_ruled_out.py",
    ),
    Guard(
        "a copy that failed empties the prefix cache",
        "engine/engine.py",
        "            self._fail(plan, error)\n            self.distrust_cache()",
        "            self._fail(plan, error)",
        "tests/engine/test_tiers.py",
    ),
    Guard(
        "drafts have a share of a step without rows",
        "engine/drafts/speculation.py",
        "max(len(scheduler.running), 1)",
        "len(scheduler.running)",
        "tests/engine/test_memory.py",
    ),
    Guard(
        "a draft ends where its request rules out every token",
        "engine/drafts/speculation.py",
        "return draft[: max(record.sampler.possible(room.seq.tokens, draft) - 1, 0)] if draft else draft",
        "return draft",
        "tests/engine/test_ruled_out.py",
    ),
)


def mutated(guard: Guard, folder: Path) -> Path:
    """Makes a copy of the package without a guard; returns the folder to import it from."""
    shutil.copytree(PACKAGE, folder / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "penstock" / guard.file
    text = path.read_text()
    if text.count(guard.line) != 1:
        sys.exit(f"{guard.file} has {guard.line!r} {text.count(guard.line)} times: mend the table of guards")
    path.write_text(text.replace(guard.line, guard.without))
    return folder


def is_red(guard: Guard, test: str) -> bool:
    """Returns whether a test fails without a guard."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(mutated(guard, Path(folder))), "PYTHONDONTWRITEBYTECODE": "1"}
        told = subprocess.run(
            [sys.executable, "-c", "import penstock; print(penstock.__file__)"],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if not told.startswith(folder):
            sys.exit(f"{told.strip()} is imported in place of the copy in {folder}")
        every = ["-q", "-x", "-m", "long or not long", "-p", "no:cacheprovider"]
        options = [*every, f"--timeout={HANGS}", "--hypothesis-profile=unshrunk"]
        command = [sys.executable, "-m", "pytest", *options, *test.split()]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1, 3):  # 3: what was to stop a test that hangs has broken pytest itself
            sys.exit(f"{test} could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode != 0


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    survivors = []
    for guard in GUARDS:
        if words and not any(word in guard.name for word in words):
            continue
        red = is_red(guard, guard.test)
        found = f", the worlds {'see it' if is_red(guard, WORLD) else 'do not'}" if "--world" in sys.argv else ""
        print(f"{'red' if red else 'SURVIVES'}: {guard.name} ({guard.test}{found})", flush=True)
        survivors += [] if red else [guard.name]
    print(f"{len(survivors)} survivors{': ' if survivors else ''}{'; '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
