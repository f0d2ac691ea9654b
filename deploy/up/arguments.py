"""The options of `rollstream up`, apart from what they start, so that reading a command line imports nothing heavy."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--new", action="store_true", help="create the run; refused where there is one")
    mode.add_argument("--resume", action="store_true", help="go on with the run in this folder, and with its processes that are alive and healthy")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="on a Ray cluster: auto, or host:port of its head; default: ray.address, else auto. The run goes on without this command, and --resume finds it",
    )
    parser.add_argument("--no-live", action="store_true", help="plain lines instead of the live view")
