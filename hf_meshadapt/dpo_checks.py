"""What `MeshAdaptDPOConfig` and `MeshAdaptDPOTrainer` refuse of TRL, beside what every mesh trainer refuses."""

from __future__ import annotations

from .pipeline.adapters import is_adapted
from .preference import PAIR_LOSSES
from .trl_data import refuse_empty

# Options of DPOConfig that a mesh would ignore or get wrong, and what to do instead.
UNSUPPORTED_OPTIONS = {
    "padding_free": "it makes one row of a batch, and microbatches are cut between rows. Unset it",
    "activation_offloading": "stages run outside of TRL's training step. Use gradient_checkpointing=True",
    "model_init_kwargs": "every rank loads its own stage. Set model_dtype, or pass a model that is loaded",
    "router_aux_loss_coef": "a stage has the routers of its own layers only. Set it to 0.0",
    "sync_ref_model": "the reference's log-probabilities are computed once, before training. Unset it",
    "use_weighting": "the last stage does not compute WPO's weights. Unset it",
    "ld_alpha": "the last stage does not weigh tokens past the shorter answer apart. Unset it",
    "label_smoothing": "only losses that are not supported use it. Set it to 0.0",
    "label_smoothing_factor": "it is of token losses. Set it to 0.0",
    "precompute_ref_batch_size": "reference log-probabilities are computed at per_device_eval_batch_size. Unset it",
    "anchor": "the anchor circuit is not tested on pairs. Unset it",
}
# Arguments of DPOTrainer that a mesh would ignore or get wrong.
UNSUPPORTED_ARGUMENTS = {
    "ref_model": "the reference is the model that training starts from, whose log-probabilities are computed before it",
    "data_collator": "the trainer's own keeps the two answers of a pair in one microbatch",
    "compute_metrics": "logits of pairs are not gathered; the evaluation has the loss",
    "quantization_config": "quantized weights cannot be saved by stages. Set model_dtype='bfloat16'",
    "peft_config": "TRL keeps the reference as a second adapter, which stages do not carry. Train the whole model",
}


def refuse_options(args) -> None:
    """Raises NotImplementedError for options of `MeshAdaptDPOConfig`."""
    for name, reason in UNSUPPORTED_OPTIONS.items():
        if getattr(args, name):
            raise NotImplementedError(f"{name}={getattr(args, name)!r}: {reason}")
    if not args.precompute_ref_log_probs:
        raise NotImplementedError(
            "precompute_ref_log_probs=False: a second model would have to run over the stages in every step. Leave it True"
        )
    if args.f_divergence_type != "reverse_kl":
        raise NotImplementedError(f"f_divergence_type={args.f_divergence_type!r}: use 'reverse_kl'")
    types = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
    if unknown := [name for name in types if name not in PAIR_LOSSES]:
        raise NotImplementedError(
            f"loss_type={unknown[0]!r}: not among those that the last stage computes. Use {', '.join(PAIR_LOSSES)}"
        )


def refuse_arguments(model, given: dict) -> None:
    """Raises NotImplementedError for arguments of `MeshAdaptDPOTrainer`, ValueError for a data set without rows.

    Args:
        given: the others, by name.
    """
    for name, reason in UNSUPPORTED_ARGUMENTS.items():
        if given.get(name) is not None:
            raise NotImplementedError(f"{name}: {reason}")
    if is_adapted(model):
        raise NotImplementedError(f"a {type(model).__name__} as model: {UNSUPPORTED_ARGUMENTS['peft_config']}")
    refuse_empty(given)
