"""Supervised fine-tuning on text, chats or prompts with completions over a mesh: TRL prepares the data.

    accelerate launch --config_file accelerate_configs/cpu_2x2.yaml examples/sft.py \
        --model_name_or_path runs/models/smollm2-135m-instruct \
        --pipeline_stages 2 --packing --max_length 512 --max_steps 20 --output_dir runs/sft

Any data set that TRL's SFTTrainer takes, by its columns: `text`, `messages`, or `prompt` and `completion`:

    ... examples/sft.py --model_name_or_path meta-llama/Llama-3.2-1B-Instruct \
        --dataset_name trl-lib/Capybara --pad_to_multiple_of 64 --assistant_only_loss ...
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from gsm8k_data import load_gsm8k
from transformers import AutoTokenizer, HfArgumentParser

from hf_meshadapt import MeshAdaptSFTConfig, MeshAdaptSFTTrainer


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
    num_train_rows: int | None = field(default=None, metadata={"help": "Train on at most this many rows."})
    num_eval_rows: int | None = field(default=None, metadata={"help": "Evaluate on at most this many rows."})
    metrics_file: str | None = field(default=None, metadata={"help": "JSON file for losses, speed and bytes."})


def as_completion(problem: dict, is_chat: bool) -> dict:
    """A question and its answer in TRL's prompt-completion form, so that only the answer has labels."""
    if not is_chat:
        return {"prompt": problem["question"] + "\n", "completion": problem["answer"]}
    return {
        "prompt": [{"role": "user", "content": problem["question"]}],
        "completion": [{"role": "assistant", "content": problem["answer"]}],
    }


def load_splits(script_args: ScriptArguments, tokenizer) -> tuple[Dataset, Dataset]:
    """Rows to train on and rows held out, as they are written: the trainer tokenises them."""
    if script_args.dataset_name is None:
        is_chat = tokenizer.chat_template is not None
        train, held_out = (
            Dataset.from_list([as_completion(problem, is_chat) for problem in part]) for part in load_gsm8k()
        )
    else:
        dataset = load_dataset(script_args.dataset_name, script_args.dataset_config)
        train, held_out = dataset[script_args.dataset_train_split], dataset[script_args.dataset_test_split]
    counts = (script_args.num_train_rows, script_args.num_eval_rows)
    train, held_out = (
        part if most is None else part.select(range(min(most, len(part))))
        for part, most in zip((train, held_out), counts)
    )
    return train, held_out


def main():
    parser = HfArgumentParser((ScriptArguments, MeshAdaptSFTConfig))
    script_args, training_args = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    with training_args.main_process_first(desc="loading data"):
        train, held_out = load_splits(script_args, tokenizer)

    trainer = MeshAdaptSFTTrainer(
        model=script_args.model_name_or_path,  # every rank loads its own stage only
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    if training_args.runs_anchor:
        trainer.train()  # serves the fast circuit, which evaluates and saves
        return
    loss_before = trainer.evaluate()["eval_loss"]
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
