"""Trainer's Hub methods over a mesh: rank 0 alone talks to the Hub, in a process beside it, and nobody waits long for it.

Trainer's own would let rank 0 save by itself while saving needs all ranks, pickle its arguments with the token in them,
and lose a run to a failed upload. Here a failed upload is logged with the command that repeats it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from transformers.trainer_utils import HubStrategy, SaveStrategy

from .card import CARD_NAME, is_unedited, load_evaluation, write_card
from .child_process import BackgroundJobs, ChildFailed, run_child
from .hub import push_arguments, retry_command
from .hub_benchmarks import write_benchmark_results
from .run_record import RECORD_NAME, make_record, new_run_id, run_id_of, write_record
from .staging import allowed_seconds, clear_staged, stage

logger = logging.getLogger(__name__)


class HubMixin:
    """Base of `MeshAdaptMixin`: what a run records beside its models, its card, and its uploads.

    Attributes:
        uploads: rank 0's queue.
    """

    hub_model_id: str | None = None
    _report: dict | None = None
    _run_id: str | None = None

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Every training makes another model, unless it carries on what another one with the same arguments saved."""
        found = None
        if resume_from_checkpoint and self.engine.topology.rank == 0:
            found = run_id_of(Path(resume_from_checkpoint), self.args)
        self._run_id = self.engine.from_first(found or new_run_id())  # every machine's first rank writes a record
        return super().train(resume_from_checkpoint, *args, **kwargs)

    @property
    def run_id(self) -> str:
        """Tells this run's models from those of other runs of as many steps."""
        self._run_id = self._run_id or new_run_id()
        return self._run_id

    # What is written beside every saved model ------------------------------------------------------------------------

    def _take_report(self) -> None:
        """Prepares what `_write_record` writes. Collective."""
        if self._batch_length:
            with self.engine.ledger.apart():
                self._report = self.mesh_report()

    def _write_record(self, folder: Path) -> None:
        write_record(folder, make_record(self, self._report))

    def _write_card(self, folder: Path, **added) -> None:
        try:
            write_card(folder, repo_id=self.hub_model_id, **added)
        except (OSError, ValueError) as error:  # the model is worth more than its card
            logger.error("the card of %s could not be written: %s", folder, error)

    @contextlib.contextmanager
    def _card_of_the_saved(self, folder: Path) -> Iterator[None]:
        """While another model takes the place of the one in `folder`: what is said of the old one must not stay.

        A card that nobody edited is written anew, and benchmark results that are not of this model are removed.
        """
        has_card = all((folder / name).is_file() for name in (CARD_NAME, RECORD_NAME))
        try:
            unedited = has_card and self.is_world_process_zero() and is_unedited(folder)
        except ValueError:  # another version's, or damaged
            unedited = False
        yield
        if not has_card or not self.is_world_process_zero():
            return
        if unedited:
            self._write_card(folder)
        else:
            logger.warning("%s was edited and stays as it is: `meshadapt card %s` writes it anew", CARD_NAME, folder)
            write_benchmark_results(folder, load_evaluation(folder))

    def create_model_card(
        self,
        model_name: str | None = None,
        *,
        language=None,
        license: str | None = None,
        tags=None,
        finetuned_from: str | None = None,
        dataset_name: str | None = None,
        dataset_tags=None,
        dataset=None,
    ) -> None:
        """Writes the card of the model in `output_dir`, from what the run recorded and what is given here.

        Args:
            dataset_name, dataset_tags, dataset: the Hub's names of the training data, as Trainer and TRL call them.
        """
        folder = Path(self.args.output_dir)
        if not self.is_world_process_zero():
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder, make_record(self, self._report))
        datasets = next((names for names in (dataset_tags, dataset, dataset_name) if names), None)
        self._write_card(
            folder,
            model_name=model_name,
            language=language,
            license=license,
            tags=tags,
            base_model=finetuned_from,
            datasets=datasets,
        )

    # Uploads ---------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository of `hub_model_id`, before the run has cost anything. Collective; nothing in an anchor.

        Raises:
            ValueError: the Hub refused it; on all ranks.
        """
        if self.args.runs_anchor:
            return
        args, outcome = self.args, {}
        self.uploads = BackgroundJobs("uploads")
        self._private = args.hub_private_repo if private is None else private
        if self.is_world_process_zero():
            clear_staged(Path(args.output_dir), "push")
            repo = args.hub_model_id or Path(args.output_dir).absolute().name
            arguments = [*push_arguments(Path(args.output_dir), repo, private=self._private), "--create-only"]
            try:
                answer = run_child(arguments, self._deadline_seconds, HF_TOKEN=token or args.hub_token)
                outcome = {"repo": answer.split()[-1]}
            except ChildFailed as error:
                outcome = {"error": f"push_to_hub=True, hub_model_id={args.hub_model_id!r}: {error}"}
        outcome = self.engine.from_first(outcome)
        if "error" in outcome:
            raise ValueError(outcome["error"])
        self.hub_model_id = outcome["repo"]

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card,
    ):
        """Saves the model to `output_dir`, writes its card and uploads both; call it on all ranks.

        A failed upload is logged with the command that repeats it; it raises nothing, since the model is saved and the
        other ranks go on. Rank 0 waits for the upload, but in a run of several processes at most a quarter of
        `link_timeout_seconds`; after that it goes on in the background and the process ends with it.

        Args:
            blocking: wait for the upload.
            card: further arguments of `create_model_card`.

        Returns:
            The commit's URL on rank 0, None where it failed or goes on; its future with blocking=False. None elsewhere,
            and in the anchor circuit, which pushes nothing.
        """
        if self.args.runs_anchor:
            return None
        self.engine.roll_call("push_to_hub()")
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:  # on all ranks alike
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        self.create_model_card(**card)
        if not self.is_world_process_zero():
            return None
        return self._upload(Path(self.args.output_dir), commit_message, blocking, token=token, revision=revision)

    def _push_saved(self, folder: Path) -> None:
        """Writes the card of a model that was just saved and uploads both; at rank 0."""
        if self.is_world_process_zero():
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self._write_card(folder)
            self._upload(folder, "Model save")

    def _upload(self, folder: Path, message: str, blocking: bool = True, **options) -> str | Future | None:
        future = self._submit(folder, folder, message, **options)
        if not blocking:
            return future
        self._finish_current_push()
        return future.result() if future.done() else None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        args, folder = self.args, Path(checkpoint_folder)
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if self.uploads.busy and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        by_epoch = args.save_strategy == SaveStrategy.EPOCH
        progress = f"epoch {int(self.state.epoch)}" if by_epoch else f"step {self.state.global_step}"
        message = f"Training in progress, {progress}"
        self._write_card(folder)
        staged = stage(folder, "push")
        self._submit(staged, folder, message)
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
            whole = dict(with_state=True, replace_folder=True)  # nothing of the last one may be left
            self._submit(staged, folder, f"{message}, checkpoint", path_in_repo=name, **whole)
        self.uploads.submit(lambda: shutil.rmtree(staged), lambda error: f"{staged} could not be removed: {error}")

    def _submit(self, folder: Path, kept: Path, message: str, *, token=None, revision=None, **options) -> Future:
        """Queues an upload of `folder`.

        Args:
            kept: the folder with the same content that stays, for the command that repeats a failed upload.
        """
        args = self.args
        options |= {"private": self._private, "revision": revision or args.hub_revision, "message": message}
        token = token or args.hub_token

        def upload() -> str:
            return run_child(push_arguments(folder, self.hub_model_id, **options), HF_TOKEN=token).split()[-1]

        def describe(error: Exception) -> str:
            again = retry_command(push_arguments(kept.absolute(), self.hub_model_id, **options))
            return f"{error}. The model and its card are in {kept}; upload them with\n\n    {again}\n"

        return self.uploads.submit(upload, describe)

    def _finish_current_push(self) -> None:
        if self.hub_model_id is not None and self.uploads.busy and not self.uploads.wait(self._deadline_seconds):
            logger.warning("the upload to %s goes on in the background; this process ends with it", self.hub_model_id)

    @property
    def _deadline_seconds(self) -> float | None:
        return allowed_seconds(self.args)
