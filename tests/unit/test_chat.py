"""Chat templates, begin-of-text tokens, and what text a reward sees."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gspo.chat import ChatFormat, end_token_ids
from gspo.errors import ConfigError, DataError
from gspo.policy.tiny import build_tokenizer
from gspo.types import Prompt

TINY = build_tokenizer()
END = frozenset({TINY.eos_token_id})


def word_tokenizer(template_bos: bool, tokenizer_bos: bool) -> PreTrainedTokenizerFast:
    """Words as tokens; the template and/or the tokenizer put the begin-of-text token, or neither does."""
    words = ["<unk>", "<bos>", "<eos>", "<call>", "user:", "assistant:", "hello", "a", "x"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if tokenizer_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    start = "<bos> " if template_bos else ""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<call>"],
        chat_template=start + "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )


@pytest.mark.parametrize("template_bos", [True, False])
@pytest.mark.parametrize("tokenizer_bos", [True, False])
@pytest.mark.parametrize("content", ["hello", [{"role": "user", "content": "hello"}]])
def test_one_bos_exactly(template_bos: bool, tokenizer_bos: bool, content: Any) -> None:
    """open-r1#462, trl#3520: decided from the rendered ids. Where neither side puts one, the model has none."""
    chat = ChatFormat(word_tokenizer(template_bos, tokenizer_bos), end_token_ids=frozenset({2}))
    ids = chat.encode(Prompt("p", content))
    assert ids.count(1) == int(template_bos or tokenizer_bos)
    assert 1 not in ids[1:]
    assert ids[-3:] == [4, 6, 5]


@pytest.mark.parametrize("tokenizer_bos", [True, False])
def test_plain_text_prompts(tokenizer_bos: bool) -> None:
    chat = ChatFormat(word_tokenizer(False, tokenizer_bos), use_template=False, end_token_ids=frozenset({2}))
    assert chat.encode(Prompt("p", "hello x")) == [*([1] if tokenizer_bos else []), 6, 8]


def test_no_chat_template_says_what_to_do() -> None:
    tokenizer = word_tokenizer(True, True)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"has no chat template.*task\.chat = false"):
        ChatFormat(tokenizer, end_token_ids=frozenset({2}))
    ChatFormat(tokenizer, use_template=False, end_token_ids=frozenset({2}))


def test_no_end_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no end token"):
        ChatFormat(TINY)


def test_messages_without_template_are_refused() -> None:
    chat = ChatFormat(TINY, use_template=False, end_token_ids=END)
    with pytest.raises(DataError, match=r"Prompt p holds chat messages, but task\.chat is false"):
        chat.encode(Prompt("p", [{"role": "user", "content": "x"}]))


def test_a_template_that_raises_names_the_prompt() -> None:
    tokenizer = word_tokenizer(False, False)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = ChatFormat(tokenizer, end_token_ids=frozenset({2}))
    with pytest.raises(DataError, match="Prompt p: the model's chat template refuses it: roles must alternate"):
        chat.encode(Prompt("p", "x"))


def test_system_prompt_goes_first_unless_there_is_one() -> None:
    chat = ChatFormat(TINY, system_prompt="Be brief.", end_token_ids=END)
    assert TINY.decode(chat.encode(Prompt("p", "Hi"))) == "<system>Be brief.<end><user>Hi<end><assistant>"
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    assert TINY.decode(chat.encode(Prompt("p", own))).startswith("<system>Mine.<end><user>")


@pytest.mark.parametrize(("skip", "expected"), [(True, "x"), (False, "<call> x <call>")])
def test_special_tokens_in_the_text_are_an_option(skip: bool, expected: str) -> None:
    """trl#2897 and verl#715 wanted opposite things; the final end token reaches no reward either way."""
    chat = ChatFormat(word_tokenizer(True, True), skip_special_tokens=skip, end_token_ids=frozenset({2}))
    assert chat.decode([3, 8, 3, 2]) == expected


def test_text_is_cut_at_the_first_stop_string() -> None:
    chat = ChatFormat(TINY, stop=("##", "STOP"), end_token_ids=END)
    ids = TINY("some text STOP and ## more").input_ids
    assert chat.decode(ids) == "some text "
    assert chat.ends_with_stop(TINY("a ##").input_ids)
    assert not chat.ends_with_stop(TINY("a #").input_ids)


def test_all_end_tokens_of_the_model_are_found() -> None:
    class Generation:
        eos_token_id = (50, 51)

    assert end_token_ids(TINY, Generation()) == {TINY.eos_token_id, 50, 51}


def test_sampled_ids_are_never_encoded_again() -> None:
    """trl#5224: 'he' + 'llo' stays two tokens although the text would encode as one."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "he": 2, "llo": 3, "hello": 4}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    chat = ChatFormat(fast, use_template=False, end_token_ids=frozenset({1}))
    from gspo.rollout.collect import to_rollout
    from gspo.types import Completion

    class Parts:
        def __init__(self) -> None:
            self.chat = chat

    completion = Completion([2, 3, 1], [-0.1, -0.2, -0.3], "stop")
    rollout = to_rollout(Parts(), Prompt("p", "hello"), 0, [4], completion, 1.0)  # type: ignore[arg-type]
    assert rollout.token_ids == [2, 3, 1]
    assert len(rollout.rollout_logprobs) == len(rollout.completion_mask) == 3
    assert rollout.text.replace(" ", "") == "hello"
