"""The command line of `rollstream replay`, `export` and `import`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable

WithFile = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""Makes the parser of a subcommand that reads a run's file."""


def add_commands(with_file: WithFile) -> None:
    replay = with_file("replay", _replay, "train or dump steps of a run again, from Redis or its spill")
    _add_range(replay)
    how = replay.add_mutually_exclusive_group(required=True)
    how.add_argument("--train", action="store_true", help="train them again from the checkpoint before, and compare the weights with the run's")
    how.add_argument("--out", metavar="WHERE", help="write them into a recording at this folder or URL")
    replay.add_argument("--from-step", type=int, metavar="N", help="with --train: begin with the registered checkpoint of step N instead")
    replay.add_argument("--dir", metavar="FOLDER", help="with --train: where metrics.jsonl and checkpoints go (default: replay-A-B in run.dir)")
    export = with_file("export", _export, "write groups into a Parquet or JSONL file")
    _add_range(export)
    export.add_argument("--buffered", action="store_true", help="the groups that are READY now, instead of journalled steps; they stay where they are")
    export.add_argument("--out", required=True, metavar="FILE", help="ends in .parquet or .jsonl")
    importing = with_file("import", _import, "put the groups of an exported file into a run, as a producer would")
    importing.add_argument("file", metavar="FILE", help="made by `rollstream export`")
    importing.add_argument(
        "--as-version", metavar="V", help="train them as written by this version (1:0, or newest); keep: versions of another run name the same weights here"
    )


def _add_range(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="A:B", help="both ends included; A: and :B are open, a single number is one step (default: all that are held)")
    which.add_argument("--versions", metavar="A:B", help="the steps that trained policies vA to vB: step s trains v(s-1)")
    parser.add_argument("--since", metavar="TIME", help="trained then or later: 2026-11-30T12:00, or Unix seconds")
    parser.add_argument("--until", metavar="TIME", help="trained then or earlier")


def _replay(options: argparse.Namespace) -> int:
    from deploy.replay import replay

    return replay(options)


def _export(options: argparse.Namespace) -> int:
    from deploy.replay import export

    return export(options)


def _import(options: argparse.Namespace) -> int:
    from deploy.replay import import_file

    return import_file(options)
