"""Rows about texts, written by the model itself.

All rows of a chunk share its keys and values. A row depends only on its chunk, its
number and the seed, so a restarted command writes the same rows.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.data.chat_encoder import ChatEncoder, first_turn, open_chat_encoder
from prompt_tuning.data.rows.line_formats import FormatChoice
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.message_forms import Message
from prompt_tuning.decoding.continue_rows import CHUNK, TOGETHER
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Request
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.decoding.resident_adapters import MAXIMUM_TEXTS
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.texts import text_study
from prompt_tuning.texts.continue_requests import run_in_order

SLOTS = 64
"""Number of rows that are written together."""
OWN = 2**20
"""First sample number of answers; questions have smaller ones."""
REASONING = "enable_thinking"
"""Variable of chat templates that turns reasoning on and off."""


@dataclasses.dataclass(frozen=True)
class StudyRow:
    """A row about a chunk.

    `messages` are the row as a conversation, none for plain text; `written` counts the
    tokens that the model generated for it.
    """

    chunk: int
    kind: str
    given: list[int]
    learned: list[int]
    messages: tuple[Message, ...] = ()
    written: int = 0


@dataclasses.dataclass
class _Conversation:
    """A conversation in progress."""

    chunk: int
    kind: str
    number: int
    messages: list[Message] = dataclasses.field(default_factory=list)
    written: int = 0


class StudyWriter:
    """Writes rows about chunks with a frozen model.

    Attributes:
      contexts: tokens that the model reads before each chunk's rows, after BOS.
    """

    def __init__(
        self,
        texts: text_study.StudiedTexts,
        study: text_study.TextStudy,
        model: PromptedModel,
        parameters: Parameters,
    ):
        self._texts, self._study = texts, study
        self._model, self._parameters = model, parameters
        self._tokenizer = model.needed_tokenizer()
        self._chat: ChatEncoder | None = None
        if any(kind in text_study.SEEDS for kind in texts.kinds):
            self._chat = open_chat_encoder(self._tokenizer, FormatChoice())
            # A template that cannot write the answers is refused here.
            if study.reasoning is not None:
                self._chat_ids(first_turn("a"), True)
        self.contexts = [self._context(number) for number in range(len(texts.chunks))]
        self._engine: DecodingEngine | None = None

    def rows(self, done: int = 0) -> Iterator[StudyRow]:
        """Yields all rows except the first `done`, chunk by chunk."""
        count = self._study.rows + self._study.held_out
        shares = np.array_split(np.arange(count), len(self._texts.chunks))
        for block in _blocks([(c, len(share)) for c, share in enumerate(shares)]):
            size = sum(number for _, number in block)
            if done >= size:
                done -= size
                continue
            yield from itertools.islice(self._block(block), done, None)
            done = 0

    def summaries(self, length: int) -> list[list[int]]:
        """Writes summaries of the chunks with a chat model, `length` tokens in all."""
        size = max(length // len(self._texts.chunks), 1)
        words = max(2 * size // 3, 1)  # a word has more than one token
        ids = self._chat_ids(first_turn(text_study.SUMMARY.format(words=words)))
        requests = [
            self._request(chunk, ids, 0, size, 0)
            for chunk in range(len(self._texts.chunks))
        ]
        return [list(completion.ids) for completion in self._write(requests)]

    def _context(self, number: int) -> list[int]:
        """Returns what precedes a chunk's rows: the chunk or a system message."""
        chunk = list(self._texts.chunks[number].ids)
        if self._chat is None:
            return chunk
        text = self._tokenizer.decode(chunk)
        alone = self._chat_ids(first_turn("a"))
        try:
            both = self._chat_ids(first_turn("a", system=text))
        except InputError:  # a template without system messages
            both = []
        if len(both) > len(alone) and both[-len(alone) :] == alone:
            return both[: -len(alone)]
        return chunk

    def _chat_ids(
        self, messages: Sequence[Message], reasoning: bool | None = None
    ) -> list[int]:
        """Returns the ids of a conversation up to the next answer, without BOS."""
        assert self._chat is not None
        record = answers_of(list(messages))
        if reasoning is not None:
            variables = {REASONING: reasoning}
            record = record._replace(variables=variables, chosen=(REASONING,))
        ids = self._chat(record, "the conversation")
        return ids[self._model.interface.begin_length(ids) :]

    def _reasons(self, chunk: int, number: int) -> bool | None:
        """Whether an answer starts with reasoning; None leaves it to the template."""
        share = self._study.reasoning
        return None if share is None else self._random(chunk, number).random() < share

    def _block(self, block: Sequence[tuple[int, int]]) -> Iterator[StudyRow]:
        """Writes the rows of a group of chunks together."""
        kinds, rounds = self._texts.kinds, self._study.rounds
        plain: list[tuple[int, int, str]] = []
        chats: list[_Conversation] = []
        order: list[tuple[int, int]] = []
        for chunk, size in block:
            number = 0
            while number < size:
                kind = kinds[(number // (rounds if self._chat else 1)) % len(kinds)]
                if kind in text_study.SEEDS:
                    turns = min(rounds, size - number)
                    chats.append(_Conversation(chunk, kind, number))
                    order += [(chunk, number + turn) for turn in range(turns)]
                    number += turns
                else:
                    plain.append((chunk, number, kind))
                    order.append((chunk, number))
                    number += 1
        rows = dict(self._plain_rows(plain))
        wanted = set(order)
        for turn in range(rounds):
            going = [x for x in chats if (x.chunk, x.number + turn) in wanted]
            rows |= dict(self._turns(going, turn))
        for place in order:
            yield rows[place]

    # Plain text

    def _plain_rows(
        self, places: Sequence[tuple[int, int, str]]
    ) -> Iterator[tuple[tuple[int, int], StudyRow]]:
        """Yields rows of plain text, by chunk and number."""
        requests, waiting = [], []
        for chunk, number, kind in places:
            beginning = self._beginning(chunk, number, kind)
            if beginning is None:
                row = self._passage(chunk, number)
                yield (chunk, number), row
                continue
            free = kind == text_study.CONTINUATION
            temperature = (
                self._study.temperature if free else self._study.answer_temperature
            )
            requests.append(
                self._request(
                    chunk, beginning, number, self._texts.learned, temperature
                )
            )
            waiting.append((chunk, number, kind, beginning))
        for place, completion in zip(waiting, self._write(requests), strict=True):
            chunk, number, kind, beginning = place
            new = self._with_end(completion)
            if kind == text_study.LINE:
                breaks = [n for n, token in enumerate(new) if self._is_break(token)]
                new = new[: breaks[0] + 1] if breaks else new
            if not beginning and not self._texts.begin:
                # Nothing before a row predicts its first token, which is given then.
                beginning, new = new[:1], new[1:]
            if not completion.ids or not new:
                # If the model ends a row immediately, a passage takes its place.
                yield (chunk, number), self._passage(chunk, number)
                continue
            beginning = [*self._texts.begin, *beginning]
            yield (
                (chunk, number),
                StudyRow(chunk, kind, beginning, new, written=len(completion.ids)),
            )

    def _random(self, chunk: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self._study.seed, chunk, number])

    def _beginning(self, chunk: int, number: int, kind: str) -> list[int] | None:
        """Returns the tokens that the model continues; None for a passage."""
        if kind == text_study.PASSAGE:
            return None
        random, ids = self._random(chunk, number), self._texts.chunks[chunk].ids
        breaks = [place + 1 for place, token in enumerate(ids) if self._is_break(token)]
        starts = [0, *(place for place in breaks if place < len(ids) - 1)]
        if kind == text_study.CONTINUATION:
            # Free continuations leave out much of a text. The first tokens of each line
            # in turn lead the model through all of it.
            turn, free = divmod(number // len(self._texts.kinds), 2)
            if free:
                return []
            order = np.random.default_rng([self._study.seed, chunk])
            first = order.permutation(starts)[turn % len(starts)]
            return list(ids[first : first + 1])
        assert kind == text_study.LINE
        first = int(random.choice(starts))
        size = int(random.integers(1, self._texts.given + 1))
        # A line may be shorter than its given part.
        ends = [place - 1 for place in breaks if place - 1 > first]
        return list(ids[first : min([first + size, *ends[:1]])])

    def _is_break(self, token: int) -> bool:
        return "\n" in self._tokenizer.decode([token])

    def _passage(self, chunk: int, number: int) -> StudyRow:
        """Cuts a passage from a chunk, starting at a random token."""
        random, ids = self._random(chunk, number), self._texts.chunks[chunk].ids
        most = min(self._texts.given, len(ids) // 2)
        length = most + self._texts.learned
        first = int(random.integers(0, max(len(ids) - length, 0) + 1))
        start = first + int(random.integers(1, most + 1))
        return StudyRow(
            chunk,
            text_study.PASSAGE,
            [*self._texts.begin, *ids[first:start]],
            list(ids[start : first + length]),
        )

    # Conversations

    def _turns(
        self, conversations: Sequence[_Conversation], turn: int
    ) -> Iterator[tuple[tuple[int, int], StudyRow]]:
        """Writes a question and its answer for each conversation."""
        limit, study = self._texts.answer, self._study
        asking = []
        for one in conversations:
            task = f"{text_study.SEEDS[one.kind]} {text_study.ALONE}" + (
                f" {text_study.FOLLOWS}" if turn else ""
            )
            ids = self._chat_ids([*one.messages, *first_turn(task)])
            number = one.number + turn
            asking.append(
                self._request(one.chunk, ids, number, limit, study.question_temperature)
            )
        asked = self._write(asking)
        for one, question in zip(conversations, asked, strict=True):
            text = question.text.strip() or text_study.SEEDS[one.kind]
            one.messages += first_turn(text)
            one.written = len(question.ids)
        answering = [
            self._request(
                one.chunk,
                self._chat_ids(
                    one.messages, self._reasons(one.chunk, one.number + turn)
                ),
                OWN + one.number + turn,
                limit,
                study.answer_temperature,
            )
            for one in conversations
        ]
        answers = zip(conversations, answering, self._write(answering), strict=True)
        for one, request, answer in answers:
            assert request.ids is not None
            one.messages.append({"role": "assistant", "content": answer.text})
            yield (
                (one.chunk, one.number + turn),
                StudyRow(
                    one.chunk,
                    one.kind,
                    [*self._texts.begin, *request.ids],
                    self._with_end(answer),
                    tuple(one.messages),
                    one.written + len(answer.ids),
                ),
            )

    # The engine

    def _request(
        self,
        chunk: int,
        ids: Sequence[int],
        sample: int,
        new_tokens: int,
        temperature: float | int,
    ) -> Request:
        """Returns a request for the tokens that follow a chunk and `ids`."""
        whole = [*self._texts.begin, *self.contexts[chunk]]
        # A row needs a token of its own: the chunk's last one, if nothing follows it.
        shared, row_ids = (whole, list(ids)) if ids else (whole[:-1], whole[-1:])
        ends = tuple(self._chat.turn_ends()) if self._chat is not None else ()
        sampling = Sampling(
            new_tokens=new_tokens,
            temperature=temperature,
            seed=self._study.seed,
            ends=ends,
        )
        return Request(
            ids=row_ids, shared_ids=shared, sampling=sampling, first_sample=sample
        )

    def _write(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yields the completion of each request, in order."""
        if not requests:
            return
        # The chunk before a row is stored apart from its slot. Sizes depend only on
        # these rows, so a resumed command computes the same.
        longest = max(len(x.ids or ()) + x.sampling.new_tokens for x in requests)
        engine, length = self._engine, slot_length(longest)
        if engine is None or engine.limit != length:
            engine = DecodingEngine(
                self._model,
                self._parameters,
                slots=SLOTS,
                length=length,
                chunk=CHUNK
                if self._chat
                else 1 << (self._texts.given - 1).bit_length(),
                together=TOGETHER,
            )
            self._engine = engine
        with status("writing rows"):
            for (completion,) in run_in_order(engine, requests):
                yield completion

    def _with_end(self, completion: Completion) -> list[int]:
        """Returns the new tokens, with EOS if an end token ended them."""
        end = self._tokenizer.eos_id
        if completion.reason == "stop" and end is not None:
            return [*completion.ids, end]
        return list(completion.ids)


def _blocks(sizes: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Groups chunks, with their numbers of rows, that are written together."""
    block: list[tuple[int, int]] = []
    for chunk, size in sizes:
        if size == 0:
            continue
        block.append((chunk, size))
        full = sum(number for _, number in block) >= SLOTS
        if full or len(block) == MAXIMUM_TEXTS:
            yield block
            block = []
    if block:
        yield block
