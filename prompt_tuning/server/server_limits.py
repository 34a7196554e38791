"""Limits of the server, and the errors by which it refuses requests."""

MAXIMUM_BODY = 2**22
"""Maximum size of a request's body in bytes."""
BODY_SECONDS = 30
"""Time in which a body must arrive."""
MAXIMUM_ROWS = 128
"""Maximum number of rows of a request: its prompts times its samples."""
MAXIMUM_STOPS = 16
"""Maximum number of stop texts of a request."""
MAXIMUM_BIASES = 1024
"""Maximum number of tokens in the `logit_bias` of a request."""
MAXIMUM_CONNECTIONS = 2048
"""Maximum number of connections; further ones are answered with status 503."""
MAXIMUM_ADAPTERS = 256
"""Maximum number of adapters that are loaded while the server runs."""


class RequestError(Exception):
    """A request that is refused with another status than 400.

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
