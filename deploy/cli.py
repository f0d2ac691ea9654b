"""The `rollstream` command. Nothing heavy is imported before the subcommand that needs it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from deploy.letters_arguments import add_commands as add_letter_commands
from deploy.replay_arguments import add_commands as add_replay_commands
from deploy.runs_arguments import add_commands as add_run_commands
from protocol.errors import EXIT_FAULT, ConfigError, RollstreamError

Handler = Callable[[argparse.Namespace], int]
_BENCHES = ("buffer", "weights")
_LAST_PORT = 65535


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the subcommand: 0 done or drained, 1 fault, 2 bad configuration or command line, 3 replaced, 75 try again."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = _parser(demo_wanted="demo" in words[:1]).parse_args(words)
    handler: Handler = options.handler
    try:
        return handler(options)
    except RollstreamError as problem:
        sys.stderr.write(f"rollstream: {problem}\n")
        return problem.exit_code
    except KeyboardInterrupt:
        return EXIT_FAULT
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe left; nothing more can be said to it
        return EXIT_FAULT


def _parser(*, demo_wanted: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollstream", description="Fully asynchronous RL post-training.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    from deploy.up import arguments as up_arguments

    up = _with_file(commands, "up", _up, "run everything of a run on this machine, to its end")
    up_arguments.add_arguments(up)
    up.description = (
        "Run Redis, trainer, engines, producers and the HTTP service of a run on this machine, to its end. Ctrl-C stops it in good order at a step, and "
        "--resume goes on from there; a second Ctrl-C ends it at once. Exit codes: 0 drained, 1 fault, 2 bad configuration, 75 Redis did not come up."
    )
    scale = _with_file(commands, "scale", _scale, "more or fewer producers or engines, while a run goes on")
    scale.add_argument("what", choices=("producers", "engines"), help="of which")
    scale.add_argument("count", type=_index, metavar="N", help="how many there are to be")
    scale.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help="the run's Ray cluster; default: ray.address, else auto")
    scale.description = (
        "Have N producers or engines, of a run that `rollstream up` runs on this machine or on Ray; engines of an evaluation's own are not counted. Returns "
        "once those that were added have announced themselves (on Ray: have a place) and those that were too many have left, in good order. Exit codes: 0 "
        "done, 1 who was added cannot run, 2 bad configuration or no `up`, 75 not all there in time (placement.wait_seconds)."
    )
    engine = _with_file(commands, "engine", _engine, "one engine host: an engine with its reconciler")
    engine.add_argument("--index", type=_index, default=0, metavar="I", help="which of the run's engines this is: 0, 1, …")
    engine.add_argument("--node-rank", type=_index, default=0, metavar="K", help="of an engine over several machines (engine.nodes): 1, 2, … on the others")
    engine.description = (
        "The host of one engine: it starts or follows the engine, brings it every version and watches it. With --node-rank K: the part of the engine on one "
        "more machine, started with each start of its node 0. Exit codes: 0 the run is over or it was stopped, 1 fault, 2 bad configuration, 3 another "
        "process took its place, 75 Redis does not answer."
    )
    _add_carriers(commands)
    _add_eval(commands)
    _add_export_model(commands)
    serve = _with_file(commands, "serve", _serve, "the HTTP service")
    serve.description = (
        "Answer /metrics (Prometheus), /v1/... (JSON), /healthz and /readyz about a run from its Redis, at http.host and http.port (8765), and print where. It "
        "outlives the run; Ctrl-C ends it. Exit codes: 0 ended so, 1 fault, 2 bad configuration."
    )
    redis = commands.add_parser("redis", help="an embedded Redis by hand; prints its URL", description="An embedded Redis server, until Ctrl-C.")
    redis.add_argument("--dir", default="runs/redis", metavar="FOLDER", help="where its data lie (default: runs/redis)")
    redis.add_argument("--appendfsync", choices=("always", "everysec", "no"), default="everysec", help="fsync policy of its log")
    redis.set_defaults(handler=_redis)
    _add_looks(commands)
    add_replay_commands(partial(_with_file, commands))
    add_run_commands(commands)
    add_letter_commands(commands, _with_file)
    bench = commands.add_parser(
        "bench",
        help="measure, from a checkout",
        description="A benchmark of the checkout this is run in, with the Python this runs on; `make bench-buffer` and `make bench-weights` install what each "
        "needs.",
    )
    bench.add_argument("what", choices=_BENCHES, help="which")
    bench.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own options; try --help")
    bench.set_defaults(handler=_bench)
    config = commands.add_parser("config", help="check or show a configuration", description="The configuration of a run.")
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    _with_file(actions, "check", _config_check, "validate every section and the files they name")
    show = _with_file(actions, "show", _config_show, "print every key with its value")
    show.add_argument("--json", action="store_true", help="for programs")
    demo = commands.add_parser("demo", help="the main job end to end on embedded defaults", description="Trains a tiny model through every part of rollstream.")
    if demo_wanted:
        from deploy.demo.main import DESCRIPTION
        from deploy.demo.main import add_arguments as add_demo_arguments

        add_demo_arguments(demo)
        demo.description = DESCRIPTION
    demo.set_defaults(handler=_demo)
    return parser


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _with_file(commands, "eval", _eval, "evaluate a saved model, with no run around it")
    parser.add_argument("--checkpoint", default="", metavar="WHICH", help="a step, a version such as 2:120, latest, or a folder; default: model.path as it is")
    parser.add_argument("--out", default="", metavar="FILE", help="where the results go as JSON (default: evals/ in run.dir)")
    parser.add_argument("--responses", default="", metavar="FILE", help="also every response, as JSON lines")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.description = (
        "Load a checkpoint, a published version or a model folder into an engine of its own and evaluate the held-out sets of [eval] greedily, as a run does. "
        "Needs no trainer, no producer and no Redis; where the run's Redis answers, its audit gets the results. Exit codes: 0 evaluated, 1 fault, stopped "
        "or a set without an answer, 2 bad configuration or no such checkpoint, 75 a store or an engine does not answer."
    )


def _add_export_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _with_file(commands, "export-model", _export_model, "a saved model as one Hugging Face model folder")
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="a step, a version such as 2:120, latest, or a folder (default: latest)")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--dtype", default="", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as they were trained)")
    parser.description = (
        "Write the weights of a checkpoint, of whatever number of ranks, or of a published version into a folder that transformers and SGLang load, after "
        "checking them. Needs no Redis. Exit codes: 0 written, 1 fault, 2 bad configuration, no such checkpoint or no room, 75 a store does not answer."
    )


def _add_looks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What only looks at a run."""
    for name, text in (
        ("status", "a run at a glance"),
        ("groups", "groups by state"),
        ("engines", "engines and their versions"),
        ("weights", "the weight channel"),
    ):
        look = _with_file(commands, name, _look, text)
        look.add_argument("--json", action="store_true", help="for programs")
        look.set_defaults(what=name, action=None)
        if name == "weights":
            look.add_argument("action", nargs="?", choices=("check",), help="check: ask every engine for its checksums, and compare")
            look.description = (
                "The weight channel: which version is newest, who carries it, what each engine serves and by which way. With check, every engine is asked for "
                "checksums of what it holds, one engine at a time, which takes each of them seconds; engines of one version must agree, and an embedded one "
                "with what was published. Exit codes of check: 0 all do, 1 one does not or cannot be asked, or there is none."
            )
    summary = _with_file(commands, "summary", _summary, "write summary.json of a run that was started by hand, and print it")
    summary.add_argument("--json", action="store_true", help="for programs")
    bias = _with_file(commands, "bias", _bias, "what became of every sampled token, by length and age")
    bias.add_argument("--json", action="store_true", help="for programs")


