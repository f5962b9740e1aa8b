"""`MeshAdaptTrainer`: transformers' Trainer over a mesh. Overrides only; the work is done by `engine.MeshEngine`."""

from __future__ import annotations

import inspect
import itertools
import logging
from pathlib import Path

import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import RandomSampler
from transformers import Trainer, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, has_length, rotate_checkpoints

from . import mesh_checkpoint
from .arguments import MeshAdaptArguments
from .engine import MeshEngine
from .pipeline.microbatch import mask_rows, pad_rows
from .progress import MeshProgressCallback
from .sampling import EpochSampler

logger = logging.getLogger(__name__)


class MeshAdaptMixin:
    """Puts a pipeline mesh under a Trainer class; `MeshAdaptTrainer` is this over transformers' Trainer.

    Args:
        model: a causal language model, or the name or folder of one. Given a name, each rank loads only its own
            stage; a model instance is cut in place, so that the caller's object holds one stage afterwards.
        args: `MeshAdaptArguments`.

    Everything else is as for the Trainer class below.
    """

    def __init__(self, model=None, args: MeshAdaptArguments | None = None, *positional, **kwargs):
        if not isinstance(args, MeshAdaptArguments):
            raise ValueError(f"args must be MeshAdaptArguments, not {type(args).__name__}: change that name too")
        named = {**dict(zip(list(inspect.signature(super().__init__).parameters)[2:], positional)), **kwargs}
        refuse_unsupported(named)
        set_seed(args.seed)  # before a model_init builds weights, as Trainer does
        if model is None and (model_init := named.pop("model_init", None)) is not None:
            model = model_init()
        if model is None:
            raise ValueError(
                "model=None: give a model, or the name of one, of which each rank then loads its own stage"
            )
        mesh = args.mesh_config()
        self.engine = MeshEngine(mesh, args.boundary_config(), 0 if mesh.emulated else args.process_index)
        # State of an optimizer that the caller brings is not known here.
        own_optimizer = named.get("optimizer_cls_and_kwargs") or any(named.get("optimizers") or ())
        model = self.engine.take_model(model, args.model_dtype, args.device, "" if own_optimizer else args.optim)
        super().__init__(model=model, args=args, **named)
        self.args._n_gpu = min(1, self.args.n_gpu)  # never DataParallel over the local GPUs
        self.engine.build(args.device, self.accelerator.autocast)
        self._accumulation = 0
        self._batch_length = 0
        if any(type(callback) is ProgressCallback for callback in self.callback_handler.callbacks):
            self.remove_callback(ProgressCallback)
            self.add_callback(MeshProgressCallback)

    # Data: sharded by replica, not by rank ---------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        mesh = self.engine.mesh

        def shard_by_replica(loader, device_placement=None, slice_fn_for_dispatch=None):
            accelerator = self.accelerator
            loader = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=1 if mesh.emulated else mesh.replicas,
                process_index=self.engine.topology.replica,
                put_on_device=accelerator.device_placement,
                # Seeds are equal on all ranks; synchronising generators would be a collective on WORLD.
                rng_types=[],
                dispatch_batches=False,
                even_batches=True,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
            )
            if isinstance(loader.batch_sampler, BatchSamplerShard):
                # Where accelerate looks for it to set the epoch of a loader that skips batches (a resume).
                loader.batch_sampler.sampler = loader.batch_sampler.batch_sampler.sampler
            return loader

        self.accelerator.prepare_data_loader = shard_by_replica

    def _get_train_sampler(self, train_dataset=None):
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, RandomSampler) and self.accelerator.use_seedable_sampler:
            return sampler  # accelerate seeds it
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(sampler, seed) if hasattr(sampler, "generator") else sampler

    def get_tp_size(self) -> int:
        """Ranks that read the same batch, as Trainer's batch arithmetic wants to know."""
        return 1 if self.engine.mesh.emulated else self.engine.mesh.stages

    def get_batch_samples(self, epoch_iterator, num_batches: int, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [self._with_labels(batch) for batch in batches]
        if batches and self.accelerator.gradient_state.end_of_dataloader:
            # Not of the loader in use: on a resume it skips batches and does not know its size.
            batches[-1] = self._without_repeats(batches[-1], self.callback_handler.train_dataloader)
        count = sum((self._count_labels(batch["labels"]) for batch in batches), torch.zeros((), dtype=torch.long))
        return batches, self.engine.sum_over_replicas(count.cpu())

    def _get_num_items_in_batch(self, batch_samples, device):
        return None  # counted in get_batch_samples, over replicas instead of WORLD

    def _count_labels(self, labels: torch.Tensor) -> torch.Tensor:
        # Trainer's own rule: for some architectures (GPT-2) it counts position 0 although the loss leaves it out.
        return (labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum()

    def _with_labels(self, batch):
        if "labels" not in batch:
            raise ValueError(
                f"the batch has no labels (only {', '.join(batch)}): use a data collator that makes them, such as "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            )
        return dict(batch)

    def _without_repeats(self, batch, loader):
        """Takes the labels off the rows that the sampler repeated to give every replica a last batch."""
        if self.engine.mesh.emulated or loader._drop_last or not has_length(loader.dataset):
            return batch
        remainder, rows = len(loader.dataset) % loader.total_batch_size, len(batch["labels"])
        return mask_rows(batch, max(0, remainder - self.engine.topology.replica * rows)) if remainder else batch

    # Training --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if has_length(self.train_dataset) and len(self.train_dataset) == 0:
            raise ValueError("train_dataset is empty. Give it at least one row")
        # Trainer's own exchanges over all ranks do not say whom they waited for.
        with self.engine.naming("Trainer's exchange with"):
            if resume_from_checkpoint is True:
                folder = mesh_checkpoint.newest_common(self.engine, Path(self.args.output_dir))
                if folder is None:
                    raise ValueError(f"resume_from_checkpoint=True: no whole checkpoint in {self.args.output_dir}")
                resume_from_checkpoint = str(folder)
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        mesh_checkpoint.load_weights(self.engine, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        mesh_checkpoint.load_weights(self.engine, Path(self.state.best_model_checkpoint))

    def _wrap_model(self, model, training=True, dataloader=None):
        # Anything but the model itself tells Trainer to leave it alone: stages are wrapped by the engine.
        return self.engine.runner.trained

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._accumulation = 0
        if self.engine.needs_calibration:
            self._calibrate(train_dataloader)
        self.engine.ledger.start_run()
        return prepared

    def _calibrate(self, dataloader) -> None:
        """Uncoded passes over the first rows of the training set, read apart from the run's own data order.

        Every replica looks at rows of its own, all at the same number of batches.
        """
        rows, local = self._rows(training=True), self.engine.local_replicas
        everyone = rows * self.engine.mesh.replicas
        source, batches, left = iter(dataloader.dataset), [], self.args.calibration_tokens
        while left > 0:
            examples = list(itertools.islice(source, everyone))
            if not batches:  # a small dataset
                examples = list(itertools.islice(itertools.cycle(examples), everyone))
            if len(examples) < everyone:
                break
            batch = self._with_labels(dataloader.collate_fn(examples))
            left -= batch["labels"].numel()
            mine = {name: value[rows * local[0] : rows * (local[-1] + 1)] for name, value in batch.items()}
            batches.append(self._prepare_inputs(mine))
        self.engine.calibrate(batches, rows, self.args.gradient_accumulation_steps)

    def _calibration_is_due(self) -> bool:
        every, step = self.args.calibration_every, self.state.global_step
        # A resumed run arrives at a step as the uninterrupted one does: the checkpoint was written before.
        return bool(every and step and step % every == 0)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        engine, meter = self.engine, self.engine.step_meter
        if self._accumulation == 0:
            if self._calibration_is_due():
                self._calibrate(self.callback_handler.train_dataloader)
            meter.start_step()
        sync = self.accelerator.sync_gradients
        rows = self._rows(training=True)
        inputs = self._padded(self._prepare_inputs(inputs), rows)
        self._batch_length = inputs["labels"].shape[1]
        loss = engine.train_batch(inputs, rows, num_items_in_batch, self.state.global_step, self._accumulation, sync)
        meter.add_tokens(inputs["labels"].numel())  # padding travels too
        self._accumulation = 0 if sync else self._accumulation + 1
        return loss * engine.loss_share

    def _rows(self, training: bool) -> int:
        return self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size

    def _padded(self, inputs: dict, rows: int) -> dict:
        return pad_rows(inputs, rows * len(self.engine.local_replicas))

    def _clip_grad_norm(self, model):
        return self.engine.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        return self.engine.gradient_norm() if grad_norm is None else grad_norm

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        # The step's last moment: everything before it is part of the step that the meter times.
        optimizer.register_step_post_hook(lambda *_: self.engine.end_step())
        return optimizer

    # Evaluation ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Mean loss, unmasked, weighted as a single-process Trainer with all replicas' rows in one batch weighs it."""
        if description == "Prediction":
            raise NotImplementedError("predict() on a mesh: load the saved model with AutoModelForCausalLM instead")
        with self.engine.ledger.apart():
            return self._evaluation_loop(dataloader, metric_key_prefix)

    def _evaluation_loop(self, dataloader, metric_key_prefix: str) -> EvalLoopOutput:
        rows = self._rows(training=False)
        rounds: list[torch.Tensor] = []
        self.callback_handler.eval_dataloader = dataloader
        for batch in dataloader:
            batch = self._prepare_inputs(self._with_labels(batch))
            if self.accelerator.gradient_state.end_of_dataloader:
                batch = self._without_repeats(batch, dataloader)
            examples = batch["labels"].ne(-100).any(dim=1).sum()
            tokens = self._count_labels(batch["labels"])
            loss = self.engine.eval_batch(self._padded(batch, rows), rows)
            rounds.append(torch.stack([loss.double(), tokens.double(), examples.double()]).cpu())
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss = self._mean_loss(rounds)
        num_samples = len(dataloader.dataset) if has_length(dataloader.dataset) else len(rounds) * rows
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": loss}, num_samples)

    def _mean_loss(self, rounds: list[torch.Tensor]) -> float:
        if not rounds:
            raise ValueError("the evaluation dataset is empty: there is no loss to average. Give it at least one row")
        sums = self.engine.from_last_stage(self.engine.sum_over_replicas(torch.stack(rounds)))
        loss, tokens, examples = sums[sums[:, 1] > 0].T
        return float((loss / tokens * examples).sum() / examples.sum())

    # Logs ------------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.engine.take_logs())
        super().log(logs, start_time)

    def mesh_report(self) -> dict:
        """Speed and bytes of the run so far (whole log intervals) beside the plan: `tokens_per_second`, and by axis and
        in `total` `bytes_per_token` (as the sockets sent), `planned_bytes_per_token` and `bytes_ratio_to_dense` (as
        planned). Apart from these, `calibration`: passes, tokens, seconds and bytes, None where there was none; and
        `boundary_budgets`: by boundary, None where boundary_budget is that of all.

        Planned figures count padding as tokens; they are of the last batch's shape. Collective: call it on all ranks.
        """
        if not self._batch_length:
            raise ValueError("mesh_report() before any training step: there is nothing to report yet")
        rows, accumulation = self._rows(training=True), self.args.gradient_accumulation_steps
        plan = self.engine.plan(rows, self._batch_length, accumulation)
        return mesh_report(self.engine.ledger.run.logs(), plan) | {
            "calibration": self.engine.calibration_cost,
            "boundary_budgets": self.engine.boundary.budgets,
        }

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes one ordinary Hugging Face checkpoint; call it on all ranks."""
        folder = Path(output_dir or self.args.output_dir)
        with self.engine.naming("saving together with"):
            mesh_checkpoint.save_model(self.engine, folder, self._save_extras, self.args.save_on_each_node)
        if self.args.push_to_hub and not _internal_call and self.is_world_process_zero():
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_extras(self, folder: Path) -> None:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / "training_args.json").write_text(self.args.to_json_string() + "\n")  # tokens are masked in it

    def _save_checkpoint(self, model, trial) -> None:
        self.store_flos()
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if best_step := self.state.best_global_step:
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
            self.state.best_model_checkpoint = str(best) if best == final or best.exists() else None
        for callback in self.callback_handler.callbacks + [self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()

        def write_extras(folder: Path) -> None:
            self._save_extras(folder)
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        with self.engine.naming("saving together with"):
            is_leader = mesh_checkpoint.save_checkpoint(
                self.engine,
                final,
                step=self.state.global_step,
                write_extras=write_extras,
                optimizer=None if self.args.save_only_model else self.optimizer.optimizer,
                scheduler_state=self.lr_scheduler.state_dict(),
                keep_local=self.args.save_on_each_node,
            )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if is_leader:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        if checkpoint is not None:
            mesh_checkpoint.load_state(self.engine, Path(checkpoint), self.optimizer.optimizer, self.lr_scheduler)

    def _load_rng_state(self, checkpoint) -> None:
        if checkpoint is not None:
            mesh_checkpoint.load_rng(self.engine, Path(checkpoint))


def mesh_report(logged: dict[str, float], plan) -> dict:
    """Joins what was measured (`Figures.logs`) with a byte plan; see `MeshAdaptMixin.mesh_report`."""
    axes = [axis for axis in ("pipeline", "tied", "data_parallel", "anchor", "control") if plan.axis_bytes(axis)]
    measured = {axis: logged[f"bytes_per_token_{axis}"] for axis in axes if f"bytes_per_token_{axis}" in logged}
    if "bytes_per_token" in logged:
        measured["total"] = logged["bytes_per_token"]
    return {
        "tokens_per_second": logged.get("tokens_per_second"),
        "wait_share": logged.get("wait_share"),
        "bytes_per_token": measured,
        "planned_bytes_per_token": {axis: plan.bytes_per_token(axis) for axis in (*axes, "total")},
        "bytes_ratio_to_dense": {axis: plan.ratio_to_dense(axis) for axis in (*axes, "total")},
    }


def refuse_unsupported(trainer_arguments: dict) -> None:
    """Raises NotImplementedError for what would be ignored or wrong over stages."""
    for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
        if trainer_arguments.get(name) is not None:
            raise NotImplementedError(
                f"{name}: logits stay on the last stage, so only the model's own loss is computed on a mesh. Leave it out"
            )


class MeshAdaptTrainer(MeshAdaptMixin, Trainer):
    """transformers' Trainer over a pipeline mesh."""
