"""Train LoRA adapters on question-answer pairs over a mesh; the model's own weights stay as they are.

    accelerate launch --config_file accelerate_configs/cpu_2x1.yaml examples/finetune_lora.py \
        --model_name_or_path runs/models/smollm2-135m-instruct \
        --pipeline_stages 2 --bf16 --learning_rate 5e-4 --max_steps 20 --output_dir runs/lora

Model and data are given as to finetune_gsm8k.py. What is saved is one peft adapter; this, without a launcher, makes it
part of the model:

    from peft import AutoPeftModelForCausalLM
    AutoPeftModelForCausalLM.from_pretrained("runs/lora").merge_and_unload().save_pretrained("runs/merged")
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from finetune_gsm8k import ScriptArguments, load_splits, tokenize
from peft import LoraConfig
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer


@dataclass
class AdapterArguments:
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Their scale is this over the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before every adapter."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the modules to adapt; `all-linear`: all matrices but the output head."},
    )
    use_dora: bool = field(default=False, metadata={"help": "Train magnitudes apart from directions (DoRA)."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale over the root of the rank instead (rsLoRA)."})

    def lora_config(self) -> LoraConfig:
        names = self.lora_target_modules
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules="all-linear" if names == ["all-linear"] else names,
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
        )


def main():
    parser = HfArgumentParser((ScriptArguments, AdapterArguments, MeshAdaptArguments))
    script_args, adapter_args, training_args = parser.parse_args_into_dataclasses()

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
        peft_config=adapter_args.lora_config(),
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=32),  # few lengths: few buffers to make
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