def _add_carriers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Who brings versions to engines, where these do not load them from the store themselves."""
    relay = _with_file(commands, "relay", _relay, "whole versions in this machine's memory, for all of its engines")
    relay.description = (
        "Follow the run's newest weights and keep them whole in a folder of this machine, made from what changed (weights.transport = delta) or fetched from a "
        "store behind a URL; one on each machine with engines. Without one, or when it dies, an engine host does the same for itself."
    )
    server = _with_file(commands, "weight-server", _weight_server, "send versions to engines by collective or by handle")
    server.add_argument("--device", default="", metavar="DEVICE", help="torch's spelling: cpu, cuda:0, …; default: cpu for gloo, else cuda:0")
    server.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on, which engines are told (default: 127.0.0.1)")
    server.add_argument("--port", type=_port, default=0, metavar="PORT", help="port to listen on; 0, the default: a free one")
    server.description = (
        "Stage the run's newest weights on a device and send them to each engine by itself: gloo or nccl from anywhere, ipc on the engine's own GPU "
        "(weights.transport). Engines take versions from the store while there is none."
    )


def _with_file(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, handler: Handler, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")
    parser.set_defaults(handler=handler)
    return parser


class _Version(argparse.Action):
    """Looked up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("rollstream")
        except PackageNotFoundError:
            found = "(not installed: run from its sources)"
        sys.stdout.write(f"rollstream {found}\n")
        parser.exit()


