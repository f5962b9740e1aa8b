"""Uploads of a saved model to the Hub, in one process that does nothing else; `meshadapt push` is this.

The trainer hands its uploads to such a process (`hub_trainer`), so that what it runs and what a user runs again after a
failure is the same command. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import glob
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .card import CARD_NAME, EVALUATION_NAME, load_evaluation, write_card
from .checkpoint_folder import ADAPTER_WEIGHTS, INDEX_NAME, SINGLE_NAME, read_json
from .hub_benchmarks import FOLDER as RESULTS_FOLDER
from .hub_benchmarks import PREFIX as RESULTS_PREFIX
from .run_record import RECORD_NAME

# Of a request without an answer or a byte moved. The client itself would wait for ever.
STALL_SECONDS = 120.0
# Never part of a model: other checkpoints, and files that name places on the disk. See `hidden` too.
NEVER = ["_*", "*/.*", "checkpoint-*", "last-checkpoint/*", "training_args.*", "card.json"]
STATE = ["mesh_state/*", "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state*.pth"]
# A model that is cut otherwise than the one that it replaces must not leave weights of that one behind.
# Nor results of its. Benchmark results that somebody else put there stay.
REPLACED = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "pytorch_model*"]
RESULTS = [EVALUATION_NAME, f"{RESULTS_FOLDER}/{RESULTS_PREFIX}*"]
REPLACED += RESULTS
REPLACED_STATE = ["mesh_state/*"]  # of another mesh, which has files for other ranks

TRANSIENT = (500, 502, 503, 504)
RETRY_PAUSES_SECONDS = (1.0, 4.0)

Result = TypeVar("Result")


class HubError(RuntimeError):
    """The Hub, or the way to it, refused something; says what and what to do."""


def push(
    folder: Path,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload model",
    path_in_repo: str | None = None,
    with_state: bool = False,
    replace_folder: bool = False,
) -> str:
    """Uploads a saved model or checkpoint in one commit and returns the commit's URL; writes a card first if none is there.

    Of what is there already it deletes only what the new files replace: weights of another cut, results of evaluations
    that are ours and, with `with_state`, the state of a mesh. The repository and the revision are made where they are
    missing. Credentials are huggingface_hub's own (`hf auth login`, HF_TOKEN).

    Args:
        repo: `name` or `owner/name`.
        private: of a repository that is made; None is the account's default.
        path_in_repo: folder within the repository.
        with_state: upload what resuming needs too.
        replace_folder: delete everything else in `path_in_repo`, which must not be the root.

    Raises:
        ValueError: the folder holds no whole model, or `replace_folder` would empty the repository.
        HubError: an upload failed; the local files are as they were.
    """
    from huggingface_hub import HfApi

    check_model(folder)
    if replace_folder and not (path_in_repo or "").strip("./"):
        raise ValueError("replace_folder deletes everything else in path_in_repo: give a folder below the root")
    name = make_repo(repo, private)
    has_record = (folder / RECORD_NAME).is_file()
    stale = has_record and (folder / EVALUATION_NAME).is_file() and load_evaluation(folder) is None
    if has_record and not (folder / CARD_NAME).is_file():
        local_file(lambda: write_card(folder, repo_id=name), folder)
    api = HfApi()

    def send() -> str:
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=message,
            revision=revision,
            ignore_patterns=[*NEVER, *hidden(folder), *([] if with_state else STATE), *(RESULTS if stale else [])],
            delete_patterns="*" if replace_folder else [*REPLACED, *(REPLACED_STATE if with_state else [])],
        )
        return commit.commit_url

    return explained(send, f"uploading {folder} to {name}")


def hidden(folder: Path) -> list[str]:
    """Patterns of hidden entries, such as what is being written; benchmark results are part of a model nevertheless."""
    names = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != RESULTS_FOLDER]
    return [pattern for name in names for pattern in (glob.escape(name), f"{glob.escape(name)}/*")]


def check_model(folder: Path) -> None:
    """
    Raises:
        ValueError: the folder holds no model, or not all of its weights.
    """
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds no saved model (config.json is missing): give the folder of save_model()")
    index = folder / INDEX_NAME
    weights = (INDEX_NAME, SINGLE_NAME, ADAPTER_WEIGHTS)
    if not any((folder / name).is_file() for name in weights) and not any(folder.glob("pytorch_model*.bin")):
        raise ValueError(f"{folder} holds no weights ({', '.join(weights)}): give the folder of save_model()")
    shards = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}, which {INDEX_NAME} names: give the folder with all shards"
        )


def make_repo(repo: str, private: bool | None) -> str:
    """Makes a repository where it is missing; returns its full name.

    Raises:
        HubError: the Hub refused it.
        ValueError: no name that the Hub takes.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        return explained(
            lambda: HfApi().create_repo(repo, private=private, exist_ok=True).repo_id, f"making the repository {repo}"
        )
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is not a name that the Hub takes ({error}): use `name` or `owner/name`") from error


