"""The model of a rank is a part of the whole: what would take it for the whole is refused. Its forward: `layout`."""

from __future__ import annotations

from torch import nn

from ..config import MeshConfig


def holds_part(mesh: MeshConfig) -> bool:
    """Whether a rank's model lacks what other ranks have."""
    return mesh.num_chunks > 1 and not mesh.emulated


def place_of(mesh: MeshConfig, stage: int) -> str:
    """Names a rank's part in errors."""
    return f"stage {stage} of {mesh.stages}"


def refuse_as_whole(model: nn.Module) -> None:
    """Makes the calls of a part, or of the `PeftModel` around it, that would generate from it or save it raise."""
    # Of the object, not of its class: what saves a stage calls the class's method.
    model.generate, model.save_pretrained, model.push_to_hub = _refuse_generate, _refuse_save, _refuse_push


def _refuse_generate(*args, **kwargs):
    # The first stage's would return tokens, and nonsense.
    raise NotImplementedError(
        "generate() on a rank of a mesh: the model there is a part of the whole. Save it by save_model() on all ranks and "
        "load it with AutoModelForCausalLM.from_pretrained, or generate in the emulated mesh"
    )


def _refuse_save(*args, **kwargs):
    raise NotImplementedError(
        "save_pretrained() on a rank of a mesh: the model there is a part of the whole, and one stage would be saved for "
        "it. Call trainer.save_model(folder) on all ranks"
    )


def _refuse_push(*args, **kwargs):
    raise NotImplementedError(
        "push_to_hub() of a rank's model: it is a part of the whole, and one stage would be uploaded for it. Call "
        "trainer.push_to_hub() on all ranks"
    )
