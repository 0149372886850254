"""What is fetched from a repository is what `penstock plan` says fits, by headers alone."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import run
from sys import executable

import pytest

from penstock.cli.app import run_command
from penstock.cli.fitting import MemoryAdvisor, plan_fit, plan_in_child, with_stored_quantize
from penstock.errors import ConfigError, DownloadError
from penstock.store import PlannedFit, hub, outline
from penstock.store.fitting import choose_planned
from penstock.store.paths import Entry, ModelPaths, write_record
from penstock.store.refs import HubRepo

GB = 10**9
LAYERS, DIM, HIDDEN, VOCAB = 32, 4096, 11008, 32000  # about 6.7 billion weights
PLAIN = 2 * (LAYERS * (4 * DIM * DIM + 3 * DIM * HIDDEN + 2 * DIM) + 2 * VOCAB * DIM + DIM)  # bytes as BF16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def header() -> bytes:
    """The header of a safetensors file with the weights of a large model, whose bytes follow it nowhere."""
    layer = {f"self_attn.{name}_proj": (DIM, DIM) for name in "qo"}
    layer |= {f"self_attn.{name}_proj": (1024, DIM) for name in "kv"}
    layer |= {"mlp.gate_proj": (HIDDEN, DIM), "mlp.up_proj": (HIDDEN, DIM), "mlp.down_proj": (DIM, HIDDEN)}
    layer |= {"input_layernorm": (DIM,), "post_attention_layernorm": (DIM,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, DIM), "lm_head.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    entries, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


HEADS = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": header()}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The files of a repository with a large model; only their beginnings can be fetched."""
    monkeypatch.setattr(outline, "_fetch", lambda repo, revision, name, count: HEADS[Path(name).name][:count])
    monkeypatch.setattr(outline, "SAFETENSORS_HEADER", 100)  # so that the rest of the header is fetched, too
    return {"config.json": len(HEADS["config.json"]), "model.safetensors": len(header()) + PLAIN, "tokenizer.json": 9}


class Told(MemoryAdvisor):
    def __init__(self, force: bool = False) -> None:
        super().__init__({"device": "cpu", "max_rows": 1}, force)
        self.lines: list[str] = []

    def tell(self, text: str) -> None:
        self.lines.append(text)


def needed(sizes: dict[str, int], advisor: Told) -> hub.NeededFiles:
    return hub.RepoFiles(HubRepo("team/large"), sizes, "main", advisor).needed()


@pytest.mark.parametrize(("memory", "quantize"), [(64 * GB, ""), (12 * GB, "q8_0"), (6 * GB, "q4_k")])
def test_plain_weights_are_quantized_as_the_plan_says(
    large: dict[str, int], monkeypatch: pytest.MonkeyPatch, memory: int, quantize: str
) -> None:
    monkeypatch.setattr("penstock.backend.base.available_memory", lambda: memory)
    advisor = Told()
    assert needed(large, advisor) == (sorted(large), quantize)
    begin = f"hf:team/large: --quantize {quantize} is used: plain weights leave too little room; weights "
    assert [line[: len(begin)] for line in advisor.lines] == ([begin] if quantize else [])


