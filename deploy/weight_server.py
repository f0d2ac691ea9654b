"""`rollstream weight-server`: holds versions on a device and sends them to engines, for `weights.transport` gloo, nccl and ipc."""

from __future__ import annotations

import argparse

from protocol.config import load
from protocol.daemon import run_daemon
from weightsync.roles import WEIGHT_SERVER
from weightsync.server.serve import WeightServerConfig, run_weight_server

__all__ = ["WeightServerConfig", "run_weight_server", "serve"]


def serve(options: argparse.Namespace) -> int:
    """Exit codes: 0 ended in good order, 1 fault, 2 bad configuration, 75 try again."""
    config = load(WeightServerConfig, options.config, sets=options.set)
    return run_daemon(WEIGHT_SERVER, lambda stop: run_weight_server(config, stop, device=options.device, host=options.host, port=options.port))
