"""Trains a small EAGLE-3 head for a model and writes it as vLLM and SGLang publish them.

The model answers questions, and the head learns to say its next tokens: from the residual streams of three layers, and
then from its own states, as it will draft. Answers and streams come from this engine; the head is trained with torch,
which the project itself does not need:

    python scripts/train_eagle_head.py OUT --questions questions.jsonl

`questions.jsonl` has lines like {"turns": ["..."]}, as those of MT-bench and Spec-Bench. Every eighth question is held
out; the last lines say how often the head is right there, by depth. The same seed gives the same head on the same
machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from penstock import LLM, SamplingParams
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.model.dequantize import dequantize
from penstock.model.load import Checkpoint, load_model, open_checkpoint
from penstock.store import fetch

BLOCK_SIZE = 16
HELD_OUT = 8  # one question in so many is for the test


class Text(NamedTuple):
    """Holds an answer with what came before it, and the model's states: [T, 4 * dim], of three layers and the last."""

    tokens: list[int]
    prompt: int  # tokens
    states: np.ndarray


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    path = fetch(options.model)
    checkpoint, began = open_checkpoint(path), time.perf_counter()
    if options.keep and options.keep.exists():
        stored = torch.load(options.keep, weights_only=False)
        texts = [[shortened(Text(*one), options.length) for one in each] for each in stored]
    else:
        texts = make_texts(path, checkpoint, options)
        if options.keep:
            torch.save([[tuple(one) for one in each] for each in texts], options.keep)
    print(f"texts after {time.perf_counter() - began:.0f} s", flush=True)
    learned = [text for at, each in enumerate(texts) if at % HELD_OUT for text in each]
    tested = [each[0] for at, each in enumerate(texts) if not at % HELD_OUT]
    head = Head(checkpoint, frequent(learned, options.vocab, checkpoint.spec.vocab))
    train(head, learned, options)
    print(f"trained after {time.perf_counter() - began:.0f} s", flush=True)
    save(head, checkpoint, options.out)
    for depth, share in enumerate(test(head, tested, options)):
        print(f"depth {depth + 1}: {share:.3f} of the tokens right, if all before were")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="a file for answers and states, which are read from there next time")
    parser.add_argument("--answers", type=int, default=2, help="of each question: one greedy, the others sampled")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--length", type=int, default=112, help="tokens of a text that are learned from, its last ones")
    parser.add_argument("--vocab", type=int, default=4096, help="tokens that the head can draft")
    parser.add_argument("--depth", type=int, default=2, help="steps that the head is trained to draft")
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# -- what the model says -------------------------------------------------------------------------------------------


def make_texts(path: Path, checkpoint: Checkpoint, options: argparse.Namespace) -> list[list[Text]]:
    """Returns the answers to each question, with states."""
    asked = [json.loads(line)["turns"][0] for line in options.questions.open(encoding="utf-8")]
    answers = answer(path, asked, options)
    said = sum(len(tokens) - prompt for one in answers for tokens, prompt in one)
    print(f"{said:,} tokens answered", flush=True)
    states = States(checkpoint, options.length, options.threads)
    return [[states.text(*one) for one in each] for each in answers]


def shortened(text: Text, length: int) -> Text:
    """Returns the last tokens of a text."""
    cut = max(len(text.tokens) - length, 0)
    return Text(text.tokens[cut:], max(text.prompt - cut, 0), text.states[cut:])


def answer(path: Path, asked: Sequence[str], options: argparse.Namespace) -> list[list[tuple[list[int], int]]]:
    """Returns the answers to each question: all tokens, and how many of them are the prompt's."""
    llm = LLM(str(path), threads=options.threads, max_len=1536, max_rows=32, speculation="off")
    chats = [[{"role": "user", "content": text[:900]}] for text in asked]
    found: list[list[tuple[list[int], int]]] = [[] for _ in asked]
    for number in range(options.answers):
        params = SamplingParams(
            temperature=0.7 if number else 0.0, seed=options.seed + number, max_tokens=options.tokens
        )
        for one, output in zip(found, llm.chat(chats, params, use_tqdm=False), strict=True):
            prompt = list(output.prompt_token_ids)
            one.append((prompt + list(output.outputs[0].token_ids), len(prompt)))
    return found


class Streams:
    """Is the model with its residual streams before three layers, and its last state, in place of logits."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self._model, self._layers = model, layers

    def forward(self, ops: Any) -> Any:
        ends = self._model.ends
        x, residual, found = ends.enter(ops), None, None
        for at, layer in enumerate(self._model.layers):
            if at in self._layers:
                stream = x if residual is None else ops.add(x, residual)
                found = stream if found is None else ops.concat(found, stream)
            x, residual = layer(ops, x, residual)
        return ops.concat(found, ends.norm(ops, x, residual)[0])


class States:
    """Computes the states of texts."""

    def __init__(self, checkpoint: Checkpoint, length: int, threads: int) -> None:
        self._backend = CpuBackend(threads)
        self._backend.load(Streams(load_model(checkpoint, self._backend), layers_of(checkpoint)))
        self._backend.reserve_kv(2048 // BLOCK_SIZE, BLOCK_SIZE)
        self._length = length

    def text(self, tokens: list[int], prompt: int) -> Text:
        """Returns the last tokens of a text with their states."""
        batch = greedy_batch([Chunk(tokens, 0, range(-(-len(tokens) // BLOCK_SIZE)))])
        return shortened(Text(tokens, prompt, self._backend.logits(batch).astype(np.float16)), self._length)


def layers_of(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Returns the layers before which a head takes the residual stream, where its config says nothing."""
    layers = checkpoint.spec.layers
    return 2, layers // 2, layers - 3


