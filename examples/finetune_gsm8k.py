"""Fine-tune a causal language model on question-answer pairs over a mesh of pipeline stages and replicas.

    accelerate launch --config_file accelerate_configs/cpu_2x2.yaml examples/finetune_gsm8k.py \
        --model_name_or_path runs/models/smollm2-135m-instruct \
        --pipeline_stages 2 --preset paper --bf16 --max_steps 20 --output_dir runs/gsm8k

A model and a dataset of the Hub go through the same code:

    ... examples/finetune_gsm8k.py --model_name_or_path meta-llama/Llama-3.2-1B-Instruct \
        --dataset_name openai/gsm8k --dataset_config main --num_train_problems 7473 ...
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from gsm8k_data import load_gsm8k
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser, set_seed

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "A model folder or the name of a model on the Hub."})
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Any dataset that `load_dataset` takes. Default: GSM8K from its installed package."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split that is held out."})
    prompt_column: str = field(default="question", metadata={"help": "Column with the prompts."})
    response_column: str = field(default="answer", metadata={"help": "Column with the responses."})
    max_length: int = field(default=320, metadata={"help": "Longer examples are left out (tokens)."})
    num_train_problems: int = field(default=1000, metadata={"help": "Train on at most this many examples."})
    num_eval_problems: int = field(default=319, metadata={"help": "Evaluate on at most this many examples."})
    evaluate_before: bool = field(default=True, metadata={"help": "Evaluate before training too."})
    metrics_file: str | None = field(default=None, metadata={"help": "JSON file for losses, speed and bytes."})


def load_splits(script_args: ScriptArguments) -> tuple[Dataset, Dataset]:
    """Examples to train on and examples held out, in their written form."""
    if script_args.dataset_name is None:
        train, held_out = load_gsm8k()
        return Dataset.from_list(train), Dataset.from_list(held_out)
    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config)
    return dataset[script_args.dataset_train_split], dataset[script_args.dataset_test_split]


def tokenize(dataset: Dataset, num_examples: int, tokenizer, script_args: ScriptArguments) -> Dataset:
    """Token ids and labels of the first `num_examples` that are short enough; only the answer has labels."""

    def encode(example):
        prompt, response = example[script_args.prompt_column], example[script_args.response_column]
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        else:
            prompt_ids = tokenizer(prompt + "\n")["input_ids"]
        response_ids = tokenizer(response + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        return {
            "input_ids": prompt_ids + response_ids,
            "attention_mask": [1] * (len(prompt_ids) + len(response_ids)),
            "labels": [-100] * len(prompt_ids) + response_ids,
        }

    encoded = dataset.map(encode, remove_columns=dataset.column_names)
    encoded = encoded.filter(lambda example: len(example["input_ids"]) <= script_args.max_length)
    return encoded.select(range(min(num_examples, len(encoded))))


def main():
    parser = HfArgumentParser((ScriptArguments, MeshAdaptArguments))
    script_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with training_args.main_process_first(desc="tokenising"):
        train, held_out = load_splits(script_args)
        train = tokenize(train, script_args.num_train_problems, tokenizer, script_args)
        held_out = tokenize(held_out, script_args.num_eval_problems, tokenizer, script_args)

    trainer = MeshAdaptTrainer(
        model=script_args.model_name_or_path,  # every rank loads its own stage only
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=32),  # few lengths: few buffers to make
        processing_class=tokenizer,
    )
    if training_args.runs_anchor:
        trainer.train()  # serves the fast circuit, which evaluates and saves
        return
    loss_before = trainer.evaluate()["eval_loss"] if script_args.evaluate_before else None
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    loss_after = trainer.evaluate()["eval_loss"]
    trainer.save_model(training_args.output_dir)

    report = trainer.mesh_report()
    if trainer.is_world_process_zero():
        metrics = {"loss_before": loss_before, "loss_after": loss_after, **report}
        print(json.dumps(metrics, indent=2))
        if script_args.metrics_file:
            Path(script_args.metrics_file).write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
