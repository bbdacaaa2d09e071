"""Our gradient against TRL 1.16's own loss, through a real ``GRPOTrainer`` on the same weights and rows.

With ``importance_sampling_level="sequence"`` and ``loss_type="grpo"`` TRL's loss is equation (5) and the parameter
gradients must be equal. The other tests pin where TRL differs, so that a user who compares the two knows why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from gspo.algorithm.kl import kl_penalty
from gspo.algorithm.logprobs import plain_logprobs
from gspo.algorithm.objectives import gspo
from tests.batches import cumulative

VOCABULARY = 48
PROMPT, LENGTHS = 5, [1, 7, 3, 9, 4, 6]
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, 0.9, -1.1, -0.5])
SHIFTS = torch.tensor([2e-4, -9e-4, 2e-3, -3e-3, 5e-3, -1e-4])  # mean log-ratio of each row: both sides of 3e-4 / 4e-4
CLIPPED = [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]

# TRL sets this option by default; newer transformers renamed it
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")


def make_trainer(folder: Path, **settings: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    model.config._name_or_path = str(folder / "model")  # where TRL loads its reference from when beta > 0
    arguments = {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "beta": 0.0,
        **settings,
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=len(LENGTHS),
            num_generations=len(LENGTHS),
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6"] * len(LENGTHS)}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2"
        ),
    )


@pytest.fixture
def trainer(tmp_path: Path) -> GRPOTrainer:
    return make_trainer(tmp_path)


def make_inputs(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Right-padded completions; old log-probs off the present ones by ``SHIFTS`` on average, and noise around it."""
    generator = torch.Generator().manual_seed(1)
    rows, width = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(width)[None] < torch.tensor(LENGTHS)[:, None]
    inputs = {
        "prompt_ids": torch.randint(3, VOCABULARY, (rows, PROMPT), generator=generator),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.int64),
        "completion_ids": torch.randint(3, VOCABULARY, (rows, width), generator=generator).masked_fill(~mask, 0),
        "completion_mask": mask.long(),
        "advantages": ADVANTAGES,
        "num_items_in_batch": mask.sum(),
    }
    noise = torch.where(mask, 0.02 * torch.randn(rows, width, generator=generator), 0.0)
    noise = noise - noise.sum(1, keepdim=True) / mask.sum(1, keepdim=True) + SHIFTS[:, None]
    with torch.no_grad():
        inputs["old_per_token_logps"] = torch.where(mask, completion_logprobs(model, inputs) - noise, 0.0)
    return inputs


def completion_logprobs(model: LlamaForCausalLM, inputs: dict[str, Tensor]) -> Tensor:
    """[B, T] by a plain padded forward pass and our reference log-softmax."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    targets = inputs["completion_ids"]
    return plain_logprobs(logits.flatten(0, 1), targets.flatten()).logprobs.view(targets.shape)


def our_loss(model: LlamaForCausalLM, inputs: dict[str, Tensor]) -> Tensor:
    output = gspo(**packed(model, inputs), advantages=inputs["advantages"])
    assert output.clipped.tolist() == CLIPPED  # some rows of each kind, else the comparison says little
    return output.loss


def packed(model: LlamaForCausalLM, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The padded rows laid end to end, without padding."""
    keep = inputs["completion_mask"].bool()
    return {
        "logprobs": completion_logprobs(model, inputs)[keep],
        "old_logprobs": inputs["old_per_token_logps"][keep],
        "completion_mask": torch.ones(int(keep.sum()), dtype=torch.bool),
        "cu_seqlens": cumulative(LENGTHS),
    }


def their_loss(trainer: GRPOTrainer, inputs: dict[str, Tensor]) -> Tensor:
    trainer.model.train()  # the config has no dropout; TRL divides by the accumulation steps in training mode only
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop, which is not run here
    return trainer._compute_loss(trainer.model, inputs)


def gradient(loss: Tensor, model: torch.nn.Module) -> Tensor:
    return torch.cat([part.flatten().double() for part in torch.autograd.grad(loss, list(model.parameters()))])


def distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / second.norm())


def test_the_parameter_gradient_is_trls(trainer: GRPOTrainer) -> None:
    inputs = make_inputs(trainer.model)
    ours, theirs = our_loss(trainer.model, inputs), their_loss(trainer, inputs)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert distance(gradient(ours, trainer.model), gradient(theirs, trainer.model)) < 1e-5


def test_trls_default_loss_type_weighs_sequences_by_length(tmp_path: Path) -> None:
    """trl#3823: sequence ratios under the default ``loss_type`` sum each row's loss once per token."""
    assert GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).loss_type == "dapo"
    trainer = make_trainer(tmp_path, loss_type="dapo")
    inputs = make_inputs(trainer.model)
    theirs = gradient(their_loss(trainer, inputs), trainer.model)
    assert distance(theirs, gradient(our_loss(trainer.model, inputs), trainer.model)) > 0.2
    lengths = torch.tensor(LENGTHS, dtype=torch.float32)
    weighted = inputs | {"advantages": ADVANTAGES * lengths * len(LENGTHS) / lengths.sum()}
    assert distance(theirs, gradient(our_loss(trainer.model, weighted), trainer.model)) < 1e-5


def test_trls_kl_term_is_multiplied_by_the_sequence_ratio(tmp_path: Path) -> None:
    """trl#6586: on-policy the values agree, the gradients do not; with the token's own ratio it is the reverse KL."""
    trainer = make_trainer(tmp_path, beta=0.5)
    inputs = make_inputs(trainer.model)
    with torch.no_grad():
        inputs["old_per_token_logps"] = completion_logprobs(trainer.model, inputs)
    noise = torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(2))
    inputs["ref_per_token_logps"] = inputs["old_per_token_logps"] + 0.5 * noise
    inputs["advantages"] = torch.zeros(len(LENGTHS))
    reference = inputs["ref_per_token_logps"][inputs["completion_mask"].bool()]
    ours = 0.5 * kl_penalty(**packed(trainer.model, inputs), ref_logprobs=reference)
    theirs = their_loss(trainer, inputs)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert distance(gradient(theirs, trainer.model), gradient(ours, trainer.model)) > 0.1


def test_trl_lets_nan_under_the_mask_into_the_loss(trainer: GRPOTrainer) -> None:
    """NaN times 0 is NaN; selecting before the arithmetic is not."""
    inputs = make_inputs(trainer.model)
    clean = our_loss(trainer.model, inputs)
    hidden = ~inputs["completion_mask"].bool()
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"].masked_fill(hidden, torch.nan)
    assert their_loss(trainer, inputs).isnan()
    rows = completion_logprobs(trainer.model, inputs).flatten()
    ours = gspo(
        rows,
        old_logprobs=inputs["old_per_token_logps"].flatten(),
        completion_mask=~hidden.flatten(),
        advantages=ADVANTAGES,
        cu_seqlens=cumulative([max(LENGTHS)] * len(LENGTHS)),
    )
    torch.testing.assert_close(ours.loss, clean)
    assert gradient(ours.loss, trainer.model).isfinite().all()
