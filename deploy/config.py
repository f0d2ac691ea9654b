"""The whole configuration of a run: what `rollstream up` and `rollstream config check` validate, and the [http] section."""

from __future__ import annotations

import os
import socket

import xxhash
from pydantic import Field, model_validator

from buffer.config import BufferConfig
from consumer.config import CheckpointConfig, StopConfig, TrainerConfig
from consumer.critic.config import CriticConfig
from consumer.losses.config import LossConfig
from consumer.megatron.config import MegatronConfig
from consumer.trackers.config import TrackersConfig
from deploy.redis_server import socket_path
from producer.config import EvalConfig, ProducerConfig, RewardConfig
from producer.engine.config import EngineConfig
from producer.teacher.config import TeacherConfig
from protocol.config import DataConfig, ModelConfig, PlacementConfig, RayConfig, RedisConfig, RolloutConfig, RunConfig, Section, Tree
from protocol.errors import ConfigError
from weightsync.config import WeightsConfig
from weightsync.lora import LoraConfig

LAST_PORT = 65535


class HttpConfig(Section):
    host: str = Field("127.0.0.1", description="Address the HTTP service listens on; 0.0.0.0: every interface.")
    port: int = Field(8765, ge=0, le=LAST_PORT, description="Port of the HTTP service. 0: no service inside `rollstream up`.")


class ReaderConfig(Tree):
    """What a process needs that only looks at a run."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    weights: WeightsConfig = WeightsConfig()
    http: HttpConfig = HttpConfig()


class UpConfig(Tree):
    """Every section."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    teacher: TeacherConfig = TeacherConfig()
    eval: EvalConfig = EvalConfig()
    buffer: BufferConfig = BufferConfig()
    weights: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    producer: ProducerConfig = ProducerConfig()
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig = LoraConfig()
    megatron: MegatronConfig = MegatronConfig()
    trackers: TrackersConfig = TrackersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    http: HttpConfig = HttpConfig()
    placement: PlacementConfig = PlacementConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _ports_fit(self) -> UpConfig:
        port, count, evals = self.engine.port, self.engine.count, self.eval.engines
        if port and port + count + evals - 1 > LAST_PORT:
            raise ValueError(
                f"engine.port {port} leaves no room for {count} engines and the {evals} of eval.engines, which take the ports after them: lower it, or use 0 "
                "for free ports"
            )
        return self

    @property
    def digest(self) -> str:
        """Equal for equal settings, wherever they came from."""
        return xxhash.xxh3_128_hexdigest(self.model_dump_json().encode())


def reader_url(run: RunConfig, redis: RedisConfig) -> str:
    """Where a process that only looks finds the run: `redis.url`, or the server that `up` started in the run's folder.

    Raises: `ConfigError` if there is neither.
    """
    if redis.url:
        return redis.url
    path = socket_path(run.folder / "redis")
    if path.exists():
        return f"unix://{path}"
    if (run.folder / "summary.json").exists():
        raise ConfigError(
            f"run {run.name!r} has ended, and its Redis with it: see {run.folder / 'summary.json'}; to look into it or replay it, leave `rollstream redis "
            f"--dir {run.folder / 'redis'}` running meanwhile; `rollstream up --resume` goes on with it"
        )
    raise ConfigError(f"redis.url is empty and no server of `rollstream up` runs for {run.folder}: start the run, or set redis.url")


def bind(http: HttpConfig) -> socket.socket | None:
    """The listening socket of the HTTP service, taken before anything else starts; None if there is to be none.

    Raises: `ConfigError` if the port is taken or the address is not this machine's.
    """
    if not http.port:
        return None
    try:
        return listen(http.host, http.port)
    except OSError as problem:
        raise ConfigError(
            f"http.port {http.port}: cannot listen on {http.host}:{http.port} ({os.strerror(problem.errno) if problem.errno else problem}); "
            "choose another http.port, 0 for no service, or stop what listens there"
        ) from problem


def check_ports(engine: EngineConfig, *, evals: int = 0) -> None:
    """Whether the ports of the engines are free now, and of the `evals` of the evaluation, which come after them.

    Raises: `ConfigError` naming the one that is not.
    """
    for index in range(engine.count + evals if engine.port else 0):
        try:
            listen(engine.host, engine.port + index).close()
        except OSError as problem:
            raise ConfigError(
                f"engine.port {engine.port}: engine {index} cannot listen on {engine.host}:{engine.port + index} "
                f"({os.strerror(problem.errno) if problem.errno else problem}); choose another engine.port, 0 for free ones, or stop what listens there"
            ) from problem


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)
