"""Parts of the model card out of a run's record: rows of its tables and its code blocks. Pure functions."""

from __future__ import annotations

ARGUMENT_WIDTH = 100
# What a report holds beside figures by axis, and how the card writes it.
MEASURED = {
    "tokens_per_second": ("tokens per second", "{:,.1f}"),
    "wait_share": ("share of the time spent waiting for other ranks", "{:.1%}"),
}
BY_AXIS = ("bytes_per_token", "planned_bytes_per_token", "bytes_ratio_to_dense")
CODEC_FIELDS = {
    "random_mask": ("mask_ratio", "exact_first_token", "predictor", "wire_dtype"),
    "transform": ("budget", "forward_share", "entropy_coded", "loss_weighted", "exact_first_token", "predictor"),
    "subspace": ("budget", "forward_share", "exact_first_token", "predictor"),
    "bottleneck": ("budget",),
    "topk": ("budget", "error_feedback"),
    "topk_free_indices": ("budget", "error_feedback"),
    "quantize": ("bits", "rotated"),
    "aq_sgd": ("bits",),
    "tah_quant": (),
    "none": ("wire_dtype",),
}


def number(value: float) -> str:
    """Four significant digits, without an exponent where that is readable."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def result_rows(record: dict) -> list[tuple[str, str]]:
    """First and last losses, steps and epochs, out of the trainer's log history."""
    history = record["log_history"]
    rows = [("optimizer steps", f"{record['global_step']:,}")] if record["global_step"] else []
    for key, name in (("loss", "training loss"), ("eval_loss", "evaluation loss")):
        values = [log[key] for log in history if log.get(key) is not None]
        if len(values) > 1:
            rows.append((f"{name}, first and last", f"{number(values[0])}, {number(values[-1])}"))
        elif values:
            rows.append((name, number(values[0])))
    epochs = [log["epoch"] for log in history if log.get("epoch") is not None]
    return rows + ([("epochs", number(epochs[-1]))] if epochs else [])


def adapter_rows(record: dict) -> list[tuple[str, str]]:
    """How the adapter was made; nothing where whole weights were trained."""
    names = {"peft_type": "kind", "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    return [
        row
        for name, value in (record.get("adapter") or {}).items()
        for row in _named(names.get(name, name.replace("_", " ")), value)
    ]


def mesh_rows(record: dict) -> list[tuple[str, str]]:
    """Shape of the mesh and what its boundaries do."""
    mesh, boundary = record["mesh"], record["boundary"]
    rows = [
        ("pipeline stages", str(mesh["stages"])),
        ("data-parallel replicas", str(mesh["replicas"])),
        ("microbatches, schedule", f"{mesh['microbatches']}, {mesh['schedule']}"),
        ("processes", "1 (emulated mesh)" if mesh["emulated"] else str(mesh["stages"] * mesh["replicas"])),
        ("device of rank 0", record["device"]),
    ]
    if mesh["chunks_per_rank"] > 1:
        rows.insert(1, ("model chunks per rank", str(mesh["chunks_per_rank"])))
    if mesh["stages"] * mesh["chunks_per_rank"] == 1:
        return rows
    rows.append(("boundary codec", f"`{boundary['codec']}`"))
    for name in CODEC_FIELDS.get(boundary["codec"], ()):
        rows.append((f"boundary {name.replace('_', ' ')}", _value(boundary[name])))
    return rows


def traffic_rows(report: dict) -> list[tuple[str, ...]]:
    """By axis and in total: bytes per token as sent, as planned, dense, and the share of dense; `-` where unknown."""
    sent, planned, shares = (report.get(name) or {} for name in BY_AXIS)
    rows = []
    for axis, planned_bytes in planned.items():
        share = shares.get(axis)
        rows.append(
            (
                axis.replace("_", " "),
                number(sent[axis]) if sent.get(axis) is not None else "-",
                number(planned_bytes),
                number(planned_bytes / share) if share else "-",
                f"{share:.1%}" if share is not None else "-",
            )
        )
    return [row for row in rows if row[2] != "0"]


