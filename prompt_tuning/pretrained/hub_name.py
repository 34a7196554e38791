"""Names of models on the Hugging Face hub: `organization/model@revision`."""

import dataclasses
import re

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?",
    re.ASCII,
)
MAXIMUM_LENGTH = 300
"""Maximum number of characters of a name."""


@dataclasses.dataclass(frozen=True)
class HubName:
    """A model on the hub.

    Attributes:
      repository: organization and model, e.g. "Qwen/Qwen3-0.6B".
      revision: branch, tag or commit; None for the main branch.
    """

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repository}{revision}"

    @property
    def download_command(self) -> str:
        """Returns the command that downloads the model to a folder."""
        folder = self.repository.rpartition("/")[2]
        revision = "" if self.revision is None else f" --revision {self.revision}"
        return f"hf download {self.repository}{revision} --local-dir {folder}"


def parse_hub_name(text: str) -> HubName | None:
    """Splits a name into its parts; None if it cannot be one.

    A name has no `..`, and none of its parts starts with a dot, since the hub's cache
    uses the parts as folder names.
    """
    match = _NAME.fullmatch(text) if len(text) <= MAXIMUM_LENGTH else None
    if match is None or ".." in text:
        return None
    return HubName(match["repository"], match["revision"])
