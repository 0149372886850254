"""Lists the routes of kept streams."""

from __future__ import annotations

from penstock.server.access.rights import Right
from penstock.server.http.endpoint import AnyRouteEntry, ServerRouteEntry
from penstock.server.streams.endpoints import DELETE_STREAM, READ_STREAM, StreamEndpoints


def streaming(streams: StreamEndpoints) -> tuple[AnyRouteEntry, ...]:
    """Returns the routes of streams whose clients come back."""
    return (
        ServerRouteEntry("GET", "/v1/streams/{id}", streams.read, READ_STREAM, right=Right.READ),
        ServerRouteEntry("DELETE", "/v1/streams/{id}", streams.delete, DELETE_STREAM),
    )
