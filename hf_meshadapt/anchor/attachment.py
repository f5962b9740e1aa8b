"""What the fast circuit tells a new anchor once, beside its first snapshot: where its boundaries are, and what fits of them
are made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .fast_link import Encoder
from .messages import Message, MessageError

EVERY, VERSION, CUTS, STAGES = "calibration_every", "calibrated_version", "cuts", "num_stages"
FEATURES = "features"


@dataclass(frozen=True)
class Attachment:
    """What the anchor must know to calibrate boundaries.

    Attributes:
        every: optimizer steps after which fits are made anew.
        version: that the newest fits came with, `schedule.NO_VERSION` before the first.
        cuts: the layers before which the boundaries are, of those before chunks 1, 2, ... in order.
        num_stages: over which the chunks are dealt out in turn.
        features: token features, (vocabulary, size) bfloat16; None where the predictor needs none.
    """

    every: int
    version: int
    cuts: tuple[int, ...]
    num_stages: int
    features: Tensor | None

    @property
    def num_chunks(self) -> int:
        return len(self.cuts) + 1


class AttachingEncoder:
    """An encoder whose first message to every new anchor carries an attachment too.

    Args:
        encoder: of the snapshots.
        attachment: makes it, in the thread of the link.
    """

    def __init__(self, encoder: Encoder, attachment: Callable[[], Attachment]):
        self._encoder, self._attachment, self._is_new = encoder, attachment, True

    def reset(self) -> None:
        self._encoder.reset()
        self._is_new = True

    def encode(self, version: int, weights: dict[str, Tensor]) -> Message:
        message = self._encoder.encode(version, weights)
        if self._is_new:
            message = attach(message, self._attachment())
        self._is_new = False
        return message


def attach(message: Message, attachment: Attachment) -> Message:
    """The message with the attachment in it."""
    fields = {**message.fields, EVERY: attachment.every, VERSION: attachment.version}
    fields |= {CUTS: list(attachment.cuts), STAGES: attachment.num_stages}
    features = {} if attachment.features is None else {FEATURES: attachment.features.cpu()}
    return replace(message, fields=fields, tensors={**message.tensors, **features})


def detach(message: Message) -> Attachment | None:
    """Takes the attachment out of a message; None where there is none.

    Raises:
        MessageError: it is not of that form.
    """
    features = message.tensors.pop(FEATURES, None)
    every, version, cuts, num_stages = (message.fields.pop(name, None) for name in (EVERY, VERSION, CUTS, STAGES))
    if (every, version, cuts, num_stages, features) == (None,) * 5:
        return None
    if type(every) is not int or every < 1 or type(version) is not int or version < -1:
        raise MessageError(f"a snapshot has {EVERY}={every!r} and {VERSION}={version!r}")
    if not _are_cuts(cuts) or type(num_stages) is not int or num_stages < 1 or (len(cuts) + 1) % num_stages:
        raise MessageError(f"a snapshot has {CUTS}={cuts!r} and {STAGES}={num_stages!r}")
    if features is not None and (features.ndim != 2 or features.dtype != torch.bfloat16):
        raise MessageError(f"a snapshot has token features of shape {tuple(features.shape)}, {features.dtype}")
    return Attachment(every, version, tuple(cuts), num_stages, features)


def _are_cuts(cuts) -> bool:
    """Layers in order, none of them the first and none twice."""
    whole = isinstance(cuts, list) and cuts and all(type(layer) is int for layer in cuts)
    return bool(whole) and cuts[0] > 0 and all(layer < after for layer, after in zip(cuts, cuts[1:]))


def only_attachment(message: Message) -> Message | None:
    """The message without its weights; None where nothing is attached to it."""
    if EVERY not in message.fields:
        return None
    tensors = {name: tensor for name, tensor in message.tensors.items() if name == FEATURES}
    return replace(message, fields=dict(message.fields), tensors=tensors)
