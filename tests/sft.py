"""Tiny supervised fine-tuning runs, made the same way for TRL's SFTTrainer and for the mesh."""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from hf_meshadapt import MeshAdaptSFTConfig, MeshAdaptSFTTrainer
from tests.equality import COMMON, VOCAB, summary, tiny_model

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<bot>")
# The markers say which tokens are the assistant's.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<bot> {% generation %}{{ message.content }} <eos> "
    "{% endgeneration %}{% else %}<user> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
SHORT = dict(max_steps=3, eval_steps=2, bf16=False, max_length=24)
NUM_ROWS, NUM_EVAL_ROWS = 26, 9


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: `w0`, `w1` and so on, and `SPECIAL`."""
    words = [*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


class Words:
    """Draws words."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, least: int, most: int) -> str:
        count = int(torch.randint(least, most + 1, (), generator=self.generator))
        drawn = torch.randint(VOCAB - len(SPECIAL), (count,), generator=self.generator)
        return " ".join(f"w{i}" for i in drawn.tolist())


def texts(num_rows: int, seed: int) -> Dataset:
    words = Words(seed)
    return Dataset.from_dict({"text": [words(4, 14) for _ in range(num_rows)]})


def chats(num_rows: int, seed: int) -> Dataset:
    words = Words(seed)
    turns = [[("user", words(2, 4)), ("assistant", words(2, 5))] * 2 for _ in range(num_rows)]
    messages = [[{"role": role, "content": content} for role, content in row] for row in turns]
    return Dataset.from_dict({"messages": messages})


def completions(num_rows: int, seed: int) -> Dataset:
    words = Words(seed)
    rows = [{"prompt": words(3, 8) + " ", "completion": words(2, 5)} for _ in range(num_rows)]
    return Dataset.from_list(rows)


LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
# Data, and options of SFTConfig; `lora` is for peft.
CASES = {
    "text": (texts, {}),
    "messages": (chats, {"assistant_only_loss": True}),
    "completion": (completions, {"pad_to_multiple_of": 16}),
    "bfd": (texts, {"packing": True}),
    "wrapped": (texts, {"packing": True, "packing_strategy": "wrapped"}),
    "lora": (texts, {"packing": True, "lora": LORA}),
}


def train_single(case: str, folder: str) -> dict:
    """TRL's own trainer in one process."""
    data, options = CASES[case]
    options, lora = without_lora(options)
    args = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        **{**COMMON, **SHORT, **options},
    )
    model = tiny_model("llama")
    set_seed(args.seed)  # TRL makes adapters before it seeds anything
    trainer = SFTTrainer(
        model,
        args,
        peft_config=lora,
        train_dataset=data(NUM_ROWS, 1),
        eval_dataset=data(NUM_EVAL_ROWS, 2),
        processing_class=tokenizer(),
    )
    trainer.train()
    state = trainer.model.state_dict()
    if lora is not None:  # names as in the model itself; of the rest a mesh saves nothing
        state = {name.removeprefix("base_model.model."): state[name] for name in state if "lora_" in name}
    return outcome(trainer, state)


def mesh_trainer(case: str, folder: str, model=None, **overrides) -> MeshAdaptSFTTrainer:
    """Two stages: this rank's, or emulated without a launcher.

    Args:
        overrides: of `MeshAdaptSFTConfig`, and `trainer`: a dict of further constructor arguments.
    """
    data, options = CASES[case]
    arguments = {**COMMON, **SHORT, "pipeline_stages": 2, "preset": "dense", **options, **overrides}
    others = {
        "train_dataset": data(NUM_ROWS, 1),
        "eval_dataset": data(NUM_EVAL_ROWS, 2),
        "processing_class": tokenizer(),
    }
    arguments, lora = without_lora(arguments)
    others |= {"peft_config": lora} | arguments.pop("trainer", {})
    args = MeshAdaptSFTConfig(
        output_dir=folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, **arguments
    )
    return MeshAdaptSFTTrainer(model or tiny_model("llama"), args, **others)


def without_lora(options: dict) -> tuple[dict, LoraConfig | None]:
    """Options of the trainer's arguments, and of peft."""
    lora = options.get("lora")
    return {name: value for name, value in options.items() if name != "lora"}, lora and LoraConfig(**lora)


def mesh_outcome(trainer: MeshAdaptSFTTrainer) -> dict:
    state = trainer.engine.parts.model.state_dict()
    return outcome(trainer, {name: state[name] for name in trainer.engine.parts.saved_names()})


def outcome(trainer, state: dict[str, torch.Tensor]) -> dict:
    logs = trainer.state.log_history
    return summary(trainer, state) | {"num_tokens": [log["num_tokens"] for log in logs if "num_tokens" in log]}
