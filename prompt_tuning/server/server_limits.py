"""Limits of the server, and the errors for requests beyond them."""

import dataclasses

MAXIMUM_BODY = 2**22
"""Maximum size of a request's body in bytes."""
MAXIMUM_BODIES = 2**25
"""Maximum total size of arriving bodies; small ones are always read."""
SMALL_BODY = 2**14
"""Maximum size of a small body."""
HEADER_SECONDS = 10
"""Time limit for receiving the headers of a request."""
BODY_SECONDS = 30
"""Time limit for receiving a body."""
READ_SECONDS = 30
"""Time limit for a client to read a part of its answer."""
STOP_SECONDS = 5
"""Time that requests have to finish after a signal; then they are ended."""
CUT_SECONDS = 6
"""Time after a signal at which remaining connections are closed."""
LAST_SECONDS = 9
"""Time after a signal at which the process ends, whatever its threads do."""
MAXIMUM_ROWS = 128
"""Maximum number of rows of a request (prompts times samples)."""
MAXIMUM_INPUTS = 2048
"""Maximum number of texts of a request for embeddings."""
MAXIMUM_STOPS = 16
"""Maximum number of stop texts of a request."""
MAXIMUM_STOP = 1000
"""Maximum number of characters of a stop text."""
MAXIMUM_STOP_TOKENS = 64
"""Maximum number of end tokens of a request."""
MAXIMUM_TOOLS = 128
"""Maximum number of tools of a request."""
MAXIMUM_BIASES = 1024
"""Maximum number of tokens in the `logit_bias` of a request."""
MAXIMUM_CONNECTIONS = 2048
"""Maximum number of connections.

Idle ones are closed for new ones; if all are busy, new ones get status 503.
"""
SPARE_CONNECTIONS = 32
"""Number of them that are kept free."""
OTHER_FILES = 256
"""Number of open files that the process needs besides connections."""
CONSTRAINED_BODY = 2**19
"""Maximum size of a body with a constraint, which may wait for compilation."""
CONSTRAINT_WORKERS, WAITING_CONSTRAINTS = 2, 8
"""Number of constraints that compile in parallel, and that may wait."""
WAITING_EMBEDDINGS = 64
"""Number of requests for embeddings that may wait."""
WAITING_TEXTS = 64
"""Number of requests that may wait for their texts to be encoded."""
MAXIMUM_ADAPTERS = 256
"""Maximum number of adapters loaded while the server runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits chosen when the server is started.

    Attributes:
      queue_length: number of rows that may wait for a slot.
      samples: maximum of `n`.
      strict_length: whether to refuse a request for more new tokens than fit; otherwise
        it gets as many as fit.
    """

    queue_length: int = 64
    samples: int = 16
    strict_length: bool = False


class RequestError(Exception):
    """An error with an HTTP status other than 400."""

    def __init__(self, message: str, status: int, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.kind = status, kind


class BusyError(RequestError):
    """The queue is full."""

    def __init__(self, message: str):
        super().__init__(message, 429, "rate_limit_error")
