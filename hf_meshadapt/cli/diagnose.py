"""`meshadapt diagnose`: whether an anchor's priors can help a model on some data, measured on one device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..json_lines import read_json_lines, read_text
from .options import add_command, model_source

PRUNING_BATCHES = 16
# Choices: cosine of anchor gradients that have a direction in common, and a change of a cosine that is worth a word.
LASTING, NOTICED = 0.1, 0.02


def add_commands(commands) -> None:
    command = add_command(
        commands,
        "diagnose",
        run,
        "measure whether gradients of a model are of low rank, how fast they age, and what boundaries leave of them",
        "meshadapt diagnose HuggingFaceTB/SmolLM2-135M-Instruct --data train.jsonl --out runs/diagnosis",
    )
    command.add_argument("model", type=model_source, metavar="MODEL", help="name or folder of a causal language model")
    command.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="text (.txt), or JSON lines (.jsonl) with a text each"
    )
    command.add_argument("--field", default="text", help="JSON lines: key of the text (default: %(default)s)")
    command.add_argument("--out", type=Path, metavar="DIR", help="write diagnosis.json and diagnosis.png there, too")
    command.add_argument(
        "--from-scratch", action="store_true", help="begin with new weights instead of the model's own"
    )
    command.add_argument(
        "--pruning-twin",
        type=model_source,
        metavar="DIR",
        help="a model trained without coding: print how MODEL and it bear pruning, too",
    )
    command.add_argument("--length", type=int, default=128, help="tokens per row at most (default: %(default)s)")
    command.add_argument("--rows", type=int, default=4, help="rows of a batch (default: %(default)s)")
    command.add_argument("--stages", type=int, default=2, help="pipeline stages (default: %(default)s)")
    command.add_argument("--anchors", type=int, default=4, help="anchor gradients to take (default: %(default)s)")
    command.add_argument("--anchor-every", type=int, default=5, help="steps between two (default: %(default)s)")
    command.add_argument("--learning-rate", type=float, default=2e-5, help="of the steps (default: %(default)s)")
    command.add_argument("--mask-ratio", type=float, default=0.95, help="of random masks (default: %(default)s)")
    command.add_argument("--prior-rank", type=int, default=64, help="rank of the prior (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of data order and masks (default: %(default)s)")


def run(args) -> int:
    texts = read_texts(args.data, args.field)  # before what takes long to import

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, set_seed

    from ..diagnosing import DiagnosisOptions, diagnose, draw
    from ..pruning import pruned_losses

    options = DiagnosisOptions(
        stages=args.stages, rows=args.rows, num_anchors=args.anchors, anchor_every=args.anchor_every,
        learning_rate=args.learning_rate, mask_ratio=args.mask_ratio, prior_rank=args.prior_rank, seed=args.seed,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = token_rows(texts, tokenizer, args.length)
    set_seed(args.seed)
    if args.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model)).float()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)
    pruning = {}
    if args.pruning_twin is not None:
        twin = AutoModelForCausalLM.from_pretrained(args.pruning_twin, dtype="float32")
        batches = [collator(rows[start : start + args.rows]) for start in range(0, len(rows), args.rows)]
        pruning = {n: pruned_losses(m, batches[:PRUNING_BATCHES]) for n, m in (("MODEL", model), ("twin", twin))}
        del twin
    figures = diagnose(model, rows, collator, options) | ({"pruning": pruning} if pruning else {})
    print(describe(figures))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "diagnosis.json").write_text(json.dumps(vars(args) | figures, indent=1, default=str) + "\n")
        draw(figures, args.out / "diagnosis.png")
    return 0


def read_texts(path: Path, field: str) -> list[str]:
    """The rows of JSON lines, or a whole text as one.

    Raises:
        ValueError: no such key in a row, a row that is no JSON, a file that is no text, or nothing to read.
    """
    if path.suffix not in (".jsonl", ".json"):
        texts = [read_text(path)]
    else:
        rows = read_json_lines(path)
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"--field={field}: row {number} of {path} has no such text ({found}). Name another")
        texts = [row[field] for row in rows]
    if not any(text.strip() for text in texts):
        raise ValueError(f"--data={path}: there is no text in it. Give at least one row")
    return texts


def token_rows(texts: list[str], tokenizer, length: int) -> list[dict]:
    """Rows of at most `length` tokens. Long texts are cut into several, what is left over is dropped where it is less than
    half a row: the gradient of a few tokens has no more directions than these, and says nothing of the model.

    Raises:
        ValueError: `length` below 2, or nothing is left.
    """
    if length < 2:
        raise ValueError(f"--length={length}: must be at least 2: a token is predicted from those before it. Try 128")
    rows = []
    for tokens in tokenizer(texts)["input_ids"]:
        pieces = [tokens[start : start + length] for start in range(0, len(tokens), length)]
        least = length / 2 if len(pieces) > 1 else 2
        rows += [{"input_ids": piece} for piece in pieces if len(piece) >= least and len(piece) > 1]
    if not rows:
        raise ValueError("--data: no row has two tokens or more. Give longer texts")
    return rows


def describe(figures: dict) -> str:
    """The figures as a table."""
    lines = [f"{figures['num_matrices']} matrices; lower quartile, median and upper quartile over them", ""]
    lines += [f"  {name:24}" + _three(values) for name, values in figures["matrices"].items()]
    lines += ["", "cosine of anchor gradients, by optimizer steps between them", ""]
    lines += [f"  {steps:<24}{value:8.3f}" for steps, value in figures["staleness"].items()]
    lines += ["", *_cosine_lines(figures["boundaries"]), "", *_energy_lines(figures["boundaries"]), ""]
    lines += verdict(figures)
    return "\n".join(lines + (["", *_pruning_lines(figures["pruning"])] if "pruning" in figures else []))


def verdict(figures: dict) -> list[str]:
    """What the figures say about an anchor, in sentences."""
    steps, cosine = next(iter(figures["staleness"].items()))
    meaning = (
        "a prior tells little of the next steps. Anchors with more batches (anchor_batches) have less noise",
        "a prior tells where the model has been going",
    )[cosine >= LASTING]
    lines = [f"Anchor gradients {steps} steps apart have a cosine of {cosine:.2f}: {meaning}."]
    for kind, row in figures["boundaries"].items():
        if kind != "uncoded":
            before, after = row["cosine_to_uncoded"], row["corrected_cosine_to_uncoded"]
            change = after - before
            effect = "comes closer" if change > NOTICED else "is further away" if change < -NOTICED else "stays"
            lines.append(f"{kind}: the corrected gradient {effect} ({before:.2f} to {after:.2f} of the uncoded one).")
    return [*lines, "What that does to the loss, runs tell: compare them with correction_rule=anchor_only."]


def _cosine_lines(boundaries: dict) -> Iterator[str]:
    columns = {
        "cosine_to_uncoded": "cosine to uncoded",
        "corrected_cosine_to_uncoded": "when corrected",
        "cosine_to_prior": "cosine to prior",
    }
    yield f"  {'boundary':24}" + "".join(f"{head:>20}" for head in columns.values())
    for kind, row in boundaries.items():
        yield f"  {kind:24}" + "".join(f"{row[name]:20.3f}" for name in columns)


def _energy_lines(boundaries: dict) -> Iterator[str]:
    heads = ("share of energy in the prior's subspace", "and in what the filter keeps")
    yield f"  {'':34}" + "".join(f"{head:>42}" for head in heads)
    for kind, row in boundaries.items():
        for part, what in (("", "gradient"), ("error_", "error")):
            shares = row[f"{part}share_in_prior"], row[f"{part}kept_by_filter"]
            if shares[0]:
                yield f"  {f'{kind}, {what}':34}" + "".join(f"{_three(share):>42}" for share in shares)


def _pruning_lines(losses: dict[str, dict[float, float]]) -> Iterator[str]:
    yield "loss by the share of smallest weights that is set to zero"
    yield f"  {'':24}" + "".join(f"{name:>12}" for name in losses)
    for share in next(iter(losses.values())):
        yield f"  {share:<24}" + "".join(f"{by_share[share]:12.3f}" for by_share in losses.values())


def _three(values) -> str:
    return "".join(f"{value:8.3f}" for value in values)
