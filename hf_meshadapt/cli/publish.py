"""`meshadapt push` and `meshadapt card`."""

from __future__ import annotations

from pathlib import Path

from .options import add_command, existing_folder


def add_commands(commands) -> None:
    push = add_command(
        commands,
        "push",
        run_push,
        "upload a saved model or checkpoint and its card to the Hugging Face Hub",
        "meshadapt push runs/gsm8k me/llama-gsm8k --private",
    )
    push.add_argument("folder", type=Path, metavar="DIR", help="folder of a saved model")
    push.add_argument("repo", metavar="REPO", help="name on the Hub: `name` or `owner/name`; made if it is missing")
    visibility = push.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", default=None, help="make the repository private")
    visibility.add_argument("--public", action="store_false", dest="private", help="make the repository public")
    push.add_argument("--revision", help="branch to upload to; made if it is missing (default: main)")
    push.add_argument("--message", default="Upload model", help="message of the commit (default: %(default)s)")
    push.add_argument(
        "--path-in-repo",
        metavar="PATH",
        help="folder in the repository (default: its root); of what is in it only what the new files replace is deleted",
    )
    push.add_argument(
        "--replace-folder", action="store_true", help="delete everything else in the folder that --path-in-repo names"
    )
    push.add_argument("--with-state", action="store_true", help="upload what resuming a checkpoint needs, too")
    push.add_argument(
        "--create-only", action="store_true", help="make the repository, upload nothing: tests the token"
    )

    card = add_command(
        commands,
        "card",
        run_card,
        "write the model card (README.md) of a saved model, from what its run recorded",
        "meshadapt card runs/gsm8k --license mit --language en --dataset openai/gsm8k",
    )
    card.add_argument("folder", type=existing_folder, metavar="DIR", help="folder of a saved model")
    card.add_argument("--name", dest="model_name", help="title of the card")
    card.add_argument("--repo", dest="repo_id", help="name on the Hub, for the code that loads the model")
    card.add_argument("--base-model", help="the Hub's name of the model that was adapted")
    card.add_argument("--dataset", dest="datasets", action="append", help="the Hub's name of a data set; repeatable")
    card.add_argument("--language", action="append", help="ISO 639 code, for example en; repeatable")
    card.add_argument("--license", help="the Hub's name of the licence, for example apache-2.0")
    card.add_argument("--license-name", help="with --license other: its name")
    card.add_argument("--license-link", help="with --license other: where it can be read")
    card.add_argument("--pipeline-tag", help="the Hub's name of what the model does (default: by its architecture)")
    card.add_argument("--tag", dest="tags", action="append", help="a tag; repeatable")


def run_push(args) -> int:
    from ..hub import limit_waits, make_repo, push

    limit_waits()
    if args.create_only:
        print(make_repo(args.repo, args.private))
        return 0
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder} is not a folder: give the folder of a saved model")
    url = push(
        args.folder,
        args.repo,
        private=args.private,
        revision=args.revision,
        message=args.message,
        path_in_repo=args.path_in_repo,
        with_state=args.with_state,
        replace_folder=args.replace_folder,
    )
    print(f"uploaded {args.folder} to {url}")
    return 0


def run_card(args) -> int:
    from ..card import ADDABLE, write_card

    print(write_card(args.folder, **{name: getattr(args, name) for name in ADDABLE if name in args}))
    return 0
