"""The command line of `rollstream runs`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`runs list | delete | fork`."""
    runs = commands.add_parser(
        "runs", help="all runs of a Redis: list, delete, fork", description="All runs of one Redis. Separate policies are separate runs."
    )
    actions = runs.add_subparsers(title="actions", metavar="ACTION", required=True)

    listed = _action(actions, "list", _list, "every run with its state, who is alive in it, and when it last moved")
    listed.add_argument("--json", action="store_true", help="for programs")

    delete = _action(actions, "delete", _delete, "delete a run from Redis")
    delete.add_argument("run", metavar="NAME", help="the run to delete")
    delete.add_argument("--force", action="store_true", help="also while something is alive in it")
    delete.add_argument("--files", action="store_true", help="its published weights, spill and blobs too; never its own folder with checkpoints and records")

    fork = _action(actions, "fork", _fork, "a new run that goes on from a checkpoint of another, which is left as it is")
    fork.add_argument("run", metavar="FROM", help="the run to go on from; it may be live")
    fork.add_argument("to", metavar="TO", help="name of the new run")
    fork.add_argument("--step", type=int, metavar="N", help="its registered checkpoint of step N (default: the newest)")
    fork.add_argument("--from-dir", metavar="FOLDER", help="folder of FROM (default: run.dir of FILE if FILE is of FROM, else runs/FROM)")
    fork.add_argument("--dir", metavar="FOLDER", help="folder of TO, its run.dir (default: beside the folder of FROM)")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, handler: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-c", "--config", metavar="FILE", help="a run's TOML file: its Redis is meant")
    where.add_argument("--redis", metavar="URL", help="the Redis, by its URL")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key of FILE; may be repeated")
    parser.set_defaults(handler=handler)
    return parser


def _list(options: argparse.Namespace) -> int:
    from deploy.runs import list_runs

    return list_runs(options)


def _delete(options: argparse.Namespace) -> int:
    from deploy.runs import delete_run

    return delete_run(options)


def _fork(options: argparse.Namespace) -> int:
    from deploy.fork import fork_run

    return fork_run(options)
