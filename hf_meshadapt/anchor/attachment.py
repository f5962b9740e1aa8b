"""What the fast circuit tells a new anchor once, beside its first snapshot: what fits of its boundaries are made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .fast_link import Encoder
from .messages import Message, MessageError

EVERY, VERSION, FEATURES = "calibration_every", "calibrated_version", "features"


@dataclass(frozen=True)
class Attachment:
    """What the anchor must know to calibrate boundaries.

    Attributes:
        every: optimizer steps after which fits are made anew.
        version: that the newest fits came with, `schedule.NO_VERSION` before the first.
        features: token features, (vocabulary, size) bfloat16; None where the predictor needs none.
    """

    every: int
    version: int
    features: Tensor | None


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
    features = {} if attachment.features is None else {FEATURES: attachment.features.cpu()}
    return replace(message, fields=fields, tensors={**message.tensors, **features})


def detach(message: Message) -> Attachment | None:
    """Takes the attachment out of a message; None where there is none.

    Raises:
        MessageError: it is not of that form.
    """
    features = message.tensors.pop(FEATURES, None)
    every, version = message.fields.pop(EVERY, None), message.fields.pop(VERSION, None)
    if every is None and version is None and features is None:
        return None
    if type(every) is not int or every < 1 or type(version) is not int or version < -1:
        raise MessageError(f"a snapshot has {EVERY}={every!r} and {VERSION}={version!r}")
    if features is not None and (features.ndim != 2 or features.dtype != torch.bfloat16):
        raise MessageError(f"a snapshot has token features of shape {tuple(features.shape)}, {features.dtype}")
    return Attachment(every, version, features)
