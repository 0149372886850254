"""What each precision costs and gives on a GPU: memory, speed, and mean KL divergence to 32 bits, on real text.

    python bench/precision.py inputs MODEL.gguf TEXT inputs.json      # anywhere: the CPU backend and a tokenizer
    python bench/precision.py run MODEL.gguf inputs.json --json precision.json      # on a GPU, with torch alone

The truth is the file's own values, computed in float32 by torch. Its weights were 4 bits once, in groups of 32 columns:
quantized again, formats with the same groups would find the same codes and seem perfect. So the order of the model's
dimensions is shuffled first, which changes none of its answers, and dimensions of nothing but zeros fill its rows up
to multiples of 256, which K-quants need. Every matrix, embedding and head too, is then rounded to each format, plainly:
llama.cpp looks for better scales and loses less, and a model of 135 million loses far more than one of 8 billion: the
figures compare formats, they do not foretell what another model loses. KL(truth || Penstock) is the mean over windows
of 512 tokens, run whole ("prompt") and token by token, all windows side by side ("answer"): not the same kernels.

Memory and speed are those of random weights in the shape of Llama-3.1-8B.

Greedy answers to chat prompts, from the file as it is, are compared with those of the CPU backend: where they first
differ, and by how many nats each of the two prefers its own token there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    inputs = steps.add_parser("inputs")
    inputs.add_argument("model", type=Path)
    inputs.add_argument("text", type=Path)
    inputs.add_argument("out", type=Path)
    inputs.add_argument("--windows", type=int, default=9, help="of 512 tokens")
    run = steps.add_parser("run")
    run.add_argument("model", type=Path)
    run.add_argument("inputs", type=Path)
    run.add_argument("--json", type=Path, default=Path("precision.json"))
    run.add_argument("--kinds", default="", help="some, with commas")
    run.add_argument("--skip", default="", help="kl, speed, greedy: some, with commas")
    run.add_argument("--layers", type=int, default=32, help="of the model that is timed")
    run.add_argument("--device", default="cuda", help="cpu: Triton's interpreter, to rehearse a few tokens")
    run.add_argument("--window", type=int, default=512, help="tokens of a window that are used")
    given = parser.parse_args()
    sys.path[0] = str(Path(__file__).parent / "gpu")  # torch imports a package called cuda and must not find that file
    if given.step == "inputs":
        from precision_inputs import make

        make(given.model, given.text, given.out, given.windows)
    else:
        from precision_cells import run as measure

        measure(given)


if __name__ == "__main__":
    main()
