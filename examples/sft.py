"""Supervised fine-tuning on text, chats or prompts with completions over a mesh: TRL prepares the data.

    accelerate launch --config_file accelerate_configs/cpu_2x2.yaml examples/sft.py \
        --model_name_or_path runs/models/smollm2-135m-instruct \
        --pipeline_stages 2 --packing --max_length 512 --max_steps 20 --output_dir runs/sft

Any data set that TRL's SFTTrainer takes, by its columns: `text`, `messages`, or `prompt` and `completion`:

    ... examples/sft.py --model_name_or_path meta-llama/Llama-3.2-1B-Instruct \
        --dataset_name trl-lib/Capybara --pad_to_multiple_of 64 --assistant_only_loss ...

Other columns are put into sentences by `prompt_template` and `completion_template`. `--config` reads all of this from a
file; examples/recipes/ has one for each domain:

    ... examples/sft.py --config examples/recipes/sql.yaml --max_steps 100
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from gsm8k_data import load_gsm8k
from transformers import AutoTokenizer
from trl import TrlParser

from hf_meshadapt import MeshAdaptSFTConfig, MeshAdaptSFTTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "A model folder or the name of a model on the Hub."})
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Any dataset that `load_dataset` takes. Default: GSM8K from its installed package."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on, for example train[:98%]."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split that is held out."})
    prompt_template: str | None = field(
        default=None, metadata={"help": "Makes a prompt of a row's columns, as str.format does: `{question}`."}
    )
    completion_template: str | None = field(
        default=None, metadata={"help": "Makes a completion of a row's columns; goes with prompt_template."}
    )
    num_train_rows: int | None = field(default=None, metadata={"help": "Train on at most this many rows."})
    num_eval_rows: int | None = field(default=None, metadata={"help": "Evaluate on at most this many rows."})
    metrics_file: str | None = field(default=None, metadata={"help": "JSON file for losses, speed and bytes."})


def as_completion(row: dict, templates: tuple[str, str], is_chat: bool) -> dict:
    """A row in TRL's prompt-completion form, so that only the completion has labels."""
    prompt, completion = (template.format(**row) for template in templates)
    if not is_chat:
        return {"prompt": prompt + "\n", "completion": completion}
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": completion}],
    }


def load_splits(script_args: ScriptArguments, is_chat: bool) -> list[Dataset]:
    """Rows to train on and rows held out, as they are written: the trainer tokenises them."""
    templates = script_args.prompt_template, script_args.completion_template
    if script_args.dataset_name is None:
        parts = [Dataset.from_list(problems) for problems in load_gsm8k()]
        templates = "{question}", "{answer}"
    else:
        splits = script_args.dataset_train_split, script_args.dataset_test_split
        parts = [load_dataset(script_args.dataset_name, script_args.dataset_config, split=split) for split in splits]
    counts = (script_args.num_train_rows, script_args.num_eval_rows)
    parts = [part if most is None else part.select(range(min(most, len(part)))) for part, most in zip(parts, counts)]
    if templates == (None, None):
        return parts
    if None in templates:
        raise ValueError("prompt_template and completion_template go together: give both or neither")
    kwargs = {"templates": templates, "is_chat": is_chat}
    return [part.map(as_completion, fn_kwargs=kwargs, remove_columns=part.column_names) for part in parts]


def main():
    script_args, training_args = TrlParser((ScriptArguments, MeshAdaptSFTConfig)).parse_args_and_config()
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name_or_path)
    with training_args.main_process_first(desc="loading data"):
        train, held_out = load_splits(script_args, is_chat=tokenizer.chat_template is not None)

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
