"""Rerankers, classifiers and an embedding model behind the routes of vLLM, Jina, Cohere, llama.cpp and TEI: the scores
are those of transformers, and what a model cannot do is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient

from penstock.config import Config
from penstock.engine.build import open_engine
from penstock.ipc.inprocess import InProcessClient
from penstock.model.load import load_text
from tests.server.test_fuzz import document, fuzz, nothing_is_left, requested

MODELS = Path(__file__).parents[1] / "models"
FOLDERS = {
    "ranker": MODELS / "classifiers" / "bert",
    "labels": MODELS / "classifiers" / "bert_labels",
    "yes_no": MODELS / "classifiers" / "yes_no",
    "embedder": MODELS / "encoders" / "bert",
}
RERANKS = ["/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"]
QUERY, DOCUMENTS = "the river", ["wheels", "rivers, rivers.", "a bridge"]


@pytest.fixture(scope="module")
def servers(serve: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        found = {}
        for name, path in FOLDERS.items():
            config = Config(model=str(path), device="cpu", threads=1, kv="f32", block_size=16)
            client = InProcessClient(lambda config=config: open_engine(config), name)
            found[name] = stack.enter_context(serve(client, load_text(path), name, path))
        yield found


@pytest.fixture(scope="module")
def ranker(servers: dict[str, Any]) -> Any:
    return servers["ranker"]


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDERS[name] / "expected.npz") as file:
        return dict(file)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x.astype(np.float64))
    return powers / powers.sum(-1, keepdims=True)


def close(got: Any, wanted: np.ndarray) -> bool:
    return bool(np.abs(np.array(got) - wanted).max() < 1e-5)


def relevance(server: Any, query: str, documents: list[str]) -> list[float]:
    answer = server.post("/score", text_1=query, text_2=documents).json()
    return [entry["score"] for entry in answer["data"]]


# -- score --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("name", ["ranker", "yes_no"])
def test_scores_are_those_of_transformers(servers: dict[str, Any], name: str, path: str) -> None:
    expected = golden(name)
    firsts, seconds = (list(each) for each in zip(*expected["pairs"].tolist(), strict=True))
    answer = servers[name].post(path, model=name, text_1=firsts, text_2=seconds).json()
    assert close([entry["score"] for entry in answer["data"]], sigmoid(expected["pair_logits"][:, 0]))
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    assert (answer["object"], answer["model"]) == ("list", name)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 30
    later = servers[name].post(path, queries=firsts, documents=seconds).json()
    assert [entry["score"] for entry in later["data"]] == [entry["score"] for entry in answer["data"]]
    raw = servers[name].post(path, text_1=firsts, text_2=seconds, use_activation=False).json()
    assert close([entry["score"] for entry in raw["data"]], expected["pair_logits"][:, 0])


def test_the_openai_sdk_can_ask_for_scores(ranker: Any) -> None:
    body = {"model": "ranker", "text_1": QUERY, "text_2": DOCUMENTS}
    answer = ranker.sdk().post("/score", body=body, cast_to=object)
    assert [entry["score"] for entry in answer["data"]] == relevance(ranker, QUERY, DOCUMENTS)


def test_embeddings_are_compared_by_cosine(servers: dict[str, Any]) -> None:
    expected, server = golden("embedder"), servers["embedder"]
    texts = expected["texts"].tolist()[:3]
    wanted = expected["vectors"][:3] @ expected["vectors"][0]
    assert close(relevance(server, texts[0], texts), wanted)
    results = server.post("/v1/rerank", query=texts[0], documents=texts).json()["results"]
    assert [entry["index"] for entry in results] == np.argsort(-wanted).tolist()


# -- rerank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RERANKS)
def test_documents_come_in_the_order_of_their_relevance(ranker: Any, path: str) -> None:
    wanted = relevance(ranker, QUERY, DOCUMENTS)
    order = sorted(range(3), key=lambda at: -wanted[at])
    answer = ranker.post(path, model="ranker", query=QUERY, documents=DOCUMENTS).json()
    assert [entry["index"] for entry in answer["results"]] == order
    assert [entry["relevance_score"] for entry in answer["results"]] == [wanted[at] for at in order]
    assert answer["id"]
    assert answer["object"] == "list"
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    shown = [entry.get("document") for entry in answer["results"]]
    assert shown == ([None] * 3 if path == "/v2/rerank" else [{"text": DOCUMENTS[at]} for at in order])


def test_jinas_fields(ranker: Any) -> None:
    objects = [{"text": text, "title": "ignored"} for text in DOCUMENTS]
    whole = ranker.post("/v1/rerank", query=QUERY, documents=DOCUMENTS).json()["results"]
    assert ranker.post("/v1/rerank", query=QUERY, documents=objects).json()["results"] == whole
    best = ranker.post("/v1/rerank", query=QUERY, documents=objects, top_n=1, return_documents=False).json()
    assert best["results"] == [{key: whole[0][key] for key in ("index", "relevance_score")}]
    assert ranker.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=0).json()["results"] == whole
    assert ranker.post("/v2/rerank", query=QUERY, documents=objects, return_documents=True).json()["results"] == whole
    raw = ranker.post("/rerank", query=QUERY, documents=DOCUMENTS, use_activation=False).json()["results"]
    assert close(sigmoid(np.array([entry["relevance_score"] for entry in raw])), [e["relevance_score"] for e in whole])


def test_coheres_sdk(ranker: Any) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=ranker.url)
    answer = client.rerank(model="ranker", query=QUERY, documents=DOCUMENTS, top_n=2, max_tokens_per_doc=40)
    wanted = relevance(ranker, QUERY, DOCUMENTS)
    assert [entry.relevance_score for entry in answer.results] == sorted(wanted, reverse=True)[:2]


def test_tei_ranks_texts(ranker: Any) -> None:
    wanted = relevance(ranker, QUERY, DOCUMENTS)
    ranks = ranker.post("/rerank", query=QUERY, texts=DOCUMENTS).json()
    assert [entry["score"] for entry in ranks] == sorted(wanted, reverse=True)
    assert [wanted[entry["index"]] for entry in ranks] == sorted(wanted, reverse=True)
    assert all(entry.keys() == {"index", "score"} for entry in ranks)
    raw = ranker.post("/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True).json()
    assert close(sigmoid(np.array([entry["score"] for entry in raw])), np.array(sorted(wanted, reverse=True)))
    assert [entry["text"] for entry in raw] == [DOCUMENTS[entry["index"]] for entry in raw]


def test_a_document_that_is_too_long_is_refused_or_cut(ranker: Any) -> None:
    long = "a " * 80
    refused = ranker.post("/rerank", query=QUERY, documents=["b", long])
    assert refused.status_code == 400
    assert "documents[1] and the query have 85 tokens and the context holds 64" in refused.json()["error"]["message"]
    fits = relevance(ranker, QUERY, ["a " * 59])
    for how in ({"truncate": True}, {"truncation": True}, {"max_tokens_per_doc": 70}, {"truncate_prompt_tokens": -1}):
        [entry] = ranker.post("/rerank", query=QUERY, documents=[long], **how).json()["results"]
        assert entry["relevance_score"] == fits[0]
    [entry] = ranker.post("/rerank", query=QUERY, documents=[long], truncate_prompt_tokens=20).json()["results"]
    assert entry["relevance_score"] == relevance(ranker, QUERY, ["a " * 15])[0]
    assert len(ranker.post("/rerank", query=QUERY, texts=[long], truncate=True).json()) == 1
    [entry] = ranker.post("/rerank", query=QUERY, documents=[long], max_tokens_per_doc=15).json()["results"]
    assert entry["relevance_score"] == relevance(ranker, QUERY, ["a " * 15])[0]
    [entry] = ranker.post("/v2/rerank", query=QUERY, documents=[long]).json()["results"]
    assert entry["relevance_score"] == fits[0]
    assert ranker.post("/v2/rerank", query=QUERY, documents=[long], truncate=False).status_code == 400


# -- generative rerankers -----------------------------------------------------------------------------------------


def test_the_querys_kv_is_shared_by_all_documents(servers: dict[str, Any]) -> None:
    query = "river " * 35  # with what the template writes before it, at least two blocks of 16 tokens
    answer = servers["yes_no"].post("/rerank", query=query, documents=DOCUMENTS).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2 * 32


def test_an_instruction_reaches_the_template(servers: dict[str, Any]) -> None:
    plain = servers["yes_no"].post("/score", text_1=QUERY, text_2="b").json()["data"]
    told = servers["yes_no"].post("/score", text_1=QUERY, text_2="b", instruction="find").json()["data"]
    other = servers["yes_no"].post("/score", text_1=QUERY, text_2="b", instruction="sort").json()["data"]
    assert plain == told != other
    refused = servers["ranker"].post("/score", text_1=QUERY, text_2="b", instruction="find")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "instruction"


def test_a_long_document_is_cut_within_its_place_in_the_template(servers: dict[str, Any]) -> None:
    cut, fits = (
        servers["yes_no"].post("/score", text_1=QUERY, text_2="a " * count, truncate_prompt_tokens=-1).json()
        for count in (100, 55)
    )
    assert cut["data"] == fits["data"]
    assert cut["usage"]["prompt_tokens"] == 64


def test_a_reranker_still_generates(servers: dict[str, Any]) -> None:
    assert servers["yes_no"].post("/v1/completions", model="yes_no", prompt="the", max_tokens=2).status_code == 200


# -- classify -----------------------------------------------------------------------------------------------------


def test_classes_are_those_of_transformers(servers: dict[str, Any]) -> None:
    expected = golden("labels")
    wanted, names = softmax(expected["text_logits"]), ["no", "maybe", "yes"]
    texts = expected["texts"].tolist()
    data = servers["labels"].post("/classify", model="labels", input=texts).json()["data"]
    assert close([entry["probs"] for entry in data], wanted)
    assert [entry["label"] for entry in data] == [names[at] for at in wanted.argmax(1)]
    assert [(entry["index"], entry["num_classes"]) for entry in data] == [(0, 3), (1, 3)]
    ids = servers["labels"].post("/tokenize", prompt=texts[0]).json()["tokens"]
    assert servers["labels"].post("/classify", input=ids).json()["data"] == data[:1]
    raw = servers["labels"].post("/classify", input=texts[0], use_activation=False).json()["data"]
    assert close(raw[0]["probs"], expected["text_logits"][0])


def test_tei_predicts_texts_and_pairs(servers: dict[str, Any]) -> None:
    expected, server = golden("labels"), servers["labels"]
    texts, pairs = softmax(expected["text_logits"]), softmax(expected["pair_logits"])
    given = [[expected["texts"].tolist()[0]], expected["pairs"].tolist()[0]]
    both = server.post("/predict", inputs=given).json()
    for found, wanted in zip(both, (texts[0], pairs[0]), strict=True):
        assert close([entry["score"] for entry in found], np.sort(wanted)[::-1])
    assert server.post("/predict", inputs=given[0][0]).json() == both[0]
    assert server.post("/classify", inputs=given[1]).json() == both[1]
    raw = server.post("/predict", inputs=given[1], raw_scores=True).json()
    assert close([entry["score"] for entry in raw], np.sort(expected["pair_logits"][0])[::-1])
    assert len(server.post("/predict", inputs="a " * 80, truncate=True).json()) == 3


def test_hugging_faces_client(servers: dict[str, Any]) -> None:
    expected = golden("labels")
    client = InferenceClient(f"{servers['labels'].url}/predict")
    found = client.text_classification(expected["texts"].tolist()[1], top_k=2, function_to_apply="sigmoid")
    assert close([entry.score for entry in found], np.sort(sigmoid(expected["text_logits"][1]))[::-1][:2])
    vectors = golden("embedder")
    texts = vectors["texts"].tolist()[:3]
    client = InferenceClient(f"{servers['embedder'].url}/embed")
    assert close(client.feature_extraction(texts[0])[0], vectors["vectors"][0])
    client = InferenceClient(f"{servers['embedder'].url}/similarity")
    found = client.sentence_similarity(texts[0], other_sentences=texts[1:])
    assert close(found, vectors["vectors"][1:3] @ vectors["vectors"][0])


def test_tei_embeds(servers: dict[str, Any]) -> None:
    expected, server = golden("embedder"), servers["embedder"]
    texts = expected["texts"].tolist()[:2]
    assert close(server.post("/embed", inputs=texts).json(), expected["vectors"][:2])
    [short] = server.post("/embed", inputs=texts[0], dimensions=8).json()
    assert close(short, expected["vectors"][0][:8] / np.linalg.norm(expected["vectors"][0][:8]))
    [state] = server.post("/embed", inputs=texts[0], normalize=False).json()
    assert close(state / np.linalg.norm(state), expected["vectors"][0])
    assert np.linalg.norm(state) > 1.1
    cut, fits = (server.post("/embed", inputs="a " * count, truncate=True).json() for count in (60, 48))
    assert cut == fits


# -- what is refused ----------------------------------------------------------------------------------------------


def test_what_a_model_cannot_do_is_refused(servers: dict[str, Any], parrot: Any) -> None:
    for server, path, body, message in (
        (parrot, "/rerank", {"query": "a", "documents": ["b"]}, "no classification head, and no template"),
        (parrot, "/score", {"text_1": "a", "text_2": "b"}, "no classification head, and no template"),
        (parrot, "/classify", {"input": "a"}, "this model cannot classify"),
        (parrot, "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "an embedding model"),
        (servers["labels"], "/rerank", {"query": "a", "documents": ["b"]}, "3 labels (no, maybe, yes...) and a score"),
        (servers["embedder"], "/classify", {"input": "a"}, "this model cannot classify"),
        (servers["ranker"], "/v1/completions", {"model": "ranker", "prompt": "a"}, "which returns embeddings and no"),
    ):
        answer = server.post(path, **body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"], path


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "queries": "a", "documents": "b"}, "text_1"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "documents"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/classify", {}, "input"),
        ("/classify", {"input": ""}, "input"),
        ("/classify", {"inputs": ["a", "b", "c"]}, "inputs"),
        ("/classify", {"inputs": "a", "parameters": {"function_to_apply": "tanh"}}, "parameters.function_to_apply"),
        ("/embed", {"inputs": []}, "inputs"),
    ],
)
def test_what_makes_no_sense_is_named(ranker: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = ranker.post(path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_another_model_is_not_found(ranker: Any) -> None:
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/classify", {"input": "a"})):
        assert ranker.post(path, model="gone", **body).status_code == 404
    assert isinstance(ranker.post("/rerank", model="gone", query="a", documents=["b"]), httpx.Response)


# -- fuzzing ------------------------------------------------------------------------------------------------------

SHORT = {"type": "string", "minLength": 1, "maxLength": 12}
SCORABLE = {  # what a request may have in it and still be answered
    "query": SHORT,
    "text_1": SHORT,
    "text_2": {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
    "documents": {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
    "input": SHORT,
    "inputs": SHORT,
}


def test_random_requests_are_answered_or_refused(ranker: Any, tmp_path: Path) -> None:
    """The toy that all routes are fuzzed with has no head: here the same routes reach one."""
    paths = ("/score", "/rerank", "/classify", "/embed")
    told = document(ranker)
    told["paths"] = {path: told["paths"][path] for path in paths}
    for fields in requested(told):
        for name in {*fields} & {*SCORABLE} - ({"inputs"} if "input" in fields else set()):
            fields[name] = SCORABLE[name]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    how = ("--phases", "fuzzing", "--mode", "positive", "--max-examples", "25", "--checks", checks)
    assert fuzz(ranker, told, tmp_path, *how) >= 50
    nothing_is_left(ranker)
