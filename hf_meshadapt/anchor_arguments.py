"""The arguments of the anchor circuit and of the correction: a mixin of `MeshAdaptArguments`.

Fields stay as they were given; `anchor_config` and `spectral_config` say what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .anchor.blockwise import CODE_BITS
from .anchor.budget import ANCHOR_BUDGET
from .anchor.config import CIRCUITS, AnchorConfig, read_endpoint
from .anchor_checks import SPECTRAL_FIELDS, AnchorChecks
from .presets import user_error
from .spectral.config import FILTER_RULES, RULES, SpectralConfig

# A prior must be in use before the next one comes.
REFRESH_STEPS = 4
# The source's constants, under our reading of its form (docs/spectral.md).
PAPER_FILTER = {"tau": 1e-3, "tau_relative": False, "alpha": 0.3}


@dataclass
class AnchorArguments(AnchorChecks):
    anchor: bool | None = field(
        default=None,
        metadata={
            "help": "Correct gradients by anchor priors: every anchor_every steps a second circuit takes a snapshot of "
            "the weights, runs uncoded passes over data of its own and returns gradients, by which the coming steps' "
            "are filtered. Under a launcher the anchor is a launch of its own (circuit=anchor, fast_endpoint); a "
            "single process runs it too, with the same staleness. preset=paper filters by the paper's constants, every "
            "other preset by its own. Default: yes with preset=paper in one process, and under a launcher where "
            "fast_endpoint is given, unless the training set can be read once only; else no.",
            "nargs": "?",
            "const": True,
        },
    )
    circuit: str = field(
        default="fast",
        metadata={
            "help": "Which circuit this launch is: `fast` trains, `anchor` serves the fast circuit at fast_endpoint, with "
            "the whole model in one process or with a stage in each of several; train() then returns when the fast circuit "
            "has finished, evaluation and saving do nothing. Give both the same model, data and other arguments.",
            "choices": list(CIRCUITS),
        },
    )
    fast_endpoint: str | None = field(
        default=None,
        metadata={
            "help": "`host:port` at which the anchor reaches the fast circuit's first stage; stage s listens on port + s. "
            "Both circuits need the secret HF_MESHADAPT_ANCHOR_SECRET in their environment. Without effect where one "
            "process runs both."
        },
    )
    anchor_every: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps between two snapshots, K. Default: chosen after the first step, by anchor_budget, "
            "from 10 up to where a prior would reach max_staleness_steps before the next one is in use (23 by default); 10 "
            "without a pipeline. Above about 30 priors are too old."
        },
    )
    anchor_budget: float | None = field(
        default=None,
        metadata={
            "help": "Share of what the pipeline would send uncoded that snapshots, priors and fits may take: the least "
            "anchor_every that keeps it is chosen. Default: 0.25. Not together with anchor_every."
        },
    )
    anchor_batches: int | None = field(
        default=None,
        metadata={
            "help": "Batches of per_device_train_batch_size rows whose gradients make one prior. Default: 1. More make "
            "better priors and cost the anchor time."
        },
    )
    anchor_seed: int | None = field(
        default=None,
        metadata={"help": "Seed of the order in which the anchor reads the training set. Default: seed + 1."},
    )
    anchor_calibrates: bool | None = field(
        default=None,
        metadata={
            "help": "The anchor's passes, in one process or several, calibrate the boundaries anew, with the next prior "
            "after every calibration_every steps, in place of passes of the mesh; those before the first step stay. "
            "Default: yes where boundaries are calibrated, unless calibration_every is 0.",
            "nargs": "?",
            "const": True,
        },
    )
    anchor_snapshot_bits: int | None = field(
        default=None,
        metadata={
            "help": "Bits per weight of snapshots, which are differences from the copy that the anchor holds; the first is "
            "whole in bfloat16. Default: 8."
        },
    )
    anchor_rate_bits_per_second: float | None = field(
        default=None,
        metadata={
            "help": "What snapshots and priors of one stage may take of its link, each way. Default: no limit; set it "
            "below the link's rate, so that the pipeline's messages do not wait behind them. Without effect where one "
            "process runs both circuits."
        },
    )
    anchor_deterministic: bool = field(
        default=False,
        metadata={
            "help": "Take every prior exactly anchor_every steps after its snapshot, and wait for it: a run can be "
            "repeated and equals the one of a single process, where it is always so, but is as slow as its anchor."
        },
    )
    correction_rule: str | None = field(
        default=None,
        metadata={
            "help": "How a prior corrects a gradient: the filters `diagonal`, `two_sided`, `left`, `right` keep what the "
            "prior supports, `blend` mixes the prior in, and `anchor_only` steps on priors alone, the control that every "
            "gain must be compared with. Default: two_sided with preset=paper, else diagonal.",
            "choices": [rule for rule in RULES if rule not in ("none", "control_variate")],
        },
    )
    correction_alpha: float | None = field(
        default=None,
        metadata={"help": "Filters: share of the gradient that passes unfiltered, in [0, 1). Default: 0.3."},
    )
    correction_tau: float | None = field(
        default=None,
        metadata={
            "help": "Filters: singular value of the prior that passes by half. Default: 0.1 of the largest, and with "
            "preset=paper 0.001."
        },
    )
    correction_tau_relative: bool | None = field(
        default=None,
        metadata={
            "help": "Filters: correction_tau is in units of the prior's largest singular value. Default: yes, and with "
            "preset=paper no.",
            "nargs": "?",
            "const": True,
        },
    )
    correction_blend_weight: float | None = field(
        default=None,
        metadata={"help": "blend: share of the prior in the update, in (0, 1]. Default: 0.5."},
    )
    prior_rank: int | None = field(
        default=None,
        metadata={"help": "Rank of the factors that a matrix's prior is sent and kept as. Default: 64."},
    )
    prior_ema_beta: float | None = field(
        default=None,
        metadata={
            "help": "Decay of the mean over anchor gradients, in [0, 1). Default: 0.5, and 0 with anchor_only: the newest."
        },
    )
    max_staleness_steps: int | None = field(
        default=None,
        metadata={
            "help": "Age in optimizer steps from which on a prior is not used; its weight falls from half of it on. "
            "Default: 50."
        },
    )
    ramp_steps: int | None = field(
        default=None,
        metadata={"help": "Steps over which the correction sets in once the first prior is there. Default: 0."},
    )

    def _resolve_circuit(self) -> None:
        """An anchor of several processes is a pipeline over them, whatever the fast circuit's mesh is.

        Nothing is coded in it; what the arguments say of boundaries, it fits those of the fast circuit by.
        """
        if not (self.has_anchor and self.runs_anchor and self.launched_ranks > 1):
            return
        self.pipeline_stages, self.data_parallel_replicas, self.pipeline_microbatches = self.launched_ranks, None, None
        self.pipeline_chunks_per_rank, self.pipeline_schedule, self.pipeline_split = 1, "gpipe", None

    @property
    def runs_anchor(self) -> bool:
        """This launch is the anchor circuit."""
        return self.circuit == "anchor"

    @property
    def has_anchor(self) -> bool:
        """`anchor` as it was given, or as it follows from the other arguments."""
        if self.anchor is not None or self.preset != "paper":
            return bool(self.anchor)
        # A mesh whose anchor nobody launched must train all the same.
        return self.emulated or self.runs_anchor or self.fast_endpoint is not None

    @property
    def calibrated_by_anchor(self) -> bool:
        """The anchor's passes calibrate the boundaries in place of the mesh's own, once training goes on."""
        needed = self.has_anchor and self.boundary_config().needs_calibration
        return needed and self.anchor_calibrates is not False and self.calibration_every != 0

    def anchor_config(self) -> AnchorConfig | None:
        """None without an anchor."""
        if not self.has_anchor:
            return None
        return AnchorConfig(
            anchor_every=self.anchor_every,
            budget=ANCHOR_BUDGET if self.anchor_budget is None else self.anchor_budget,
            anchor_batches=self.anchor_batches or 1,
            seed=self.seed + 1 if self.anchor_seed is None else self.anchor_seed,
            snapshot_bits=self.anchor_snapshot_bits or CODE_BITS[0],
            deterministic=self.anchor_deterministic or (self.emulated and not self.runs_anchor),
            circuit=self.circuit,
            endpoint=None if self.fast_endpoint is None else read_endpoint(self.fast_endpoint),
            rate_bits_per_second=self.anchor_rate_bits_per_second,
        )

    def spectral_config(self) -> SpectralConfig | None:
        """None without an anchor.

        Raises:
            ValueError: a value out of range, a field that the rule does not read, or a rule that does nothing.
        """
        if not self.has_anchor:
            return None
        paper = self.preset == "paper"
        given = {inner: value for name, inner in SPECTRAL_FIELDS.items() if (value := getattr(self, name)) is not None}
        values = {"rule": "two_sided" if paper else "diagonal", **given}
        if paper and values["rule"] in FILTER_RULES:
            values = {**PAPER_FILTER, **values}
        values["refresh_steps"] = min(REFRESH_STEPS, self.anchor_every or REFRESH_STEPS)
        try:
            config = SpectralConfig(**values)
        except ValueError as error:
            raise ValueError(_renamed(str(error))) from None
        if not config.corrects:
            culprits = {"none": "correction_rule", "blend": "correction_blend_weight"}
            name = culprits.get(config.rule, "correction_alpha")
            raise user_error(name, getattr(self, name), "gradients would stay as they are", "Leave the anchor out")
        return config


def _renamed(message: str) -> str:
    """A message of `SpectralConfig`, which begins with `field=value`, with the argument's name for the field's."""
    inner, equals, rest = message.partition("=")
    names = {field_name: name for name, field_name in SPECTRAL_FIELDS.items()}
    return f"{names.get(inner, inner)}{equals}{rest}"
