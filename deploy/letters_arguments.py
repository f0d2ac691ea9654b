"""The command line of `rollstream letters`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

WithFile = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""Makes the parser of an action that reads a run's file."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser], with_file: Callable[..., argparse.ArgumentParser]) -> None:
    """`letters list | show | requeue`."""
    letters = commands.add_parser(
        "letters",
        help="dead letters: groups that failed, or were stale, too often",
        description="Groups that were set aside because they failed, or were stale, too often, or whose payload was lost in a replay: the newest 10,000.",
    )
    actions: WithFile = partial(with_file, letters.add_subparsers(title="actions", metavar="ACTION", required=True))

    listed = actions("list", _list, "every dead letter in a line")
    _add_choice(listed)

    show = actions("show", _show, "dead letters in full")
    show.add_argument("seqs", nargs="+", type=int, metavar="SEQ", help="groups to show")
    show.add_argument("--json", action="store_true", help="for programs")

    requeue = actions("requeue", _requeue, "hand groups out again, their failures forgotten")
    requeue.add_argument("seqs", nargs="*", type=int, metavar="SEQ", help="groups to hand out again")
    requeue.add_argument("--all", action="store_true", help="every dead letter; with --reason, every one that died of it")
    _add_choice(requeue)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", choices=("failed", "stale", "payload_lost"), help="those that died of this")
    parser.add_argument("--json", action="store_true", help="for programs")


def _list(options: argparse.Namespace) -> int:
    from deploy.letters import list_letters

    return list_letters(options)


def _show(options: argparse.Namespace) -> int:
    from deploy.letters import show_letters

    return show_letters(options)


def _requeue(options: argparse.Namespace) -> int:
    from deploy.letters import requeue_letters

    return requeue_letters(options)
