"""Preference training (DPO and its kin) over a mesh: TRL prepares the pairs, the last stage takes the loss.

    accelerate launch --config_file accelerate_configs/cpu_2x2.yaml examples/dpo.py \
        --model_name_or_path runs/models/smollm2-135m-instruct --dataset_name trl-lib/ultrafeedback_binarized \
        --pipeline_stages 2 --max_length 512 --max_steps 20 --output_dir runs/dpo

Data sets have `chosen` and `rejected`, and `prompt` where these do not begin with it. `--config` reads the arguments from a
file, for example examples/recipes/smollm3/3_preference.yaml.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer
from trl import TrlParser

from hf_meshadapt import MeshAdaptDPOConfig, MeshAdaptDPOTrainer


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "A model folder or the name of a model on the Hub."})
    dataset_name: str = field(metadata={"help": "Any dataset of pairs that `load_dataset` takes."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on, for example train[:98%]."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split that is held out."})
    num_train_rows: int | None = field(default=None, metadata={"help": "Train on at most this many pairs."})
    num_eval_rows: int | None = field(default=None, metadata={"help": "Evaluate on at most this many pairs."})
    metrics_file: str | None = field(default=None, metadata={"help": "JSON file for losses, speed and bytes."})


def load_pairs(script_args: ScriptArguments, split: str, most: int | None) -> Dataset:
    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config, split=split)
    columns = [name for name in ("prompt", "chosen", "rejected") if name in dataset.column_names]
    dataset = dataset.select_columns(columns)
    return dataset if most is None else dataset.select(range(min(most, len(dataset))))


def main():
    script_args, training_args = TrlParser((ScriptArguments, MeshAdaptDPOConfig)).parse_args_and_config()
    with training_args.main_process_first(desc="loading data"):
        train = load_pairs(script_args, script_args.dataset_train_split, script_args.num_train_rows)
        held_out = load_pairs(script_args, script_args.dataset_test_split, script_args.num_eval_rows)

    trainer = MeshAdaptDPOTrainer(
        model=script_args.model_name_or_path,  # every rank loads its own stage only
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=AutoTokenizer.from_pretrained(script_args.model_name_or_path),
    )
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
