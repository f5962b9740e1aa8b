"""The anchor circuit's own launch: one process that serves the fast circuit until that has finished."""

from __future__ import annotations

from tqdm.auto import tqdm
from transformers.trainer_utils import TrainOutput

from ..anchor.anchor_link import AnchorLink
from ..anchor.circuit import AnchorCircuit
from ..anchor.connection import LinkOptions
from ..anchor.handshake import checked_secret
from ..spectral.compressor import GradientCompressor
from ..spectral.factors import to_tensors
from .base import NoAnchor
from .data import refuse_stream
from .passes import AnchorPasses

CLOSE_SECONDS = 5.0


class AnchorLaunch(NoAnchor):
    """Runs the anchor's loop in place of a training run."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.config = self.args.anchor_config()
        if trainer.train_dataset is not None:
            refuse_stream(trainer.train_dataset)
        self.secret = checked_secret(None)
        self.passes = AnchorPasses(trainer)
        self.circuit: AnchorCircuit | None = None

    def serve(self) -> TrainOutput:
        """Returns when the fast circuit has finished.

        Raises:
            LinkError: the fast circuit could not be reached, or is lost.
        """
        timeout_seconds = self.engine.mesh.timeout_seconds
        options = LinkOptions(rate_bits_per_second=self.config.rate_bits_per_second, reconnect_seconds=timeout_seconds)
        endpoint = self.config.endpoint
        link = AnchorLink(endpoint.host, endpoint.port, self.secret, options)
        compressor = GradientCompressor(self.args.spectral_config(), warm=not self.config.deterministic)
        link.start()
        try:
            tqdm.write(f"anchor: waiting for the fast circuit at {endpoint}")
            link.wait_for_sources(timeout_seconds)
            tqdm.write("anchor: connected; it gets a prior for every snapshot that it sends")
            loader = self.trainer.get_train_dataloader()
            self.circuit = AnchorCircuit(
                link,
                self.passes.gradients,
                self.passes.batches(loader, self.config.seed, link.num_batches),
                lambda gradients: to_tensors(compressor.compress(gradients)),
                anchor_batches=self.config.anchor_batches,
                flush_seconds=timeout_seconds,
                num_batches=link.num_batches,
            )
            self.circuit.run()
        finally:
            link.close(CLOSE_SECONDS)
        tqdm.write(f"anchor: the fast circuit has finished; it got {self.circuit.num_priors} priors")
        return TrainOutput(0, 0.0, {})
