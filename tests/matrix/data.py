"""Models, data sets and functions that an existing Trainer script may bring, tiny."""

from __future__ import annotations

import datasets
import numpy as np
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from tests.equality import Rows, collate

VOCAB = 97
SMALL = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def unseeded_llama(tied: bool = False, **config):
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied, max_position_embeddings=64, **config))


def llama(tied: bool = False, **config):
    torch.manual_seed(0)
    return unseeded_llama(tied, **config)


def tied_llama():
    return llama(tied=True)


def resized_llama():
    model = llama(tied=True)
    model.resize_token_embeddings(VOCAB + 7)
    return model


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def prompt_tuning() -> PromptTuningConfig:
    return PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")


def llama_with_lora():
    model = get_peft_model(tied_llama(), lora())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and then A gets no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def bfloat16_llama():
    return llama().to(torch.bfloat16)


def bert():
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SMALL))


def modern_bert():
    torch.manual_seed(0)
    special = dict(pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2)
    config = ModernBertConfig(
        **SMALL, **special, embedding_dropout=0.0, attention_dropout=0.0, mlp_dropout=0.0, attn_implementation="eager"
    )
    return ModernBertForMaskedLM(config)


class Stream(IterableDataset):
    """Rows without indices."""

    def __init__(self, num_rows: int, seed: int = 1):
        self.rows = Rows(num_rows, seed).rows

    def __iter__(self):
        return iter(self.rows)


class SizedStream(Stream):
    def __len__(self):
        return len(self.rows)


def plain_rows(num_rows: int, seed: int = 1) -> list[dict]:
    """Rows as lists, with columns that no model takes."""
    rows = [{name: tensor.tolist() for name, tensor in row.items()} for row in Rows(num_rows, seed).rows]
    return [{**row, "question": f"number {i}", "difficulty": i} for i, row in enumerate(rows)]


def table(num_rows: int, seed: int = 1) -> datasets.Dataset:
    return datasets.Dataset.from_list(plain_rows(num_rows, seed)).with_format("torch")


def streamed_table(num_rows: int, seed: int = 1) -> datasets.IterableDataset:
    return table(num_rows, seed).to_iterable_dataset(num_shards=3)


def ragged(rows) -> dict:
    """Pads to the batch's longest, in fours: replicas see other lengths than one process would."""
    return collate(rows, multiple=4)


def collate_sixteen(rows) -> dict:
    """One length for all: padding counts."""
    return collate(rows, multiple=16)


def with_difficulty(rows) -> dict:
    return {**ragged(rows), "difficulty": torch.tensor([int(row["difficulty"]) for row in rows])}


def with_question(rows) -> dict:
    return {**ragged(rows), "question": [row["question"] for row in rows]}


def masked_at_random(rows) -> dict:
    """As for masked language modelling: other positions at every look, in inputs and labels alike."""
    batch = collate(rows, multiple=16)
    masked = torch.rand(batch["input_ids"].shape) < 0.3
    inputs, labels = batch["input_ids"].masked_fill(masked, 0), batch["labels"].masked_fill(masked, -100)
    return {**batch, "input_ids": inputs, "labels": labels}


def without_labels(rows) -> dict:
    return {name: tensor for name, tensor in ragged(rows).items() if name != "labels"}


def tokenizer_without_padding() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w3")), eos_token="w2")


def greedy(logits, labels):
    return logits.argmax(-1)


def top_two(logits, labels):
    """Nested, and of two dtypes."""
    best = logits.topk(2)
    return {"tokens": best.indices, "scores": (best.values,)}


def accuracy(prediction) -> dict:
    """Of the next token, with whatever else was asked for; sums that notice a row too many or too few."""
    tokens, labels = prediction.predictions, prediction.label_ids
    if isinstance(tokens, dict):
        tokens = tokens["tokens"][..., 0]
    if tokens.ndim == 3:
        tokens = tokens.argmax(-1)
    predicted = labels[:, 1:] != -100
    figures = {
        "accuracy": (tokens[:, :-1] == labels[:, 1:])[predicted].mean(),
        "places": (predicted * np.arange(len(labels))[:, None]).sum(),
        "sum": tokens[:, :-1][predicted].sum(),
    }
    if prediction.inputs is not None:
        figures["inputs"] = prediction.inputs[prediction.inputs > 0].sum()
    if prediction.losses is not None:
        figures["mean_loss"] = prediction.losses.mean()
    return figures


def accuracy_of_batches(prediction) -> dict:
    """Takes `eval_do_concat_batches=False`: lists of batches."""
    pairs = zip(prediction.predictions, prediction.label_ids)
    return {"sum": sum(float(tokens[:, :-1][labels[:, 1:] != -100].sum()) for tokens, labels in pairs)}


class RunningAccuracy:
    """For `batch_eval_metrics`: sees tensors of a batch at a time."""

    def __init__(self):
        self.hits = self.total = 0

    def __call__(self, prediction, compute_result: bool) -> dict:
        labels = prediction.label_ids[:, 1:]
        self.hits += int((prediction.predictions[:, :-1] == labels)[labels != -100].sum())
        self.total += int((labels != -100).sum()) + int((prediction.inputs["input_ids"] > 0).sum())
        if not compute_result:
            return {}
        result, self.hits, self.total = {"hits": self.hits, "total": self.total}, 0, 0
        return result


def summed_loss(outputs, labels, num_items_in_batch=None):
    """A loss function that keeps Trainer's contract: a sum of token losses over `num_items_in_batch`."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def mean_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets)
