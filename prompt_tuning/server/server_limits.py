"""Limits of the server, and the errors for requests beyond them."""

import dataclasses

MAXIMUM_BODY = 2**22
"""Maximum size of a request's body in bytes."""
MAXIMUM_BODIES = 2**25
"""Maximum size of all bodies that are arriving; small ones are always read."""
SMALL_BODY = 2**14
"""Size of a body that is small."""
HEADER_SECONDS = 10
"""Time in which the headers of a request must arrive."""
BODY_SECONDS = 30
"""Time in which a body must arrive."""
READ_SECONDS = 30
"""Time in which a client must read a part of its answer."""
STOP_SECONDS = 5
"""Time that requests have to end after a signal; those that are left are ended then."""
CUT_SECONDS = 6
"""Time after a signal at which the connections that are left are closed."""
LAST_SECONDS = 9
"""Time after a signal at which the process ends, whatever its threads do."""
MAXIMUM_ROWS = 128
"""Maximum number of rows of a request: its prompts times its samples."""
MAXIMUM_INPUTS = 2048
"""Maximum number of texts of a request for embeddings."""
MAXIMUM_STOPS = 16
"""Maximum number of stop texts of a request."""
MAXIMUM_STOP = 1000
"""Maximum number of characters of a stop text."""
MAXIMUM_STOP_TOKENS = 64
"""Maximum number of tokens that end the rows of a request."""
MAXIMUM_TOOLS = 128
"""Maximum number of tools of a request."""
MAXIMUM_BIASES = 1024
"""Maximum number of tokens in the `logit_bias` of a request."""
MAXIMUM_CONNECTIONS = 2048
"""Maximum number of connections. Idle ones are closed for new ones; if all are busy,
further ones are answered with status 503."""
SPARE_CONNECTIONS = 32
"""Number of them that are kept free."""
OTHER_FILES = 256
"""Number of open files that the process needs apart from connections."""
CONSTRAINED_BODY = 2**19
"""Maximum size of a body with a constraint, which may wait to be compiled."""
CONSTRAINT_WORKERS, WAITING_CONSTRAINTS = 2, 8
"""Number of constraints that are compiled at once, and that may wait."""
WAITING_EMBEDDINGS = 64
"""Number of requests for embeddings that may wait."""
WAITING_TEXTS = 64
"""Number of requests whose texts may wait to be encoded."""
MAXIMUM_ADAPTERS = 256
"""Maximum number of adapters that are loaded while the server runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits that whoever starts the server chooses.

    Attributes:
      queue_length: number of rows that may wait for a slot.
      samples: maximum of `n`.
      strict_length: whether a request for more new tokens than there is room for is
        refused; otherwise it gets as many as there is room for.
    """

    queue_length: int = 64
    samples: int = 16
    strict_length: bool = False


class RequestError(Exception):
    """A request refused with another status than 400.

    Attributes:
      status: HTTP status.
      kind: OpenAI's `type` of the error.
    """

    def __init__(self, message: str, status: int, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.kind = status, kind


class BusyError(RequestError):
    """The queue is full."""

    def __init__(self, message: str):
        super().__init__(message, 429, "rate_limit_error")
