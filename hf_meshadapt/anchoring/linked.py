"""The fast circuit's part where the anchor is a launch of its own: all ranks take a prior at the same step.

Replica 0's stages hold one link each. In every step they tell each other, with the gradient norms, what their links hold
and whether these are free; what they agree on reaches the other replicas with the token count of the next step. Nothing
of it waits for the anchor unless the run is deterministic.
"""

from __future__ import annotations

import logging

import torch

from ..anchor.attachment import AttachingEncoder, Attachment
from ..anchor.connection import LinkOptions
from ..anchor.fast_link import FastLink
from ..anchor.handshake import checked_secret
from ..anchor.messages import Message
from ..anchor.schedule import NO_VERSION, agree_on_next, tell
from ..anchor.snapshot import Layout, SnapshotEncoder
from ..planner import NUM_ANCHOR_COUNTS, NUM_LINK_FIGURES
from ..waiting import LinkError
from .base import Anchored
from .endpoints import cannot_listen, open_listener, own_address, sources_of
from .prior import Prior, read_prior
from .relay import RELAY_STEPS, PriorRelay
from .traffic import warn_of_traffic

logger = logging.getLogger(__name__)

NUM_TOLD_VERSIONS = NUM_LINK_FIGURES - 2
CLOSE_SECONDS = 5.0


