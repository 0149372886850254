"""Every error that a user can see.

PenstockError                 code, message; one line, no traceback at the command line
├── InvalidRequest            the request is invalid                            HTTP 400
│   ├── ContextTooLong        prompt and answer do not fit in the context
│   ├── InvalidGrammar        the schema, regex or grammar cannot be enforced
│   ├── AdapterError          the adapter does not fit the model, or its name is in use
│   └── WeightsError          the new weights do not match the loaded ones
├── NotSupported              the route of another server is not implemented    HTTP 501
├── Unauthorized              the API key is missing or wrong                   HTTP 401
├── Forbidden                 the client lacks the right for this request       HTTP 403
├── RateLimited               the key's limit is reached                        HTTP 429
│   └── WaitTooLong           the expected wait for the first token is too long
├── NotFound                  no such object                                    HTTP 404
│   ├── Gone                  the object was deleted or has expired             HTTP 410
│   ├── ModelNotFound         no such model, here or at its source
│   └── AdapterNotFound       no such adapter
├── ModelError                the model's files are damaged or not supported
│   ├── MalformedFile         the file is damaged: truncated, wrong magic, offsets outside ...
│   └── UnsupportedModel      the file is well-formed, but its model is not supported
├── DownloadError             a model could not be fetched or did not match its checksum
├── ConfigError               settings contradict each other or this machine
│   └── KvLossTooLarge        a KV cache below 16 bits changes predictions too much
├── KvLayoutMismatch          KV blocks come from a cache with another layout
├── StepFailed                the request's step failed                         HTTP 500
│   ├── PoisonedRequest       the request killed the engine process each time it ran
│   ├── OutOfMemory           memory ran out
│   └── NotFinite             the logits are not finite
├── Overloaded                the limit of waiting requests is reached          HTTP 503
├── EngineUnavailable         the engine process is starting, restarting or gone  HTTP 503
│   └── DeviceLost            the device failed, and its process must be restarted
└── StorageFailed             files and batches cannot be read or written       HTTP 500

A message has the problem, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator


class PenstockError(Exception):
    code = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(PenstockError):
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, prompt_tokens: int | None = None, context: int | None = None
    ) -> None:
        """Takes the numbers too, where they are known: some clients read them."""
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.context = context


class InvalidGrammar(InvalidRequest):
    code = "invalid_grammar"


class AdapterError(InvalidRequest):
    code = "invalid_adapter"


class WeightsError(InvalidRequest):
    code = "invalid_weights"


class NotSupported(PenstockError):
    code = "not_supported"


class Unauthorized(PenstockError):
    code = "invalid_api_key"


class Forbidden(PenstockError):
    code = "permission_denied"


class RateLimited(PenstockError):
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class WaitTooLong(RateLimited):
    code = "wait_too_long"


class NotFound(PenstockError):
    code = "not_found"


class Gone(NotFound):
    code = "gone"


class ModelNotFound(NotFound):
    code = "model_not_found"


class AdapterNotFound(NotFound):
    code = "adapter_not_found"


class ModelError(PenstockError):
    code = "model_error"


class MalformedFile(ModelError):
    code = "malformed_file"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class DownloadError(PenstockError):
    code = "download_error"


class ConfigError(PenstockError):
    code = "config_error"


class KvLossTooLarge(ConfigError):
    code = "kv_loss_too_large"


class KvLayoutMismatch(PenstockError):
    code = "kv_layout_mismatch"


class StepFailed(PenstockError):
    code = "step_failed"


class PoisonedRequest(StepFailed):
    code = "poisoned_request"


class OutOfMemory(StepFailed):
    code = "out_of_memory"


class NotFinite(StepFailed):
    code = "non_finite_logits"


class Overloaded(PenstockError):
    code = "overloaded"


class EngineUnavailable(PenstockError):
    code = "engine_unavailable"


class DeviceLost(EngineUnavailable):
    code = "device_lost"


class StorageFailed(PenstockError):
    code = "storage_failed"


def error_of(code: str, message: str, retry_after: float = 0.0) -> PenstockError:
    """The error that `code` stands for, as it was raised elsewhere: codes cross processes, exceptions do not."""
    error = _KINDS.get(code, PenstockError)(message)
    error.code = code
    if isinstance(error, RateLimited):
        error.retry_after = max(error.retry_after, retry_after)
    return error


def _tree(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


_KINDS = {kind.code: kind for kind in _tree(PenstockError)} | dict.fromkeys(
    ("engine_died", "server_stopping"), EngineUnavailable
)
