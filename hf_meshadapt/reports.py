"""What is said of a run's or an evaluation's speed and bytes, from figures that were measured: pure functions."""

from __future__ import annotations


def mesh_report(logged: dict[str, float], plan) -> dict:
    """Joins what was measured (`Figures.logs`) with a byte plan; see `MeshAdaptMixin.mesh_report`."""
    axes = [axis for axis in ("pipeline", "tied", "data_parallel", "anchor", "control") if plan.axis_bytes(axis)]
    prefix = "bytes_per_token_"  # more axes than a plan has: what saving and the rest of the sockets sent
    measured = {name.removeprefix(prefix): count for name, count in logged.items() if name.startswith(prefix)}
    if "bytes_per_token" in logged:
        measured["total"] = logged["bytes_per_token"]
    return {
        "tokens_per_second": logged.get("tokens_per_second"),
        "wait_share": logged.get("wait_share"),
        "bytes_per_token": measured,
        "planned_bytes_per_token": {axis: plan.bytes_per_token(axis) for axis in (*axes, "total")},
        "bytes_ratio_to_dense": {axis: plan.ratio_to_dense(axis) for axis in (*axes, "total") if axis != "anchor"},
    }


def speed_of(metrics: dict, prefix: str, num_batches: int) -> dict:
    """The figures that Trainer derives from the time that an evaluation took; it takes stages for replicas."""
    names = (f"{prefix}_{name}" for name in ("runtime", "samples_per_second", "steps_per_second"))
    speed = {name: metrics[name] for name in names if name in metrics}
    if seconds := speed.get(f"{prefix}_runtime"):
        speed[f"{prefix}_steps_per_second"] = round(num_batches / seconds, 3)
    return speed
