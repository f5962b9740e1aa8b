"""The import rules of the package: who may depend on whom, and what pure modules may not touch."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hf_meshadapt"
PURE = [
    "config.py",
    "devices.py",
    "planner.py",
    "model_shape.py",
    "link_bytes.py",
    "sync_plan.py",
    "sync_cost.py",
    "memory.py",
    "gradients.py",
    "diagnostics.py",
    "pruning.py",
    "extras.py",
    "json_lines.py",
    "sampling.py",
    "sft_checks.py",
    "dpo_checks.py",
    "trl_data.py",
    "preference.py",
    "checkpoint_folder.py",
    "folder_lock.py",
    "data_checks.py",
    "field_checks.py",
    "fingerprints.py",
    "random_states.py",
    "boundary/prf.py",
    "boundary/codecs.py",
    "boundary/module.py",
    "boundary/bits.py",
    "boundary/transform.py",
    "boundary/predictor.py",
    "boundary/statistics.py",
    "boundary/fitting.py",
    "boundary/sequence_coder.py",
    "boundary/coder.py",
    "boundary/observer.py",
    "boundary/rotation.py",
    "boundary/quantize.py",
    "boundary/topk.py",
    "boundary/projection.py",
    "boundary/tah_quant.py",
    "boundary/aq_sgd.py",
    "boundary/token_codecs.py",
    "boundary/allocation.py",
    "boundary/symbol_model.py",
    "boundary/rans.py",
    "boundary/step_size.py",
    "boundary/entropy_coder.py",
    "presets.py",
    "reports.py",
    "spectral/config.py",
    "spectral/factors.py",
    "spectral/prior.py",
    "spectral/priors.py",
    "spectral/correction.py",
    "spectral/compressor.py",
    "spectral/optimizer.py",
    "anchor/messages.py",
    "anchor/frames.py",
    "anchor/pacing.py",
    "anchor/blockwise.py",
    "anchor/snapshot.py",
    "anchor/schedule.py",
    "anchor/budget.py",
    "anchor/config.py",
    "anchor/attachment.py",
    "pipeline/partition.py",
    "pipeline/layout.py",
    "pipeline/part.py",
    "pipeline/microbatch.py",
    "pipeline/shape_cache.py",
    "pipeline/refusals.py",
    "pipeline/trainable.py",
    "pipeline/tiny_clone.py",
    "hub_names.py",
    "hub_benchmarks.py",
    "loss_curve.py",
    "trial/comparison.py",
    "trial/data.py",
    "trial/report.py",
    "card_sections.py",
    "run_record.py",
    "card.py",
    "hub.py",
    "evaluation/groups.py",
    "evaluation/local_tasks.py",
    "evaluation/sandbox.py",
    "evaluation/metrics.py",
    "evaluation/sql_match.py",
    "evaluation/sql_questions.py",
    "pipeline/local_replicas.py",
    "data_parallel/sizes.py",
    "data_parallel/pacing.py",
    "data_parallel/clock.py",
    "data_parallel/powersgd.py",
    "data_parallel/outer_wires.py",
    "data_parallel/tied.py",
    "data_parallel/base.py",
    "data_parallel/diloco.py",
]
HEAVY = ("torch.distributed", "accelerate", "transformers")
# A module may import its own layer and those before it.
LAYERS = [
    {"config", "devices", "mesh", "random_states", "extras", "json_lines"},
    {
        "presets",
        "planner",
        "model_shape",
        "link_bytes",
        "sync_plan",
        "sync_cost",
        "memory",
        "boundary",
        "data_parallel",
        "spectral",
        "gradients",
        "diagnostics",
        "pruning",
        "sampling",
        "waiting",
        "anchor",
        "fingerprints",
        "data_checks",
        "field_checks",
        "preference",
    },
    {"hub_names", "hub_benchmarks", "shipped", "loss_curve", "card_sections", "child_process", "staging"},
    {
        "metering",
        "figures",
        "ledger",
        "checkpoint_folder",
        "folder_lock",
        "checkpoint_state",
        "checkpoint",
        "adapter_checkpoint",
        "shard_transfer",
        "pipeline",
    },
    {"roll_call", "agreements", "run_record", "replication", "pipeline_gradients"},
    {"calibration", "adaptive", "probing", "drift", "card", "merging"},
    {"engine", "hub", "evaluation"},
    {
        "mesh_checkpoint",
        "resume_choice",
        "sync_checkpoint",
        "sync_arguments",
        "argument_checks",
        "anchor_checks",
        "anchor_arguments",
        "arguments",
        "announcement",
        "progress",
        "batches",
        "reports",
    },
    {
        "evaluation_loop",
        "calibration_batches",
        "control",
        "given_optimizer",
        "trainer_checks",
        "sft_checks",
        "dpo_checks",
        "trl_data",
        "hub_trainer",
        "data_trainer",
        "evaluation_trainer",
        "memory_report",
        "anchoring",
    },
    {"trainer"},
    {"sft", "dpo", "diagnosing"},
    {"trial"},
    {"cli", "__main__"},
]


def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, type-checking imports left out."""
    names = set()
    package = ["hf_meshadapt", *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names.add(".".join([*base, *([node.module] if node.module else [])]))
            names |= {".".join([*base, node.module or "", alias.name]).replace("..", ".") for alias in node.names}
    return names


def module_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "hf_meshadapt" and len(parts) > 1 else None


@pytest.mark.parametrize("file", PURE)
def test_pure_modules_are_pure(file):
    touched = {name for name in imports(PACKAGE / file) if name.startswith(HEAVY)}
    assert not touched


def test_dependencies_point_one_way():
    rank = {module: layer for layer, modules in enumerate(LAYERS) for module in modules}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        assert module in rank, f"{module} is not placed in LAYERS"
        for used in filter(None, map(module_of, imports(path))):
            if used in rank:
                assert rank[used] <= rank[module], f"{path.name} imports {used}"


def test_no_cycles_between_modules():
    edges = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(["hf_meshadapt", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        edges[name] = imports(path)
    known = set(edges)

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for used in edges[name] & known - {"hf_meshadapt"}:
                visit(used, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in known:
        visit(name, ())


def test_no_module_globals_for_state():
    for path in PACKAGE.rglob("*.py"):
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Global)], path
