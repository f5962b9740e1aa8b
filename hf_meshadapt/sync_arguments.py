"""The data-parallel fields of `MeshAdaptArguments`: how replicas stay one model. Help texts are their only description."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .config import DP_SYNCS, OUTER_WIRES, DataParallelConfig
from .presets import user_error

TIED_EMBEDDINGS = ("sync", "freeze")
CHOICES = {
    "factor_dtype": ("float32", "bfloat16"),
    "outer_wire": OUTER_WIRES,
    "tied_embeddings": TIED_EMBEDDINGS,
}
DILOCO, STREAMING = ("diloco", "streaming_diloco"), ("streaming_diloco",)
# Fields that only some syncs read: which ones, and the value where none is given. What others depend on comes first.
SYNC_FIELDS = {
    "outer_wire": (DILOCO, "bfloat16"),
    "matrix_rank": (("powersgd", *DILOCO), 32),
    "factor_dtype": (("powersgd", *DILOCO), "bfloat16"),
    "sync_every": (DILOCO, 30),
    "outer_learning_rate": (DILOCO, 0.7),
    "outer_momentum": (DILOCO, 0.9),
    "num_fragments": (STREAMING, 3),
    "overlap_steps": (STREAMING, 5),
    "mixing": (STREAMING, 0.5),
    "sync_chunk_bytes": (STREAMING, 256 * 1024),
}


@dataclass
class SyncArguments:
    """Mixin of `MeshAdaptArguments`."""

    dp_sync: str | None = field(
        default=None,
        metadata={
            "help": "How replicas stay one model: `allreduce` averages all gradients at every step; `powersgd` their "
            "low-rank factors, with error feedback; `diloco` lets replicas step apart and moves all of them to one outer "
            "model every sync_every steps; `streaming_diloco` does so with a part of the model at a time, while training "
            "goes on. Under the last two the outer model is what is evaluated and saved. Default: streaming_diloco where "
            "preset=paper has two replicas or more, else allreduce. With one replica `powersgd` is for tied embeddings.",
            "choices": list(DP_SYNCS),
        },
    )
    matrix_rank: int | None = field(
        default=None,
        metadata={
            "help": "Rank of PowerSGD's factors, for powersgd and outer_wire=powersgd; and, unless dp_sync is allreduce, "
            "of what the two copies of a tied embedding exchange at every step. Default: 32."
        },
    )
    factor_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype in which PowerSGD's messages travel. Default: bfloat16.",
            "choices": ["float32", "bfloat16"],
        },
    )
    outer_wire: str | None = field(
        default=None,
        metadata={
            "help": "diloco, streaming_diloco: how what replicas learnt between two syncs travels: whole in `float32` or "
            "`bfloat16`, as `int8` with a scale per 256 values, which every replica sends to all others, or in low rank "
            "with error feedback (`powersgd`). Default: powersgd with preset=paper, else bfloat16.",
            "choices": list(OUTER_WIRES),
        },
    )
    sync_every: int | None = field(
        default=None,
        metadata={"help": "diloco, streaming_diloco: optimizer steps between two syncs of a parameter. Default: 30."},
    )
    outer_learning_rate: float | None = field(
        default=None,
        metadata={"help": "diloco, streaming_diloco: learning rate of the outer Nesterov SGD. Default: 0.7."},
    )
    outer_momentum: float | None = field(
        default=None,
        metadata={"help": "diloco, streaming_diloco: momentum of the outer Nesterov SGD. Default: 0.9."},
    )
    num_fragments: int | None = field(
        default=None,
        metadata={
            "help": "streaming_diloco: parts of every stage that are synchronised in turn, layers dealt out one by one, "
            "embeddings and head with the first. Default: 3, or fewer where sync_every is smaller."
        },
    )
    overlap_steps: int | None = field(
        default=None,
        metadata={
            "help": "streaming_diloco: optimizer steps that a part may be on its way while training goes on; less than "
            "sync_every / num_fragments. Default: 5, or as many as there may be."
        },
    )
    mixing: float | None = field(
        default=None,
        metadata={
            "help": "streaming_diloco: share of a replica's own weights in what it goes on with when a part arrives, the "
            "rest being the outer model's, in [0, 1). Default: 0.5."
        },
    )
    sync_chunk_bytes: int | None = field(
        default=None,
        metadata={
            "help": "streaming_diloco: pieces in which a part travels, one after the other, so that activations do not "
            "queue behind it. Make it rate x round-trip time on links where that is more. Default: 262144."
        },
    )

    check_replicas_every: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps after which replicas, and the copies of a tied embedding, are compared bit for bit by "
            "a hash of what they must hold alike; the run ends where they differ, and says where. Reads all weights on the "
            "CPU, so take a hundred steps or more for large models. Default: never."
        },
    )

    tied_embeddings: str = field(
        default="sync",
        metadata={
            "help": "A matrix that is input embedding and output head at once, of which first and last stage have a copy "
            "each: `sync` trains it, and the copies exchange its gradient at every step (whole, or in low rank with "
            "another dp_sync than allreduce); `freeze` leaves it as it is, and sends nothing.",
            "choices": list(TIED_EMBEDDINGS),
        },
    )

    def _resolve_sync(self) -> None:
        """Refuses what would have no effect and fills in the rest; replicas are known by then."""
        alone = self.data_parallel_replicas < 2 and not self.runs_anchor  # which has the fast circuit's arguments
        if self.dp_sync is None:
            self.dp_sync = "allreduce" if alone or self.preset != "paper" else "streaming_diloco"
        if self.dp_sync not in DP_SYNCS:
            raise user_error("dp_sync", self.dp_sync, "not a known choice", f"Use one of: {', '.join(DP_SYNCS)}")
        # In low rank, too, is what the two copies of a tied embedding exchange.
        has_effect = self.dp_sync == "powersgd" and self.pipeline_stages > 1
        if self.dp_sync != "allreduce" and alone and not has_effect:
            raise user_error(
                "dp_sync", self.dp_sync, "has no effect with one replica: there is nothing to synchronise",
                "Launch two replicas or more, or leave it unset",
            )  # fmt: skip
        if self.check_replicas_every is not None and alone:
            raise user_error(
                "check_replicas_every", self.check_replicas_every, "has no effect with one replica",
                "Launch two replicas or more, or leave it unset",
            )  # fmt: skip
        for name, (syncs, default) in SYNC_FIELDS.items():
            value, why, remedy = getattr(self, name), "", ""
            if self.dp_sync not in syncs:
                why, remedy = f"dp_sync={self.dp_sync}", f"Use it with {' or '.join(syncs)}"
            elif name in ("matrix_rank", "factor_dtype") and not self._sends_factors():
                why, remedy = f"outer_wire={self.outer_wire} and one stage", "Use outer_wire=powersgd"
            if value is not None and why:
                raise user_error(name, value, f"has no effect with {why}", f"{remedy}, or leave it unset")
            if value is None and not why:
                setattr(self, name, self._sync_default(name, default))
        self._check_sync()

    def _sends_factors(self) -> bool:
        # Of a tied embedding between its stages, too. An anchor's own stages say nothing of the fast circuit's.
        apart = self.pipeline_stages > 1 or self.runs_anchor
        return apart or self.dp_sync not in DILOCO or self.outer_wire == "powersgd"

    def _sync_default(self, name: str, default):
        if name == "num_fragments":
            return max(1, min(default, self.sync_every))
        if name == "overlap_steps":
            return max(0, min(default, self.sync_every // max(1, self.num_fragments) - 1))
        if name == "outer_wire" and self.preset == "paper":
            return "powersgd"
        return default

    def _check_sync(self) -> None:
        for name in ("matrix_rank", "sync_every", "num_fragments", "sync_chunk_bytes", "check_replicas_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise user_error(name, value, "must be at least 1", "Use 1 or more, or leave it unset")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in (None, *allowed):
                raise user_error(name, getattr(self, name), "not a known choice", f"Use one of: {', '.join(allowed)}")
        rate = self.outer_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise user_error("outer_learning_rate", rate, "must be a positive number", "Try 0.7")
        for name, remedy in (("outer_momentum", "Try 0.9"), ("mixing", "Try 0.5")):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise user_error(name, value, "must be in [0, 1)", remedy)
        if self.dp_sync != "streaming_diloco":
            return
        if self.num_fragments > self.sync_every:
            raise user_error(
                "num_fragments", self.num_fragments, f"must be at most sync_every={self.sync_every}: one is sent at a time",
                "Lower it, or raise sync_every",
            )  # fmt: skip
        most = self.sync_every // self.num_fragments - 1
        if not 0 <= self.overlap_steps <= most:
            raise user_error(
                "overlap_steps", self.overlap_steps,
                f"must be at most {most}: a part must arrive before the next is sent (sync_every={self.sync_every}, "
                f"num_fragments={self.num_fragments})",
                "Lower it or num_fragments, or raise sync_every",
            )  # fmt: skip

    def data_parallel_config(self) -> DataParallelConfig:
        """The anchor circuit has one model, and nothing to synchronise."""
        freeze_tied = self.tied_embeddings == "freeze"
        if self.runs_anchor:
            return DataParallelConfig(freeze_tied=freeze_tied)
        given = {name: getattr(self, name) for name in SYNC_FIELDS}
        given["chunk_bytes"] = given.pop("sync_chunk_bytes")
        given |= {"check_every": self.check_replicas_every, "freeze_tied": freeze_tied}
        return DataParallelConfig(self.dp_sync, **{name: value for name, value in given.items() if value is not None})
