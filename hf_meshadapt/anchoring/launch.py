"""The anchor circuit's own launch, which serves the fast circuit until that has finished."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tqdm.auto import tqdm
from transformers.trainer_utils import TrainOutput

from ..anchor.anchor_link import AnchorLink
from ..anchor.circuit import AnchorCircuit, Tensors
from ..anchor.connection import LinkOptions
from ..anchor.handshake import checked_secret
from ..spectral.compressor import GradientCompressor
from ..spectral.factors import to_tensors
from .base import NoAnchor
from .calibrator import Calibrator
from .data import AnchorBatches, StreamBatches, refuse_unreadable
from .passes import AnchorPasses
from .spread import AnchorRanks, SpreadCircuit, follow

CLOSE_SECONDS = 5.0


class AnchorLaunch(NoAnchor):
    """Runs the anchor's loop in place of a training run, on one process or on the stages of a pipeline.

    Attributes:
        circuit: of the run, on the rank that holds the link.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        self.config = self.args.anchor_config()
        if trainer.train_dataset is not None:
            refuse_unreadable(trainer.train_dataset)
        # Only the first rank calls the fast circuit, and the others may be on machines that are not told the secret.
        self.secret = checked_secret(None) if self.engine.topology.is_first else None
        self.passes = AnchorPasses(trainer)
        self.circuit: AnchorCircuit | None = None

    def serve(self) -> TrainOutput:
        """Returns when the fast circuit has finished.

        Raises:
            LinkError: the fast circuit could not be reached, or is lost.
        """
        compressor = GradientCompressor(self.args.spectral_config(), warm=not self.config.deterministic)
        loader = self.trainer.get_train_dataloader()

        def compress(gradients: Tensors) -> Tensors:
            return to_tensors(compressor.compress(gradients))

        def make_batches(num_taken: int) -> AnchorBatches | StreamBatches:
            return self.passes.batches(loader, self.config.seed, num_taken)

        ranks = None if self.engine.mesh.emulated else AnchorRanks(self.engine, compress)
        if ranks is None or ranks.is_first:
            self._serve_link(ranks, make_batches, compress)
        else:
            calibrator = self._calibrator(ranks, make_batches(0))
            follow(ranks, self.passes, calibrator, make_batches, self.config.anchor_batches)
        return TrainOutput(0, 0.0, {})

    def _calibrator(self, ranks: AnchorRanks | None, batches: AnchorBatches | StreamBatches) -> Calibrator:
        size = self.args.calibration_tokens or 0, batches.num_per_epoch
        gathering = {} if ranks is None else {"gather": ranks.gather_fits}
        return Calibrator(self.engine, self.passes.gradients, *size, **gathering)

    def _serve_link(self, ranks: AnchorRanks | None, make_batches: Callable, compress: Callable) -> None:
        timeout_seconds, endpoint = self.engine.mesh.timeout_seconds, self.config.endpoint
        options = LinkOptions(rate_bits_per_second=self.config.rate_bits_per_second, reconnect_seconds=timeout_seconds)
        waiting = {} if ranks is None else {"on_wait": ranks.beat}
        link = AnchorLink(endpoint.host, endpoint.port, self.secret, options, **waiting)
        kind = AnchorCircuit if ranks is None else partial(SpreadCircuit, ranks)
        link.start()
        try:
            tqdm.write(f"anchor: waiting for the fast circuit at {endpoint}")
            link.wait_for_sources(timeout_seconds)
            tqdm.write("anchor: connected; it gets a prior for every snapshot that it sends")
            batches = make_batches(link.num_batches)
            self.circuit = kind(
                link,
                self.passes.gradients,
                batches,
                compress,
                anchor_batches=self.config.anchor_batches,
                flush_seconds=timeout_seconds,
                num_batches=link.num_batches,
                calibrator=self._calibrator(ranks, batches),
            )
            self.circuit.run()
        finally:
            link.close(CLOSE_SECONDS)
        count = self.circuit.num_priors
        tqdm.write(f"anchor: the fast circuit has finished; it was sent {count} prior{'s' * (count != 1)}")