def limit_waits() -> None:
    """Gives every wait of this process for the Hub a deadline."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def make_client():
        client = default_client_factory()
        client.timeout = STALL_SECONDS
        return client

    set_client_factory(make_client)


def explained(call: Callable[[], Result], doing: str) -> Result:
    """Runs a call of the client, which repeating must not harm; again where the Hub had trouble of its own.

    Raises:
        HubError: says what to do.
    """
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for pause_seconds in (*RETRY_PAUSES_SECONDS, None):
        try:
            return call()
        except OfflineModeIsEnabled as error:
            raise HubError(f"{doing}: HF_HUB_OFFLINE is set, unset it") from error
        except (HfHubHTTPError, httpx2.HTTPError, OSError, RuntimeError) as error:
            if pause_seconds is None or status_of(error) not in TRANSIENT:
                raise HubError(f"{doing}: {cause(error)}") from error
        time.sleep(pause_seconds)
    raise AssertionError("the last attempt returns or raises")


def cause(error: BaseException) -> str:
    """What went wrong, in one line with a remedy."""
    import httpx2

    status = status_of(error)
    advice = {
        401: "the Hub does not know this token (401). Log in with `hf auth login`, or set HF_TOKEN or hub_token",
        403: "the token may not write there (403). Use one with write access to this owner's repositories",
        404: "no such repository or revision, or a private one (404). Check the name and the token",
        413: "a file is too large (413)",
        507: "the storage is full (507). Delete what is not needed there, or use another owner",
    }
    said = told_by_hub(error)
    if status in advice:
        return advice[status] + (f". The Hub says: {said}" if said else "")
    chain = chain_of(error)
    if status in TRANSIENT:
        return f"the Hub answered {status} again and again{f' ({said})' if said else ''}. Try later"
    if status is not None:
        answer = next(one for one in chain if getattr(one, "response", None) is not None)
        reason = said or first_line(answer)
        if status == 429:
            return f"too many requests (429): {reason}. Wait, then repeat it"
        return f"the Hub refused it ({status}): {reason}"
    if full := next((one for one in chain if isinstance(one, OSError) and one.errno == errno.ENOSPC), None):
        return f"the disk is full ({full}). Free some space"
    if any(isinstance(one, httpx2.HTTPError) for one in chain):
        return f"the connection failed ({first_line(chain[-1])}). Check the network"
    return first_line(chain[-1])


def chain_of(error: BaseException) -> list[BaseException]:
    """An error and what it stems from: the client wraps what happened to one of many files."""
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__
    return chain


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, None where no answer came."""
    answers = (getattr(one, "response", None) for one in chain_of(error))
    return next((answer.status_code for answer in answers if answer is not None), None)


def told_by_hub(error: BaseException) -> str | None:
    """What the Hub wrote with its answer, in one line: the client puts it behind lines of its own."""
    said = next((text for one in chain_of(error) if (text := getattr(one, "server_message", None))), None)
    return said and " ".join(said.split()).rstrip(".")


def local_file(write: Callable[[], Result], folder: Path) -> Result:
    """Runs what writes beside the model.

    Raises:
        HubError: it cannot.
    """
    try:
        return write()
    except OSError as error:
        raise HubError(f"writing the card of {folder}: {cause(error)}") from error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def push_arguments(
    folder: Path,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    path_in_repo: str | None = None,
    with_state: bool = False,
    replace_folder: bool = False,
) -> list[str]:
    """The command-line arguments of `meshadapt` that do the same as `push`."""
    options = {"--revision": revision, "--message": message, "--path-in-repo": path_in_repo}
    flags = [] if private is None else ["--private" if private else "--public"]
    flags += ["--with-state"] if with_state else []
    flags += ["--replace-folder"] if replace_folder else []
    given = [text for option, value in options.items() if value is not None for text in (option, value)]
    return ["push", str(folder), repo, *flags, *given]


def retry_command(arguments: list[str]) -> str:
    """A command of `push_arguments`, to paste into a shell."""
    return shlex.join(["meshadapt", *arguments])
