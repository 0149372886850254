"""Scores pairs of texts and classifies texts, in the shapes of vLLM, Jina, Cohere, llama.cpp and TEI."""

from __future__ import annotations

from penstock.server.http.endpoint import Dialect, RouteEntry

ROUTES = (
    RouteEntry("POST", "/score", ".score:score", ".score:SCORE"),
    RouteEntry("POST", "/v1/score", ".score:score", ".score:SCORE"),
    RouteEntry("POST", "/classify", ".classify:classify", ".classify:CLASSIFY"),
    RouteEntry("POST", "/predict", ".classify:classify", ".classify:CLASSIFY"),
    RouteEntry("POST", "/embed", ".tei:embed", ".tei:TEI_EMBED"),
    RouteEntry("POST", "/similarity", ".tei:similarity", ".tei:SIMILARITY"),
    RouteEntry("POST", "/rerank", ".rerank:rerank", ".rerank:RERANK"),
    RouteEntry("POST", "/v1/rerank", ".rerank:rerank", ".rerank:RERANK"),
    RouteEntry("POST", "/v2/rerank", ".rerank:rerank_as_cohere", ".rerank:RERANK"),
    RouteEntry("POST", "/reranking", ".rerank:rerank", ".rerank:RERANK"),
    RouteEntry("POST", "/v1/reranking", ".rerank:rerank", ".rerank:RERANK"),
)
DIALECT = Dialect("rerank", __name__, ROUTES, title="rerank")