def test_plain_weights_that_fit_in_no_way_are_refused_unless_forced(
    large: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.backend.base.available_memory", lambda: 2 * GB)
    with pytest.raises(ConfigError, match=r"hf:team/large does not fit, with no --quantize either: .*pull --force"):
        needed(large, Told())
    assert needed(large, Told(force=True)) == (sorted(large), "")


def test_a_name_that_leads_out_of_the_folder_is_refused(large: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="leads out of its folder"):
        outline.write_outline("team/odd", "main", ["../config.json"], {"../config.json": 9}, tmp_path / "here")
    assert not (tmp_path / "config.json").exists()


def test_a_child_plans_the_same(reciter: Path) -> None:
    engine = {"device": "ref", "max_len": 64}
    here, there = plan_fit(reciter, engine), plan_in_child(reciter, engine)
    assert here is not None
    assert there is not None
    assert (there.fits, there.roomy, there.quantize) == (True, True, "")
    assert there.summary.partition(" fit in")[0] == here.summary.partition(" fit in")[0]


def test_the_first_preferred_quantization_with_room_is_chosen() -> None:
    sizes = {"Q2_K": 3 * GB, "Q4_K_M": 5 * GB, "Q4_0": 4 * GB, "Q8_0": 9 * GB}
    roomy, tight, none = PlannedFit(True, "", True), PlannedFit(True, ""), PlannedFit(False, "")

    def chosen(**fits: PlannedFit) -> tuple[str, list[str]]:
        asked = []

        def plan(name: str) -> PlannedFit:
            asked.append(name)
            return fits[name]

        found = choose_planned(sizes, plan)
        assert found is not None
        return found.name, asked

    assert chosen(Q4_K_M=roomy) == ("Q4_K_M", ["Q4_K_M"])
    assert chosen(Q4_K_M=none, Q4_0=tight, Q2_K=roomy) == ("Q2_K", ["Q4_K_M", "Q4_0", "Q2_K"])
    assert chosen(Q4_K_M=none, Q4_0=tight, Q2_K=tight)[0] == "Q4_0"
    assert chosen(Q4_K_M=none, Q4_0=none, Q2_K=none) == ("Q2_K", ["Q4_K_M", "Q4_0", "Q2_K"])  # Q8_0 is larger
    assert choose_planned(sizes, lambda _: None) is None


def test_a_stored_model_is_loaded_with_the_quantize_that_it_was_fetched_for(own_store: Path) -> None:
    paths = ModelPaths(own_store, "hf:team/large")
    paths.folder.mkdir(parents=True)
    (paths.folder / "config.json").write_bytes(b"{}")
    write_record(paths, Entry(paths.name, paths.name, paths.folder, 2, "", "2026", "q4_k"))
    assert with_stored_quantize(paths.folder, {"quantize": "", "threads": 1}) == {"quantize": "q4_k", "threads": 1}
    assert with_stored_quantize(paths.folder, {"quantize": "q8_0"}) == {"quantize": "q8_0"}
    assert with_stored_quantize(own_store, {"quantize": ""}) == {"quantize": ""}


class Ranges(BaseHTTPRequestHandler):
    """Serves a repository's files, and the parts of them that are asked for."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    ranges: list[str]

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/team/tiny"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
            return self.answer(json.dumps({"id": "team/tiny", "sha": "c" * 40, "siblings": siblings}).encode())
        content = self.files[self.path.rpartition("/")[2]]
        if span := self.headers.get("Range"):
            self.ranges.append(f"{self.path.rpartition('/')[2]} {span}")
            return self.answer(content[: int(span.rpartition("-")[2]) + 1], 206)
        self.answer(content)

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def quantized_hub(reciter: Path, tmp_path: Path) -> Iterator[str]:
    """A hub with a repository of two GGUF files."""
    for format in ("q8_0", "q4_0"):
        assert run_command("quantize", [str(reciter), str(tmp_path / f"tiny-{format}.gguf"), "--to", format]) == 0
    Ranges.files = {file.name: file.read_bytes() for file in tmp_path.glob("tiny-*.gguf")}
    Ranges.ranges = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Ranges) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pull_says_what_was_chosen_and_why(quantized_hub: str, own_store: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": quantized_hub, "HF_HOME": str(own_store), "NO_PROXY": "127.0.0.1"}
    words = [executable, "-m", "penstock", "pull", "team/tiny"]
    done = run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert Path(done.stdout.strip()).name == "tiny-q8_0.gguf"
    said = done.stderr.splitlines()[0]
    assert said.startswith("hf:team/tiny: Q8_0 is chosen of Q4_0, Q8_0; weights ")
    assert "KV for a context of 4,096 tokens fit in the" in said
    assert [asked.partition(" ")[0] for asked in Ranges.ranges] == ["tiny-q8_0.gguf"]
