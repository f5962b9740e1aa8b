"""`MeshAdaptTrainer`: transformers' Trainer over a mesh. Overrides only; the work is done by `engine.MeshEngine`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    SaveStrategy,
    has_length,
    rotate_checkpoints,
)

from . import mesh_checkpoint
from .anchoring.choice import make_anchoring
from .announcement import mesh_line
from .arguments import MeshAdaptArguments
from .batches import refuse_unlabelled, tensors_of
from .calibration_batches import calibration_batches
from .checkpoint_folder import asked_checkpoint
from .control import ControlAgreement
from .data_trainer import DataMixin
from .engine import MeshEngine
from .evaluation_trainer import EvaluationMixin
from .fingerprints import launch_fingerprint
from .given_optimizer import drop_foreign, parameter_ids
from .hub_trainer import HubMixin
from .pipeline.adapters import check_adapters
from .pipeline.microbatch import pad_rows
from .pipeline.stage import LossFunction
from .progress import show_progress, tell
from .reports import mesh_report
from .resume_choice import newest_common
from .trainer_checks import (
    loss_function,
    refuse_foreign_loader,
    refuse_model,
    refuse_optimizer,
    refuse_raw_data,
    refuse_unsupported,
    tell_of_emulation,
    tell_of_tied,
)

logger = logging.getLogger(__name__)


class MeshAdaptMixin(DataMixin, EvaluationMixin, HubMixin):
    """Puts a pipeline mesh under a Trainer class; `MeshAdaptTrainer` is this over transformers' Trainer.

    Args:
        model: a causal language model, or the name or folder of one. Given a name, each rank loads only its own
            stage; a model instance is cut in place, so that the caller's object holds one stage afterwards.
        args: `MeshAdaptArguments`.
        peft_config: a `LoraConfig` of peft: only the adapters are trained and saved. Their first values are those of
            `set_seed(args.seed)` and `get_peft_model`. A `PeftModel` as the model keeps the values that it has.

    Everything else is as for the Trainer class below.
    """

    stands_in_for: type = Trainer  # some of whose methods a mesh never calls
    rows_per_example: int = 1  # sequences that the collator makes of an example, and that stay in one microbatch

    def __init__(self, model=None, args: MeshAdaptArguments | None = None, *positional, peft_config=None, **kwargs):
        if not isinstance(args, MeshAdaptArguments):
            raise ValueError(f"args must be MeshAdaptArguments, not {type(args).__name__}: change that name too")
        named = {**dict(zip(list(inspect.signature(super().__init__).parameters)[2:], positional)), **kwargs}
        refuse_unsupported(type(self), named, args)
        set_seed(args.seed)  # before a model_init builds weights, as Trainer does
        self._starts_anew = model is None and named.get("model_init") is not None
        if self._starts_anew:
            model = named.pop("model_init")()
        if model is None:
            raise ValueError(
                "model=None: give a model, or the name of one, of which each rank then loads its own stage"
            )
        check_adapters(model, peft_config)
        tell_of_emulation(args)
        mesh = args.mesh_config()
        rank, launch = (0, None) if mesh.emulated else (args.process_index, launch_fingerprint(args.to_dict(), named))
        self.engine = MeshEngine(
            mesh, args.boundary_config(), rank, args.data_parallel_config(), launch, args.has_anchor
        )
        # State of an optimizer that the caller brings is not known here, and the anchor circuit has none.
        own_optimizer = named.get("optimizer_cls_and_kwargs") or any(named.get("optimizers") or ())
        optimizer = "" if own_optimizer or args.runs_anchor else args.optim
        whole = parameter_ids(model)
        model = self.engine.take_model(model, args.model_dtype, args.device, optimizer, peft_config, args.seed)
        args._n_gpu = min(1, args.n_gpu)  # never DataParallel over the local GPUs
        super().__init__(model=model, args=args, **named)
        refuse_model(self)
        refuse_raw_data(self)
        self.engine.build(args.device, self.accelerator.autocast, self._loss_function(), self.rows_per_example)
        refuse_optimizer(self)
        drop_foreign(self.optimizer, whole, self.model)
        self.anchoring = make_anchoring(self)
        self._undo_step_hook: Callable[[], None] = lambda: None
        self._accumulation = 0
        self._batch_length = 0
        show_progress(self)

    # Training --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if has_length(self.train_dataset) and len(self.train_dataset) == 0:
            raise ValueError("train_dataset is empty. Give it at least one row")
        if self._starts_anew and self.state.global_step:
            raise NotImplementedError("train() again with model_init: stages are not built anew. Make another trainer")
        # Trainer's own exchanges over all ranks do not say whom they waited for.
        with self.engine.naming("Trainer's exchange with"), self.anchoring.running(), self.engine.folder_lock as lock:
            if self.args.runs_anchor:
                return self.anchoring.serve()
            if self.engine.topology.rank == 0 and self.args.save_strategy != SaveStrategy.NO:
                lock.refuse_held(Path(self.args.output_dir))  # now, not at the first save
            resume_from_checkpoint = asked_checkpoint(resume_from_checkpoint, Path(self.args.output_dir))
            if resume_from_checkpoint is True:
                folder = newest_common(self.engine, Path(self.args.output_dir))
                if folder is None:
                    raise ValueError(f"resume_from_checkpoint=True: no whole checkpoint in {self.args.output_dir}")
                resume_from_checkpoint = str(folder)
            self.engine.replication.restart()
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        mesh_checkpoint.load_weights(self.engine, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        mesh_checkpoint.load_weights(self.engine, Path(self.state.best_model_checkpoint), weights_only=True)

    def _wrap_model(self, model, training=True, dataloader=None):
        # Anything but the model itself tells Trainer to leave it alone: stages are wrapped by the engine.
        return self.engine.runner.trained

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        refuse_foreign_loader(train_dataloader, self.engine, trains=True)
        refuse_unlabelled(train_dataloader, self._rows(training=True), self._count_labels, self.engine)
        self.engine.num_steps = max_steps
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._undo_step_hook()  # of an earlier train()
        # The step's last moment: everything before it is part of the step that the meter times.
        in_turn = self.engine.replication.local.step_in_turn
        self._undo_step_hook = in_turn(self.optimizer.optimizer, self._end_step, around=self.anchoring.one_step)
        self._accumulation = 0
        self._control_agreement = ControlAgreement(self)
        line = mesh_line(self.engine.mesh, mesh_checkpoint.layers_of(self.engine), self.engine.boundary)
        if line is not None:
            tell(self, line)
        if self.engine.needs_calibration:
            tell(self, f"calibrating the boundaries on {self.args.calibration_tokens} tokens")
            self._calibrate(train_dataloader)
            tell(self, f"boundaries calibrated in {self.engine.calibration_cost['seconds']:.1f} s")
        self.anchoring.start(train_dataloader)
        self.engine.ledger.start_run()
        return prepared

    def _calibrate(self, dataloader) -> None:
        batches = calibration_batches(self, dataloader)
        self.engine.calibrate(batches, self._rows(training=True), self.args.gradient_accumulation_steps)

    def _calibration_is_due(self) -> bool:
        if self.anchoring.calibrates:
            return False
        every, step = self.args.calibration_every, self.state.global_step
        if every is None:
            every = self.engine.calibration_interval
        # A resumed run arrives at a step as the uninterrupted one does: the checkpoint was written before.
        return bool(every and step and step % every == 0)

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        engine, meter = self.engine, self.engine.step_meter
        if self._accumulation == 0:
            if self._calibration_is_due():
                self._calibrate(self.callback_handler.train_dataloader)
            meter.start_step()
            self.anchoring.begin_step(self.state.global_step)
        sync = self.accelerator.sync_gradients
        rows = self._rows(training=True)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = pad_rows(self._prepare_inputs(tensors_of(inputs)), rows * len(engine.local_replicas))
        self._batch_length = inputs["labels"].shape[1]
        loss = engine.train_batch(inputs, rows, num_items_in_batch, self.state.global_step, self._accumulation, sync)
        meter.add_tokens(inputs["labels"].numel())  # padding travels too
        self._accumulation = 0 if sync else self._accumulation + 1
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return loss * engine.loss_share

    def floating_point_ops(self, inputs) -> int:
        # Trainer sums over all ranks, and stages hold some parameters of each other, such as the final norm.
        return 6 * inputs["input_ids"].numel() * self.engine.parts.num_parameters()

    def _rows(self, training: bool) -> int:
        examples = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        return examples * self.rows_per_example

    def _loss_function(self) -> LossFunction | None:
        return loss_function(self)

    def _clip_grad_norm(self, model):
        return self.engine.clip_gradients(self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        return self.engine.gradient_norm() if grad_norm is None else grad_norm

    def create_optimizer(self, *args, **kwargs):
        self.optimizer = self.anchoring.corrected(super().create_optimizer(*args, **kwargs))
        return self.optimizer

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        self._control_agreement.agree()
        self._finish_if_stopping()  # the last evaluation is of all that was learnt
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finish_if_stopping(self) -> None:
        # A run that stops before its last step has not synchronised replicas that step apart; all ranks stop alike.
        if self.control.should_training_stop:
            self.engine.finish()

    def _finalize_training(self, *args):
        self.engine.finish()  # before callbacks learn that training has ended
        # Trainer adds what was not logged yet, on each rank its own; only last stages have any.
        (total,) = self.engine.sum_over_ranks([self._tr_loss.item()])
        self._tr_loss.fill_(total / self.args.world_size)
        if self.state.global_step > self._globalstep_last_logged:
            self.engine.take_logs()  # steps after the last log belong in the report too
        return super()._finalize_training(*args)

    def _end_step(self) -> None:
        self.anchoring.end_step()
        self.engine.end_step()

    def hyperparameter_search(self, *args, **kwargs):
        raise NotImplementedError(
            "hyperparameter_search: a mesh cannot be built anew per trial. Launch one run per trial"
        )

    # Logs ------------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.engine.take_logs() | self.anchoring.logs())
            tell_of_tied(self)
        self._agree_on_speed(logs)
        super().log(logs, start_time)

    def mesh_report(self) -> dict:
        """Speed and bytes of the run so far beside the plan: `tokens_per_second`, and by axis and in `total`
        `bytes_per_token` (as the sockets sent), `planned_bytes_per_token` and `bytes_ratio_to_dense` (as planned). While
        training goes on, what was measured is of whole log intervals, None and empty before the first. Apart from these,
        `calibration`: passes, tokens, seconds and bytes, None where there was none; `boundary_budgets`: by boundary, None
        where boundary_budget is that of all; and `anchor`: snapshots, priors, steps that a prior corrected and their
        bytes, None without an anchor.

        Planned figures count padding as tokens; they are of the last batch's shape. Collective: call it on all ranks.
        """
        if self.args.runs_anchor:
            return {}
        if not self._batch_length:
            raise ValueError("mesh_report() before any training step: there is nothing to report yet")
        self._call_roll("mesh_report()")
        rows, accumulation = self._rows(training=True), self.args.gradient_accumulation_steps
        plan = self.engine.plan(rows, self._batch_length, accumulation)
        run = self.engine.ledger.run
        return mesh_report(run.logs() if run.seconds else {}, plan) | {
            "calibration": self.engine.calibration_cost,
            "boundary_budgets": self.engine.boundary.budgets,
            "anchor": self.anchoring.report(),
        }

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes one ordinary Hugging Face checkpoint; call it on all ranks. The anchor circuit writes nothing."""
        if self.args.runs_anchor:
            return
        folder = Path(output_dir or self.args.output_dir)
        self.engine.roll_call("save_model()")
        with self.engine.naming("saving together with"), self._card_of_the_saved(folder):
            self._take_report()
            mesh_checkpoint.save_model(self.engine, folder, self._save_extras, self.args.save_on_each_node)
        if self.args.push_to_hub and not _internal_call:
            self._push_saved(folder)

    def is_world_process_zero(self) -> bool:
        """Whether this process writes and prints for all; none of the anchor circuit does."""
        return super().is_world_process_zero() and not self.args.runs_anchor

    def _save_extras(self, folder: Path) -> None:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / "training_args.json").write_text(self.args.to_json_string() + "\n")  # tokens are masked in it
        self._write_record(folder)

    def _save_checkpoint(self, model, trial) -> None:
        self._finish_if_stopping()  # the evaluation before may have stopped the run
        self.store_flos()
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if best_step := self.state.best_global_step:
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
            self.state.best_model_checkpoint = str(best) if best == final or best.exists() else None
        exported = [c for c in self.callback_handler.callbacks + [self.control] if isinstance(c, ExportableState)]
        for name in {type(callback).__name__ for callback in exported}:
            states = [callback.state() for callback in exported if type(callback).__name__ == name]
            self.state.stateful_callbacks[name] = states if len(states) > 1 else states[0]

        def write_extras(folder: Path) -> None:
            self._save_extras(folder)
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

        with self.engine.naming("saving together with"):
            self._take_report()
            is_leader = mesh_checkpoint.save_checkpoint(
                self.engine,
                final,
                step=self.state.global_step,
                write_extras=write_extras,
                optimizer=None if self.args.save_only_model else self.optimizer.optimizer,
                scheduler_state=self.lr_scheduler.state_dict(),
                write_further=self.anchoring.save,
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
            self.anchoring.load(Path(checkpoint))

    def _load_rng_state(self, checkpoint) -> None:
        if checkpoint is not None:
            mesh_checkpoint.load_rng(self.engine, Path(checkpoint))


class MeshAdaptTrainer(MeshAdaptMixin, Trainer):
    """transformers' Trainer over a pipeline mesh."""
