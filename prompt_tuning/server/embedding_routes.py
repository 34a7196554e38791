"""The route of embeddings, `/v1/embeddings`."""

import base64
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Float
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.server.event_stream import json_response, unless_gone
from prompt_tuning.server.fair_workers import FairWorkers
from prompt_tuning.server.generation_routes import GONE
from prompt_tuning.server.openai_requests import check_tokens, read_prompts
from prompt_tuning.server.request_fields import CHANGING
from prompt_tuning.server.running_requests import RequestReader, client_of
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.server.server_limits import MAXIMUM_INPUTS, WAITING_EMBEDDINGS
from prompt_tuning.texts.text_embeddings import Pooling, embed_ids

FIELDS = (
    *("model", "input", "encoding_format", "dimensions"),
    *("pooling", "normalize", "prompt_id"),
)
FORMATS = ("float", "base64")
POOLINGS = get_args(Pooling)
Vector = Float[np.ndarray, "D"]


class EmbeddingBody(NamedTuple):
    """Body of `/v1/embeddings`.

    `packed` vectors are base64 of float32 numbers; `dimensions` is the number that the
    client expects.
    """

    model: str | None
    inputs: Sequence[str] | Sequence[Sequence[int]]
    pooling: Pooling
    normalize: bool
    packed: bool
    dimensions: int | None
    prompt_id: int | None


class EmbeddingRoutes:
    """Answers requests for embeddings, one text after the other."""

    def __init__(self, models: ServedModels, reader: RequestReader):
        self._models, self._reader = models, reader
        self._workers = FairWorkers("embeddings", 1, WAITING_EMBEDDINGS)

    @property
    def busy(self) -> bool:
        """Whether a text is being read."""
        return self._workers.busy

    async def embed(self, request: HttpRequest) -> Response:
        """Answers `/v1/embeddings`."""
        values = await self._reader.fields(request, FIELDS, CHANGING)
        answer = self._answer(read_embedding(values), client_of(request))
        content = await unless_gone(request.receive, answer)
        if content is None:
            return Response(status_code=GONE)
        return json_response(content)

    async def _answer(self, body: EmbeddingBody, client: str) -> dict[str, Any]:
        models = self._models
        name = models.adapter(body.model)
        adapter = models.texts.find(name)
        width = adapter.model.config.width
        if body.dimensions not in (None, width):
            raise InputError(
                f"dimensions is {body.dimensions}, expected {width}, the width of the "
                "model: leave it out"
            )
        rows = await self._ids(body, name, client)
        longest = max(map(len, rows))
        if longest > models.limit:
            raise InputError(
                f"a text of {longest:,} tokens is too long, expected at most "
                f"{models.limit:,} (--length)"
            )
        data = []
        for index, ids in enumerate(rows):
            embed = functools.partial(
                embed_ids,
                adapter.model,
                adapter.parameters,
                ids,
                body.pooling,
                body.prompt_id,
            )
            vector = await self._workers.run(client, embed)
            if body.normalize:
                vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
            embedding = _packed(vector) if body.packed else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        count = sum(map(len, rows))
        return {
            "object": "list",
            "data": data,
            "model": body.model or models.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    async def _ids(
        self, body: EmbeddingBody, name: str | None, client: str
    ) -> Sequence[Sequence[int]]:
        texts = [x for x in body.inputs if isinstance(x, str)]
        if texts:
            return await self._models.encode_texts(texts, name, client)
        rows = [x for x in body.inputs if not isinstance(x, str)]
        size = self._models.texts.model.config.vocabulary_size
        for ids in rows:
            check_tokens("input", ids, size)
        return rows


def read_embedding(body: JsonObject) -> EmbeddingBody:
    """Reads the body of `/v1/embeddings`."""
    inputs = read_prompts(body, "input")
    if len(inputs) > MAXIMUM_INPUTS:
        raise InputError(
            f"input has {len(inputs):,} texts, expected at most {MAXIMUM_INPUTS:,}"
        )
    form, pooling = body.text("encoding_format", "float"), body.text("pooling", "mean")
    if form not in FORMATS:
        body.refuse("encoding_format", " or ".join(FORMATS))
    if pooling not in POOLINGS:
        body.refuse("pooling", " or ".join(POOLINGS))
    return EmbeddingBody(
        model=body.text("model", None),
        inputs=inputs,
        pooling=pooling,
        normalize=body.flag("normalize", True),
        packed=form == "base64",
        dimensions=body.integer("dimensions", None, minimum=1),
        prompt_id=body.integer("prompt_id", None),
    )


def _packed(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
