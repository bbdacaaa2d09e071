"""Messages <-> token ids. Token-in, token-out: ids that were sampled are never decoded and encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.errors import ConfigError, DataError, first_line
from gspo.types import Prompt


@dataclass(frozen=True)
class ChatFormat:
    """How prompts of a run become token ids and answers become text.

    ``tokenizer`` is a transformers tokenizer. ``use_template`` renders with its chat template (a text prompt becomes
    one user message); without it text prompts are encoded as they are. ``end_token_ids`` end an answer.
    """

    tokenizer: Any
    system_prompt: str = ""
    use_template: bool = True
    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    end_token_ids: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.use_template and not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "The model's tokenizer has no chat template, so chat prompts cannot be rendered. Use an instruction-"
                "tuned model, or set task.chat = false to feed text prompts as they are."
            )
        if not self.end_token_ids:
            raise ConfigError(
                "The model names no end token (neither its tokenizer nor its generation config has one), so an answer "
                "could only end at rollout.max_tokens. Save the tokenizer with an eos_token."
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, ready for the answer to follow.

        The begin-of-text token is there exactly once when the template or the tokenizer puts one: decided from the
        rendered ids, since templates and tokenizers disagree about whose job it is.
        """
        content = prompt.content
        if not self.use_template:
            if not isinstance(content, str):
                raise DataError(f"Prompt {prompt.prompt_id} holds chat messages, but task.chat is false.")
            return self._one_bos(list(self.tokenizer(content, add_special_tokens=False)["input_ids"]), prompt)
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(m) for m in content]
        if self.system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates are programs that come with models and raise what they like
            raise DataError(
                f"Prompt {prompt.prompt_id}: the model's chat template refuses it: {first_line(error)}."
            ) from error
        return self._one_bos(list(ids), prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The answer's text as rewards see it: without the final end token, cut before a stop string."""
        ids = list(token_ids)
        if ids and ids[-1] in self.end_token_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
        cuts = [text.find(stop) for stop in self.stop if stop in text]
        return text[: min(cuts)] if cuts else text

    def ends_with_stop(self, token_ids: Sequence[int]) -> bool:
        """Does the newest token complete a stop string?"""
        if not self.stop:
            return False
        longest = max(len(stop) for stop in self.stop)
        tail = self.tokenizer.decode(list(token_ids[-(longest + 4) :]), skip_special_tokens=self.skip_special_tokens)
        return any(stop in tail for stop in self.stop)

    def _one_bos(self, ids: list[int], prompt: Prompt) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if bos is not None:
            while ids[:2] == [bos, bos]:
                ids = ids[1:]
            if ids[:1] != [bos] and self.tokenizer("a")["input_ids"][:1] == [bos]:
                ids = [bos, *ids]
        if not ids:
            raise DataError(f"Prompt {prompt.prompt_id} is empty after encoding; the model needs at least one token.")
        return ids


def end_token_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """End tokens of a model: its tokenizer's and all that its generation config lists."""
    found: set[int] = set()
    listed = getattr(generation_config, "eos_token_id", None)
    for value in (tokenizer.eos_token_id, *(listed if isinstance(listed, (list, tuple)) else [listed])):
        if value is not None:
            found.add(int(value))
    return frozenset(found)
