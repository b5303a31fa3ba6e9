"""Who writes the answers: the product's own runtime, or a server that runs the target elsewhere.

Both take requests and give texts as they end, and both know what decides their texts; the job
(write.py) does not tell them apart.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from distill.answers.client import ApiClient
from distill.answers.config import AnswersConfig
from distill.answers.manifest import Manifest, make_manifest, make_served_manifest
from distill.answers.served import ServedTarget, ServerWriter, model_report
from distill.features import STATE_BYTES, FeatureFolder
from distill.speculative_writer import SpeculativeWriter
from distill.templates import ChatTemplate
from distill.writer import Request, Text, Writer
from specdec_runtime.loading import load_drafter
from specdec_runtime.target import Target

_ID_BYTES = 4


class TextWriter(Protocol):
    """Writes texts; a text without tokens is one that could not be used."""

    def write(self, requests: Iterable[Request], *, longest_prompt: int) -> Iterator[Text]: ...


class Author(Protocol):
    """Writes answers under fixed settings."""

    @property
    def template(self) -> ChatTemplate:
        """How conversations are rendered."""

    @property
    def manifest(self) -> Manifest:
        """Everything that decides what its answers are."""

    @property
    def max_positions(self) -> int:
        """Most tokens of a prompt with its answer."""

    @property
    def bytes_per_token(self) -> int:
        """What is kept of each new token."""

    @property
    def bytes_per_prompt_token(self) -> int:
        """What is kept of each token of a prompt."""

    def writer(self, num_requests: int) -> TextWriter:
        """For so many requests."""


@dataclass(frozen=True)
class RuntimeAuthor:
    """The target, run here.

    inner_states: takes the target's inner states while it writes; None = not kept.
    """

    target: Target
    template: ChatTemplate
    config: AnswersConfig
    inner_states: FeatureFolder | None = None

    @property
    def manifest(self) -> Manifest:
        return make_manifest(self.target, self.template, self.config)

    @property
    def max_positions(self) -> int:
        return self.target.model.max_positions

    @property
    def bytes_per_token(self) -> int:
        states = self.target.model.hidden_size * self.config.hidden_dtype.torch.itemsize
        signal = states + 8 if self.config.keep_states else 0  # log-sum-exp and argmax: 8
        return self.bytes_per_prompt_token + signal

    @property
    def bytes_per_prompt_token(self) -> int:
        num_layers = 0 if self.inner_states is None else len(self.inner_states.layers)
        return _ID_BYTES + num_layers * self.target.model.hidden_size * STATE_BYTES

    def writer(self, num_requests: int) -> TextWriter:
        config = self.config
        batch_size = min(config.batch_size, num_requests)
        if config.drafter is None:
            return Writer(
                self.target,
                batch_size=batch_size,
                max_new_tokens=config.max_new_tokens,
                stop_ids=self.target.eos_token_ids,
                top_p=config.top_p,
                record=config.keep_states,
                inner_states=self.inner_states,
            )
        drafter = load_drafter(config.drafter, self.target)
        assert drafter is not None, "null is no drafter"
        return SpeculativeWriter(
            self.target,
            drafter,
            batch_size=batch_size,
            max_new_tokens=config.max_new_tokens,
            num_draft_tokens=config.num_draft_tokens,
            top_p=config.top_p,
            record=config.keep_states,
        )


@dataclass(frozen=True)
class ServerAuthor:
    """The target, run by an OpenAI-compatible server; only its tokenizer is needed here."""

    target: ServedTarget
    template: ChatTemplate
    config: AnswersConfig

    @cached_property
    def _client(self) -> ApiClient:
        return ApiClient(self.config.server)

    @cached_property
    def _report(self) -> dict[str, object]:
        return model_report(self._client, self.config.server)

    @property
    def manifest(self) -> Manifest:
        return make_served_manifest(self.target, self._report, self.template, self.config)

    @property
    def max_positions(self) -> int:
        served = self._report.get("max_model_len")
        own = self.target.max_positions
        return min(own, served) if isinstance(served, int) else own

    @property
    def bytes_per_token(self) -> int:
        return _ID_BYTES

    @property
    def bytes_per_prompt_token(self) -> int:
        return _ID_BYTES

    def writer(self, num_requests: int) -> ServerWriter:
        return ServerWriter(self._client, self._report, self.target, self.config)


def author_of(
    target: Target,
    template: ChatTemplate,
    config: AnswersConfig,
    *,
    inner_states: FeatureFolder | None = None,
) -> Author:
    """The one that the settings name.

    Args:
        inner_states: takes the target's inner states where it writes here and without a drafter.
    """
    if config.server.url is None:
        return RuntimeAuthor(target, template, config, inner_states)
    return ServerAuthor(ServedTarget.of(target), template, config)