def _index(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 to {_LAST_PORT}")
    return value


# handlers: imports inside, so that `--help` and a typing error cost nothing ---------------------------------------------------


def _up(options: argparse.Namespace) -> int:
    from deploy.config import UpConfig
    from protocol.config import load

    if options.ray is None and not load(UpConfig, options.config, sets=options.set).ray.address:
        from deploy.up.main import run

        return run(options)
    from deploy.ray.main import run as run_on_ray

    return run_on_ray(options)


def _scale(options: argparse.Namespace) -> int:
    from deploy.scale import scale

    return scale(options)


def _engine(options: argparse.Namespace) -> int:
    from producer.engine.host import EngineHostConfig, run_host
    from producer.engine.node import run_node
    from protocol.config import load
    from protocol.daemon import run_daemon

    config = load(EngineHostConfig, options.config, sets=options.set)
    if options.node_rank:
        return run_daemon(f"engine-{options.index}-node-{options.node_rank}", lambda stop: run_node(config, options.index, options.node_rank, stop))
    return run_daemon(f"engine-{options.index}", lambda stop: run_host(config, options.index, stop))


def _eval(options: argparse.Namespace) -> int:
    from deploy.evaluate import evaluate

    return evaluate(options)


def _export_model(options: argparse.Namespace) -> int:
    from deploy.export_model import export_model

    return export_model(options)


def _relay(options: argparse.Namespace) -> int:
    from deploy.relay import RelayConfig, run_relay
    from protocol.config import load
    from protocol.daemon import run_daemon

    config = load(RelayConfig, options.config, sets=options.set)
    return run_daemon("rollstream relay", lambda stop: run_relay(config, stop))


def _weight_server(options: argparse.Namespace) -> int:
    from deploy.weight_server import serve

    return serve(options)


def _serve(options: argparse.Namespace) -> int:
    from deploy.config import ReaderConfig
    from deploy.http.app import serve
    from protocol.config import load
    from protocol.daemon import run_daemon

    config = load(ReaderConfig, options.config, sets=options.set)
    return run_daemon("rollstream serve", lambda stop: serve(config, stop))


def _redis(options: argparse.Namespace) -> int:
    from deploy.redis_server import run_server
    from protocol.daemon import run_daemon

    def announce(url: str) -> None:
        sys.stdout.write(f'{url}\nuse it with: --set redis.url={url}\nor in the file: [redis] url = "{url}"\n')
        sys.stdout.flush()

    return run_daemon("rollstream redis", lambda stop: run_server(Path(options.dir), stop, announce, appendfsync=options.appendfsync))


def _look(options: argparse.Namespace) -> int:
    if options.action == "check":
        from deploy.weights_check import check

        return check(options.config, options.set, as_json=options.json)
    from deploy.look import look

    return look(options.what, options.config, options.set, as_json=options.json)


def _summary(options: argparse.Namespace) -> int:
    from deploy.look import summarise

    return summarise(options.config, options.set, as_json=options.json)


def _bias(options: argparse.Namespace) -> int:
    from deploy.look import bias

    return bias(options.config, options.set, as_json=options.json)


def _bench(options: argparse.Namespace) -> int:
    import subprocess

    if not Path("benchmarks", options.what, "__main__.py").is_file():
        raise ConfigError(f"rollstream bench {options.what}: benchmarks are not part of the package; run it in the root of a checkout of rollstream")
    return subprocess.run([sys.executable, "-m", f"benchmarks.{options.what}", *options.rest], check=False).returncode


def _config_check(options: argparse.Namespace) -> int:
    from deploy.checks import check_all
    from deploy.config import UpConfig
    from protocol.config import load

    check_all(load(UpConfig, options.config, sets=options.set))
    sys.stdout.write(f"{options.config}: good\n")
    return 0


def _config_show(options: argparse.Namespace) -> int:
    from deploy.config import UpConfig
    from deploy.look import show_config
    from protocol.config import load

    sys.stdout.write(show_config(load(UpConfig, options.config, sets=options.set), as_json=options.json))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from deploy.demo.main import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