class LinkedAnchor(Anchored):
    """One rank's part.

    Attributes:
        link: of this rank's stage, on replica 0.
        offered: versions of the snapshots that this run has sent.
        agreed_version: of the prior that goes to all replicas before the next step.
        connected: every link had an anchor in the last step.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        self.is_linked = self.engine.topology.replica == 0
        self.secret = checked_secret(None) if self.is_linked else None  # an error now rather than at the first step
        self.layout = Layout(self.shapes)
        self.link: FastLink | None = None
        self.engine.figures = torch.zeros(NUM_LINK_FIGURES, dtype=torch.float64)
        self.engine.sockets.add_counter("anchor", self._link_bytes)
        self._past_bytes = 0

    def forget(self):
        super().forget()
        self.offered: set[int] = set()
        self.agreed_version, self.connected, self._met = NO_VERSION, False, False
        self.relay = PriorRelay(self.engine, self.calibrates)
        self._all_ready = self._has_logged = False

    # The link --------------------------------------------------------------------------------------------------------

    def start(self, dataloader):
        self._steps_before = self.history.num_steps
        if self.calibrates:
            self.fitting.start(self.pending.values())
        stage, endpoint = self.engine.topology.stage, self.config.endpoint
        listener, mine = None, {}
        if self.is_linked:
            try:
                listener = open_listener(endpoint, stage)
                mine = {stage: [own_address(), None]}
            except OSError as error:
                mine = {stage: [None, str(error)]}
        found = self.engine.share(mine)
        faults = {int(stage): fault for stage, (_, fault) in found.items() if fault is not None}
        faults = self.engine.from_judge(sorted(faults.items()))
        if faults:
            if listener is not None:
                listener.close()
            raise cannot_listen(endpoint, dict(faults))
        if self.is_linked:
            self._open(listener, [found[stage][0] for stage in sorted(found)])

    def _open(self, listener, addresses: list[str]) -> None:
        stage, timeout_seconds = self.engine.topology.stage, self.engine.mesh.timeout_seconds
        sources = sources_of(self.config.endpoint, addresses)
        encoder = SnapshotEncoder(stage, delta_bits=self.config.snapshot_bits, exact=self.config.deterministic)
        if self.reference is not None:
            encoder.load_state_tensors(self.layout.state_tensors(*self.reference))
        self.encoder = encoder
        if self.calibrates and stage == 0:  # one end tells for all
            encoder = AttachingEncoder(encoder, self._attachment)
        options = LinkOptions(rate_bits_per_second=self.config.rate_bits_per_second)
        told = sources if stage == 0 else ()
        self.link = FastLink(
            listener, sources[stage], told, self.secret, encoder, options, self.num_batches, self._read
        )
        self.link.start()
        if self.config.deterministic:
            logger.info("waiting for the anchor at %s", self.config.endpoint)
            self.link.wait_until_ready(timeout_seconds)

    def _read(self, message: Message) -> Prior:
        """The prior in a message; raises ValueError where this stage cannot take it. In the link's thread."""
        prior = read_prior(message, self.optimizer.priors.held)
        self.optimizer.priors.check(prior.values, prior.version)
        self.fitting.check(prior)
        return prior

    def _attachment(self) -> Attachment:
        # What an anchor that is gone has sent may never come into use, unless every prior does.
        return self.fitting.attachment(tuple(self.pending.values()) if self.config.deterministic else ())

    def stop(self, done):
        if done and self.relay.busy:
            self.relay.take(self.optimizer.priors.held)  # groups must not go down with something under way
        if self.link is not None:
            self.link.close(CLOSE_SECONDS, done)
            self._past_bytes, self.link = self._link_bytes(), None

    def _link_bytes(self) -> int:
        return self._past_bytes + (self.link.sent_bytes + self.link.received_bytes if self.link else 0)

    # Steps -----------------------------------------------------------------------------------------------------------

    def sum_over_replicas(self, count):
        if self.engine.mesh.replicas == 1:
            return self.engine.sum_over_replicas(count)
        # Of a replica's stages all know the same, and only replica 0 speaks.
        facts = [self.agreed_version - NO_VERSION, int(self.connected)] if self.is_linked else [0, 0]
        total = self.engine.sum_over_replicas(torch.cat([count.reshape(-1), torch.tensor(facts)]))
        version, connected = total[-NUM_ANCHOR_COUNTS:].tolist()
        self.agreed_version, self.connected = version + NO_VERSION, bool(connected)
        return total[:-NUM_ANCHOR_COUNTS].view_as(count)

    def begin_step(self, step):
        super().begin_step(step)
        due = self.schedule.due_version(step) if self.config.deterministic else self.agreed_version
        held = self.optimizer.priors.held
        if due != NO_VERSION:
            prior = self._obtain(due) if self.is_linked else None
            self.relay.start(prior, held, step, self._relay_steps)
        if self.relay.due(step):
            prior = self.relay.take(held)
            if prior is not None:
                self.receive(prior)
        if self.is_linked:
            self._take_snapshot(step)
            self._poll()
            newest = sorted(self.pending)[-NUM_TOLD_VERSIONS:]
            held = [tell(version, bool(self.pending[version].fits)) for version in newest]
            padding = [NO_VERSION] * (NUM_TOLD_VERSIONS - len(held))
            told = [self.link.ready, self.link.connected, *held, *padding]
            self.engine.figures = torch.tensor(told, dtype=torch.float64)

    def _take_snapshot(self, step: int) -> None:
        if not self.schedule.snapshot_due(step, self.history.last_version, [self._all_ready]):
            return
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights().items()}
        if self.link.offer(step, weights):
            self.offered.add(step)
        elif self.config.deterministic:
            where = self.engine.topology.describe()
            raise LinkError(
                f"{where} has lost its anchor at step {step}, and anchor_deterministic=True needs every prior. Start both "
                "circuits anew, from the last checkpoint, or leave anchor_deterministic out"
            )
        self.history.took_snapshot(step)

    def _poll(self) -> None:
        """Takes what has come from the anchor."""
        while True:
            try:
                prior = self.link.poll()
            except ValueError as error:
                logger.warning("%s does not take a prior: %s", self.engine.topology.describe(), error)
                continue
            if prior is None:
                return
            if prior.version in self.offered:  # else of an anchor that still works for an earlier attempt of this run
                self.pending[prior.version] = prior

    def _obtain(self, version: int) -> Prior | None:
        """This stage's prior of a version; waits for it in a deterministic run. None: it will never come."""
        if version not in self.pending:
            if version not in self.offered:  # a run that goes on with an anchor that it did not have before
                return None
            with self.engine.step_meter.waiting():
                return self.link.wait_for_prior(version, self.engine.mesh.timeout_seconds)
        return self.pending[version]

    @property
    def _relay_steps(self) -> int:
        return 0 if self.config.deterministic else min(RELAY_STEPS, self.config.anchor_every or RELAY_STEPS)

    def receive(self, prior):
        super().receive(prior)
        self.num_batches = prior.num_batches
        self.pending = {version: other for version, other in self.pending.items() if version > prior.version}
        self.offered = {version for version in self.offered if version > prior.version}

    def end_step(self):
        super().end_step()
        if not self.is_linked:
            return
        rows = [row.tolist() for row in self.engine.figures_of]
        self._all_ready = all(row[0] for row in rows)
        self.connected = all(row[1] for row in rows)
        self._met = self._met or self.connected
        self.agreed_version = NO_VERSION
        # One that came upon another would have it taken in at once, in one step instead of several.
        taking_in = self.optimizer.priors.taking_in and self.engine.mesh.replicas == 1
        if not self.config.deterministic and not self.relay.busy and not taking_in:
            self.agreed_version = agree_on_next([row[2:] for row in rows], self.received_version)

    # Figures ---------------------------------------------------------------------------------------------------------

    def logs(self):
        """As without a launcher, and `anchor_connected`: 1 where every stage's link has its anchor."""
        if not self._has_logged:
            self._has_logged = True
            warn_of_traffic(self.trainer, self.history.num_steps - self._steps_before)
        return super().logs() | {"anchor_connected": float(self.connected)}

    def phase(self):
        if self.connected:
            return f"anchor connected, {super().phase()}"
        return "anchor lost" if self._met else "no anchor connected yet"

    def status(self):
        lost = ", anchor lost" if self._met and not self.connected else ""
        return super().status() + lost if self.optimizer.priors.version is not None else self.phase()

    # State -----------------------------------------------------------------------------------------------------------

    def save(self, folder):
        if self.link is not None and self.config.deterministic:
            # Whatever is on the way would be lost, and its step has to have it.
            for version in sorted(self.offered):
                if version > self.received_version and version not in self.pending:
                    self.pending[version] = self._obtain(version)
            newest = max(self.pending, default=NO_VERSION)
            if newest != NO_VERSION:
                self.num_batches = self.pending[newest].num_batches
        super().save(folder)

    def reference_now(self):
        # A free-running link may be about to change it, and its next anchor begins with a whole snapshot.
        if self.link is None or not self.config.deterministic or self.encoder.version is None:
            return None
        return self.encoder.version, self.layout.unpack(self.encoder.reference)