def frequent(texts: Sequence[Text], count: int, vocab: int) -> Tensor:
    """Returns the most frequent tokens of the answers, in ascending order; the lowest fill what is left."""
    seen = Counter(token for text in texts for token in text.tokens[text.prompt :])
    chosen = [token for token, _ in seen.most_common(count)]
    chosen += [token for token in range(vocab) if token not in seen][: count - len(chosen)]
    return torch.tensor(sorted(chosen))


# -- the head ------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """Computes an RMS norm."""

    def __init__(self, gain: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(gain.clone()), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


class Head(nn.Module):
    """Is an EAGLE-3 head whose weights begin as those of the model's last layer."""

    def __init__(self, checkpoint: Checkpoint, tokens: Tensor) -> None:
        super().__init__()
        spec, weight = checkpoint.spec, weights_of(checkpoint)
        last, self.spec, self.tokens = f"layers.{spec.layers - 1}", spec, tokens
        self.embed = weight("embed")
        self.target_head = (self.embed if spec.tied else weight("head"))[tokens]
        self.fc = nn.Parameter(torch.cat([torch.zeros(spec.dim, 2 * spec.dim), torch.eye(spec.dim) / 10], 1))
        old = {part: weight(f"{last}.{part}") for part in ("q", "k", "v", "o", "gate", "up", "down")}
        for part in "qkv":
            old[part] = torch.cat([torch.randn_like(old[part]) * spec.dim**-0.5 / 4, old[part]], 1)
        self.parts = nn.ParameterDict(old)
        self.lm_head = nn.Parameter(self.target_head.clone())
        self.embed_norm = Norm(torch.ones(spec.dim), spec.eps)
        self.hidden_norm = Norm(weight(f"{last}.attn_norm"), spec.eps)
        self.mlp_norm = Norm(weight(f"{last}.mlp_norm"), spec.eps)
        self.norm = Norm(weight("norm"), spec.eps)
        self.inv_freq = torch.tensor(spec.attn.rope.inv_freq, dtype=torch.float32)

    def layer(self, tokens: Tensor, hidden: Tensor, at: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the stream after the layer, [B, L, dim], for step `at` of a draft that begins at each of L positions.
        `cache` has the keys and values of the steps before: a row sees those of step 0 up to its beginning, and of the
        others those of its own draft."""
        a, (batch, length) = self.spec.attn, tokens.shape
        x = torch.cat([self.embed_norm(functional.embedding(tokens, self.embed)), self.hidden_norm(hidden)], -1)
        q, k, v = (functional.linear(x, self.parts[part]).view(batch, length, -1, a.head_dim) for part in "qkv")
        angles = (torch.arange(length) + at)[:, None] * self.inv_freq
        q, k = (rotated(each, angles) for each in (q, k))
        cache.append(tuple(each.repeat_interleave(a.heads // a.kv_heads, 2).transpose(1, 2) for each in (k, v)))
        mixed = attend(q.transpose(1, 2), cache, a.head_dim**-0.5)
        stream = hidden + functional.linear(mixed.transpose(1, 2).flatten(2), self.parts["o"])
        y = self.mlp_norm(stream)
        gated = functional.silu(functional.linear(y, self.parts["gate"])) * functional.linear(y, self.parts["up"])
        return stream + functional.linear(gated, self.parts["down"])

    def drafts(self, tokens: Tensor, states: Tensor, depth: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, for each step of drafts that begin at every position, the stream of the head, [B, L, dim], and the
        last state of the model in its place."""
        dim, length = self.spec.dim, tokens.shape[1] - depth - 1
        hidden = functional.linear(states[:, :length, : 3 * dim].float(), self.fc)
        cache: list[tuple[Tensor, Tensor]] = []
        for at in range(depth):
            hidden = self.layer(tokens[:, 1 + at : 1 + at + length], hidden, at, cache)
            yield hidden, states[:, 1 + at : 1 + at + length, 3 * dim :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the tokens that the head can draft."""
        return functional.linear(self.norm(hidden), self.lm_head).float()

    def target_logits(self, state: Tensor) -> Tensor:
        """Returns the model's logits of the same tokens."""
        return functional.linear(state.float(), self.target_head).float()


def weights_of(checkpoint: Checkpoint) -> Any:
    """Returns what looks up a tensor by its canonical name, with the rows of q and k in Hugging Face's order."""
    a = checkpoint.spec.attn

    def weight(name: str) -> Tensor:
        values = torch.from_numpy(np.array(dequantize(checkpoint.tensors[name]), np.float32))
        if name.endswith((".q", ".k")) and a.rope.interleaved:
            values = values.view(-1, a.head_dim // 2, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        return values

    return weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Returns x, [B, L, heads, head_dim], rotated by these angles, [L, head_dim / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q: Tensor, cache: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Returns what the queries of the last step see, [B, heads, L, head_dim]; see `Head.layer`."""
    length = q.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    scores = [(q @ cache[0][0].transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)]
    scores += [(q * k).sum(-1, keepdim=True) * scale for k, _ in cache[1:]]
    weights = torch.cat(scores, -1).softmax(-1)
    mixed = weights[..., :length] @ cache[0][1]
    for number, (_, v) in enumerate(cache[1:]):
        mixed = mixed + weights[..., length + number, None] * v
    return mixed


# -- training ------------------------------------------------------------------------------------------------------


def train(head: Head, texts: Sequence[Text], options: argparse.Namespace) -> None:
    """Trains the head to give tokens the probabilities that the model gives them."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.rate, weight_decay=0.01, betas=(0.9, 0.95))
    began, random = time.perf_counter(), np.random.default_rng(options.seed)
    for step in range(options.steps):
        fading = (1 + math.cos(math.pi * step / options.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * fading)
        batch = [texts[at] for at in random.choice(len(texts), options.batch, replace=False)]
        losses = losses_of(head, *stacked(batch, options.depth), options.depth)
        optimizer.zero_grad()
        sum(0.8**at * each for at, each in enumerate(losses)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            values = " ".join(f"{each.item():.3f}" for each in losses)
            print(f"step {step + 1}, {time.perf_counter() - began:.0f} s, losses by depth: {values}", flush=True)


def stacked(texts: Sequence[Text], depth: int, answers: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, states, and which tokens count: all, or those of `answers`. Short texts are padded."""
    length = max(max(len(text.tokens) for text in texts), depth + 2)
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    states = torch.zeros(len(texts), length, texts[0].states.shape[1], dtype=torch.float16)
    counted = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        states[row, : len(text.tokens)] = torch.from_numpy(text.states)
        counted[row, text.prompt if answers else 0 : len(text.tokens)] = True
    return tokens, states, counted


def losses_of(head: Head, tokens: Tensor, states: Tensor, counted: Tensor, depth: int) -> list[Tensor]:
    """Returns, by depth, the cross entropy of the model's probabilities and the head's, over the tokens that count."""
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for at, (hidden, state) in enumerate(head.drafts(tokens, states, depth)):
            mask = counted[:, 2 + at : 2 + at + hidden.shape[1]]
            wanted = head.target_logits(state[mask]).softmax(-1)
            losses.append(-(wanted * head.logits(hidden[mask]).log_softmax(-1)).sum(-1).mean())
    return losses


@torch.no_grad()
def test(head: Head, texts: Sequence[Text], options: argparse.Namespace) -> list[float]:
    """Returns how often the head's most likely token was the one that came, by depth, where all before were."""
    right, all_rows = [0] * options.depth, [0] * options.depth
    for text in texts:
        tokens, states, counted = stacked([text], options.depth, answers=True)
        alive: Tensor | None = None
        for at, (hidden, _) in enumerate(head.drafts(tokens, states, options.depth)):
            came = tokens[:, 2 + at : 2 + at + hidden.shape[1]]
            mask = counted[:, 2 + at : 2 + at + hidden.shape[1]]
            hit = head.tokens[head.logits(hidden).argmax(-1)] == came
            alive = mask if alive is None else alive & mask
            right[at] += int((hit & alive).sum())
            all_rows[at] += int(alive.sum())
            alive = alive & hit
    return [hits / max(rows, 1) for hits, rows in zip(right, all_rows, strict=True)]


def save(head: Head, checkpoint: Checkpoint, out: Path) -> None:
    """Writes the head: its weights in F16, without the embeddings, which are the model's."""
    spec, a = checkpoint.spec, checkpoint.spec.attn
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    tensors = {f"midlayer.{name}.weight": head.parts[part] for part, name in names.items()}
    tensors |= {
        "fc.weight": head.fc,
        "midlayer.input_layernorm.weight": head.embed_norm.weight,
        "midlayer.hidden_norm.weight": head.hidden_norm.weight,
        "midlayer.post_attention_layernorm.weight": head.mlp_norm.weight,
        "norm.weight": head.norm.weight,
        "lm_head.weight": head.lm_head,
    }
    known = torch.zeros(spec.vocab, dtype=torch.bool)
    known[head.tokens] = True
    out.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}
    save_file(stored | {"d2t": head.tokens - torch.arange(len(head.tokens)), "t2d": known}, out / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": spec.dim,
        "intermediate_size": spec.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": spec.eps,
        "rope_theta": float(a.rope.inv_freq[1] ** (-a.head_dim / 2)),
        "hidden_act": "silu",
        "vocab_size": spec.vocab,
        "draft_vocab_size": len(head.tokens),
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