def figure_rows(report: dict) -> list[tuple[str, str]]:
    """Whatever else the report holds, figures that this module does not know by name too."""
    rows = []
    for name, value in report.items():
        if name in MEASURED and value:
            rows.append((MEASURED[name][0], MEASURED[name][1].format(value)))
        elif name not in (*BY_AXIS, *MEASURED) and value is not None:
            rows += _named(name.replace("_", " "), value)
    return rows


def _named(name: str, value) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [row for key, entry in value.items() for row in _named(f"{name}: {str(key).replace('_', ' ')}", entry)]
    if isinstance(value, list | tuple):
        return [(name, ", ".join(map(_value, value)))] if value else []
    return [] if value is None else [(name, _value(value))]


def _value(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def evaluation_rows(evaluation: dict | None) -> list[tuple[str, ...]]:
    """Task, metric, number of examples, the base model's result where there is one, and this model's."""
    rows = []
    base = ((evaluation or {}).get("base") or {}).get("results")
    for task, metrics in ((evaluation or {}).get("results") or {}).items():
        for metric, entry in metrics.items():
            samples = (evaluation.get("samples") or {}).get(task)
            before = [] if base is None else [_with_error(base.get(task, {}).get(metric))]
            rows.append((task, metric, str(samples) if samples else "-", *before, _with_error(entry)))
    return rows


def evaluation_settings(evaluation: dict | None) -> str:
    """How the models were asked, where that is not lm-eval's default; empty where it is."""
    found = evaluation or {}
    shots, dtype = found.get("num_fewshot"), found.get("dtype") or "auto"
    settings = [
        *([] if shots is None else [f"{shots}-shot"]),
        *(["chat template"] if found.get("chat_template") else []),
        *([] if dtype == "auto" else [dtype]),
    ]
    return ", ".join(settings)


def _with_error(entry: dict | None) -> str:
    if entry is None:
        return "-"
    error = entry.get("stderr")
    return f"{entry['value']:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def load_code(repo_id: str, architecture: str, base_model: str | None, is_adapter: bool, has_tokenizer: bool) -> str:
    """Python that loads the model, by its name on the Hub where that is known."""
    where = f'"{repo_id}"' if repo_id else '"."  # this folder'
    kind = "AutoModelForCausalLM" if architecture.endswith(("ForCausalLM", "LMHeadModel")) else architecture
    names = [kind, *(["AutoTokenizer"] if has_tokenizer else [])]
    lines = [f"from transformers import {', '.join(names)}"]
    if is_adapter:
        lines += ["from peft import PeftModel"]
    lines += ["", f"name = {where}"]
    if is_adapter:
        source = f'"{base_model}"' if base_model else '"the base model"'
        lines += [f"base = {kind}.from_pretrained({source})", "model = PeftModel.from_pretrained(base, name)"]
        lines += ["# For plain weights, without peft from here on: model = model.merge_and_unload()"]
    else:
        lines += [f"model = {kind}.from_pretrained(name)"]
    if has_tokenizer:
        lines += ["tokenizer = AutoTokenizer.from_pretrained(name)"]
    return _python_block(lines)


def launch_command(mesh: dict, has_anchor: bool = False) -> str:
    """How the ranks are started; `has_anchor` where a launch of its own corrected them."""
    if mesh["emulated"]:
        return "python train.py"
    num_ranks = mesh["stages"] * mesh["replicas"]
    fast = f"accelerate launch --multi_gpu --num_processes {num_ranks} train.py  # your script: it makes the trainer"
    anchor = "# and once more as the anchor, with circuit='anchor'; both circuits with fast_endpoint='HOST:PORT'"
    return f"{fast}\n{anchor}" if has_anchor else fast


def argument_code(arguments: dict, class_name: str) -> str:
    lines = [f"    {name}={value!r}," for name, value in arguments.items()]
    return _python_block([f"from hf_meshadapt import {class_name}", "", f"args = {class_name}(", *lines, ")"])


def _python_block(lines: list[str]) -> str:
    # With its fences: a formatter would take the template's place holder for Python.
    return "\n".join(["```python", *lines, "```"])
