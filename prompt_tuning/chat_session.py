"""A conversation with a model, in which each answer may use another adapter."""

from collections.abc import Iterator

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.text.template_renderer import Message
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.generation.conversation import ChatEncoder, first_turn
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.text_model import OWN, TextModel

BASE = "base"
"""Name by which a conversation chooses the frozen model."""
TRAINED = "trained"
"""Name by which it chooses the prompts and adapters of the run."""


class LoadedTextModel(TextModel):
    """A model whose parameters were read before.

    Args:
      run: configuration that texts are read by.
      prompted: the model.
      parameters: all its parameters by path.
    """

    def __init__(self, run: Run, prompted: PromptedModel, parameters: Parameters):
        super().__init__(run, prompted)
        self._parameters = parameters

    @property
    def parameters(self) -> Parameters:
        """All parameters by path."""
        return self._parameters


class AdapterChat:
    """Answers messages through a chat template, and remembers the conversation.

    Args:
      engine: engine that generates.
      encoder: encodes conversations.
      sampling: how tokens are chosen.
      system: system message, or None.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        encoder: ChatEncoder,
        sampling: Sampling,
        system: str | None = None,
    ):
        self._engine, self._encoder, self._system = engine, encoder, system
        self._sampling = sampling
        self._messages: list[Message] = []
        self._adapters = {BASE: None} | {
            TRAINED if name == OWN else name: name for name in engine.adapters
        }
        self.adapter = TRAINED if TRAINED in self._adapters else BASE
        self.hint = (
            f"Type a message for {self.adapter}. /adapter NAME answers with another of "
            f"{', '.join(self._adapters)}; /reset starts a new conversation; Ctrl-C "
            "ends an answer, Ctrl-D the program."
        )

    def opening(self, text: str) -> str:
        """Returns nothing: answers are shown alone."""
        del text
        return ""

    def choose_adapter(self, name: str) -> str:
        """Answers with another adapter from now on; returns what to report.

        Raises:
          InputError: if there is none of this name.
        """
        if name not in self._adapters:
            raise InputError(
                f"no adapter is named {shown(name)}{did_you_mean(name, self._adapters)}"
            )
        self.adapter = name
        return f"answers come from {name} now"

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a message that follows those before, piece by piece.

        Raises:
          InputError: if the conversation is too long.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        if not self._messages:
            messages = first_turn(text, self._system)
        request = Request(
            ids=self._encoder(messages, "the conversation"),
            adapter=self._adapters[self.adapter],
            sampling=self._sampling,
        )
        try:
            handle = self._engine.submit(request)
        except InputError as problem:
            hint = "; /reset starts a new conversation" if len(messages) > 2 else ""
            raise InputError(f"{problem}{hint}") from problem
        answer = ""
        try:
            while not handle.finished:
                for piece in self._engine.step():
                    answer += piece.text
                    # An answer that is interrupted remains as far as it was shown.
                    reply: Message = {"role": "assistant", "content": answer}
                    self._messages = [*messages, reply]
                    yield piece.text
        finally:
            self._engine.cancel(handle)

    def reset(self) -> None:
        """Forgets the conversation."""
        self._messages = []
