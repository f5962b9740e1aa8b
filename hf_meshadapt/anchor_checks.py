"""What `AnchorArguments` refuses at construction: every error names field, value, constraint and remedy."""

from __future__ import annotations

import math

from .anchor.blockwise import CODE_BITS
from .anchor.budget import LEAST_CHOSEN
from .anchor.config import CIRCUITS, read_endpoint
from .presets import user_error

# Argument to field of `SpectralConfig`.
SPECTRAL_FIELDS = {
    "correction_rule": "rule",
    "correction_alpha": "alpha",
    "correction_tau": "tau",
    "correction_tau_relative": "tau_relative",
    "correction_blend_weight": "blend_weight",
    "prior_rank": "matrix_rank",
    "prior_ema_beta": "ema_beta",
    "max_staleness_steps": "max_staleness",
    "ramp_steps": "ramp_steps",
}
ANCHOR_FIELDS = (
    "anchor_every",
    "anchor_budget",
    "anchor_batches",
    "anchor_seed",
    "anchor_snapshot_bits",
    "anchor_calibrates",
)
LINK_FIELDS = ("anchor_deterministic", "anchor_rate_bits_per_second", "fast_endpoint")


class AnchorChecks:
    """Mixin of `AnchorArguments`, whose fields it checks."""

    def _resolve_anchor(self) -> None:
        """Checks the fields above.

        Raises:
            ValueError: a value out of range, or a field without effect.
        """
        if self.circuit not in CIRCUITS:
            raise user_error("circuit", self.circuit, "not a known choice", f"Use one of: {', '.join(CIRCUITS)}")
        if not self.has_anchor:
            self._refuse_without_anchor()
            return
        self._check_anchor_ranges()
        self._check_anchor_budget()
        self._check_anchor_calibrates()
        self._check_endpoint()
        config, every = self.spectral_config(), self.anchor_every or LEAST_CHOSEN
        if every + config.refresh_steps > config.max_staleness:
            raise user_error(
                "max_staleness_steps", config.max_staleness, f"with anchor_every={every} no prior would be used: it is "
                f"{every + config.refresh_steps - 1} steps old when it comes into use",
                "Take snapshots more often, or set max_staleness_steps to three times anchor_every",
            )  # fmt: skip

    def _refuse_without_anchor(self) -> None:
        asked = [name for name in (*ANCHOR_FIELDS, *SPECTRAL_FIELDS) if getattr(self, name) is not None]
        asked += [name for name in LINK_FIELDS if getattr(self, name)]
        if self.circuit != "fast":
            asked.insert(0, "circuit")
        if asked:
            name = asked[0]
            raise user_error(
                name, getattr(self, name), "has no effect without an anchor", "Set anchor=True, or leave it unset"
            )

    def _check_anchor_ranges(self) -> None:
        for name in ("anchor_every", "anchor_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise user_error(name, value, "must be at least 1", "Use 1 or more, or leave it unset")
        bits = self.anchor_snapshot_bits
        if bits is not None and bits not in CODE_BITS:
            choices = ", ".join(map(str, CODE_BITS))
            raise user_error("anchor_snapshot_bits", bits, "not a known choice", f"Use one of: {choices}")
        rate = self.anchor_rate_bits_per_second
        # Below it, the pauses between two chunks would pass for silence (anchor.connection.LinkOptions).
        if rate is not None and not rate >= 1e4:
            raise user_error(
                "anchor_rate_bits_per_second",
                rate,
                "must be at least 1e4",
                "Use 20e6 for 20 Mbit/s, or leave it unset",
            )
        if self.correction_rule == "control_variate":
            raise NotImplementedError(
                "correction_rule='control_variate': it needs coded gradients of the anchor's batches too, thus the fast "
                "circuit's cut and the state of its codecs at the snapshot. An anchor has neither: it is cut as it likes, "
                "and snapshots are of weights alone. Use blend, or SpectralCorrection by itself"
            )

    def _check_anchor_budget(self) -> None:
        budget = self.anchor_budget
        if budget is None:
            return
        if not 0 < budget < math.inf:
            raise user_error(
                "anchor_budget", budget, "must be a share above 0", "Use 0.25 for a quarter, or leave it unset"
            )
        if self.anchor_every is not None:
            raise user_error(
                "anchor_budget", budget, f"anchor_every={self.anchor_every} says how often already",
                "Leave one of them unset",
            )  # fmt: skip
        if self.pipeline_stages == 1:
            raise user_error(
                "anchor_budget", budget, "with pipeline_stages=1 there is no pipeline to compare with",
                "Set anchor_every, or leave it unset",
            )  # fmt: skip

    def _check_anchor_calibrates(self) -> None:
        if self.anchor_calibrates and not self.calibrated_by_anchor:
            why = "this boundary needs no calibration"
            if self.calibration_every == 0:
                why = "calibration_every=0 asks for none after the first step"
            raise user_error("anchor_calibrates", True, f"has no effect: {why}", "Leave one of them unset")

    def _check_endpoint(self) -> None:
        if self.fast_endpoint is None:
            if self.circuit == "anchor" or not self.emulated:
                raise user_error(
                    "fast_endpoint", None, "must say where the anchor reaches the fast circuit",
                    "Set it to host:port of the machine with rank 0, the same for both circuits; on one machine "
                    "`meshadapt launch --anchor 1` does both",
                )  # fmt: skip
            return
        try:
            endpoint = read_endpoint(self.fast_endpoint)
        except ValueError:
            raise user_error(
                "fast_endpoint", self.fast_endpoint, "must be host:port", "Write for example 203.0.113.7:29600"
            ) from None
        last = endpoint.port + self.pipeline_stages - 1
        if last > 65535:
            raise user_error(
                "fast_endpoint", self.fast_endpoint, f"the last stage would listen on port {last}", "Use a lower port"
            )
