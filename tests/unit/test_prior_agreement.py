"""When the stages of a running mesh agree on the next prior."""

from types import SimpleNamespace

import pytest
import torch

from hf_meshadapt.anchor.schedule import NO_VERSION, AnchorHistory
from hf_meshadapt.anchoring.linked import LinkedAnchor
from hf_meshadapt.anchoring.relay import PriorRelay

HELD = [1.0, 1.0, 20.0, NO_VERSION]  # ready, connected, and the versions that a stage holds


@pytest.mark.parametrize(
    ("taking_in", "replicas", "agreed"),
    [
        (False, 1, 20),
        # It would be taken in at once, in one step instead of several.
        (True, 1, NO_VERSION),
        # It is under way for as many steps as taking in takes.
        (True, 2, 20),
    ],
)
def test_a_prior_waits_until_the_last_is_taken_in(taking_in, replicas, agreed):
    anchor = LinkedAnchor.__new__(LinkedAnchor)
    priors = SimpleNamespace(version=None, taking_in=taking_in)
    anchor.optimizer = SimpleNamespace(priors=priors, num_steps=30, metrics=lambda: {"weight": 0.0})
    anchor.engine = SimpleNamespace(
        mesh=SimpleNamespace(replicas=replicas), figures_of=[torch.tensor(HELD), torch.tensor(HELD)]
    )
    anchor.config, anchor.history = SimpleNamespace(deterministic=False, anchor_every=10), AnchorHistory()
    anchor.is_linked, anchor._met, anchor.received_version = True, False, 10
    anchor.relay = PriorRelay(anchor.engine, has_fits=False)
    anchor.end_step()
    assert anchor.agreed_version == agreed and anchor.connected
