"""Routes about the tokenizer and the server, named as in vLLM."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from prompt_tuning.core.version import __version__
from prompt_tuning.data.text.chat_templates import chat_template_of, has_chat_template
from prompt_tuning.decoding.detokenizer import token_name
from prompt_tuning.server import openai_requests
from prompt_tuning.server.event_stream import json_response
from prompt_tuning.server.running_requests import RequestReader, client_of
from prompt_tuning.server.served_models import ServedModels

TOKENIZE = ("model", "prompt", "add_special_tokens", "return_token_strs")
DETOKENIZE = ("model", "tokens")


class TokenizerRoutes:
    """Answers requests about tokens."""

    def __init__(self, models: ServedModels, reader: RequestReader):
        self._models, self._reader = models, reader

    def routes(self) -> list[Route]:
        """Returns the routes."""
        return [
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._info),
            Route("/version", self._version),
            Route("/ping", self._ping, methods=["GET", "POST"]),
        ]

    async def _read(self, request: HttpRequest, known: tuple[str, ...]) -> Any:
        body = await self._reader.fields(request, known)
        self._models.adapter(body.text("model", None))
        return body

    async def _tokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, TOKENIZE)
        text, tokenizer = body.text("prompt"), self._models.tokenizer
        ids = await self._models.encode_plain(text, client_of(request))
        if body.flag("add_special_tokens", True):
            ids = [*tokenizer.begin_ids, *ids]
        names = None
        if body.flag("return_token_strs", False):
            names = [token_name(tokenizer, token) for token in ids]
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self._models.limit,
                "tokens": ids,
                "token_strs": names,
            }
        )

    async def _detokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, DETOKENIZE)
        ids, tokenizer = body.integers("tokens"), self._models.tokenizer
        openai_requests.check_tokens("tokens", ids, tokenizer.vocabulary_size)
        return json_response({"prompt": tokenizer.decode(ids)})

    async def _info(self, request: HttpRequest) -> Response:
        del request
        tokenizer = self._models.tokenizer
        ids = {
            "bos_token": tokenizer.bos_id,
            "eos_token": tokenizer.eos_id,
            "pad_token": tokenizer.pad_id,
        }
        names = {
            name: None if token is None else tokenizer.token(token)
            for name, token in ids.items()
        }
        template = None
        if has_chat_template(tokenizer):
            template = chat_template_of(tokenizer).source
        kind = type(tokenizer).__name__
        return json_response(
            {
                "tokenizer_class": kind,
                "model_max_length": self._models.limit,
                **names,
                "add_bos_token": tokenizer.bos_id in tokenizer.begin_ids,
                "chat_template": template,
            }
        )

    async def _version(self, request: HttpRequest) -> Response:
        del request
        return json_response({"version": __version__})

    async def _ping(self, request: HttpRequest) -> Response:
        del request
        return Response()
