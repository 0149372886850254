"""Lists the routes that score pairs, classify and embed, in the shapes of other engines."""

from __future__ import annotations

from penstock.server.dialects.rerank.classify import CLASSIFY, classify
from penstock.server.dialects.rerank.rerank import RERANK, rerank
from penstock.server.dialects.rerank.score import SCORE, score
from penstock.server.dialects.rerank.tei import SIMILARITY, TEI_EMBED, embed, similarity
from penstock.server.http.endpoint import RouteEntry

ROUTES = (
    RouteEntry("POST", "/score", score, SCORE),
    RouteEntry("POST", "/v1/score", score, SCORE),
    RouteEntry("POST", "/classify", classify, CLASSIFY),
    RouteEntry("POST", "/predict", classify, CLASSIFY),
    RouteEntry("POST", "/embed", embed, TEI_EMBED),
    RouteEntry("POST", "/similarity", similarity, SIMILARITY),
    RouteEntry("POST", "/rerank", rerank, RERANK),
    RouteEntry("POST", "/v1/rerank", rerank, RERANK),
    RouteEntry("POST", "/v2/rerank", rerank, RERANK),
    RouteEntry("POST", "/reranking", rerank, RERANK),
    RouteEntry("POST", "/v1/reranking", rerank, RERANK),
)
