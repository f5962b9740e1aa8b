"""Replicas average the gradients of what was trainable when they were set up: refuses what has changed since."""

from __future__ import annotations

from torch import nn

from ..checkpoint_folder import some_names


class TrainableSet:
    """Which parameters of a rank are trainable.

    Args:
        owned: all of them, by name.
    """

    def __init__(self, owned: list[tuple[str, nn.Parameter]]):
        self._were = [(name, parameter, parameter.requires_grad) for name, parameter in owned]

    def refuse_changes(self) -> None:
        """
        Raises:
            ValueError: some were frozen or thawed since; names them.
        """
        changed = [(name, trained) for name, parameter, trained in self._were if parameter.requires_grad != trained]
        for what, trained_before in (("frozen", True), ("thawed", False)):
            names = [name for name, trained in changed if trained == trained_before]
            if names:
                raise ValueError(
                    f"requires_grad of {some_names(names)}: {what} after the trainer was made, and replicas average what "
                    "was trainable then. Set requires_grad before you make the trainer; to change it in between, save the "
                    "model and go on from it with a new trainer"
                )
