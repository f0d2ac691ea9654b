"""All that can be known wrong before a process starts. Opens no socket, writes nothing.

The rules are the daemons' own: each checks its part again when it starts; here they meet, so that `rollstream up` fails before it has made anything.
"""

from __future__ import annotations

from deploy.config import UpConfig
from protocol.keys import Keys


def check_all(config: UpConfig) -> None:
    """Cross-field rules, model folder, every row of the data set and of the held-out set, reward function.

    Raises: `ConfigError` naming file, line or key and what to do.
    """
    from consumer.config import TrainerDaemonConfig
    from producer.config import ProducerDaemonConfig
    from producer.main import prepare

    Keys(config.run.name)
    TrainerDaemonConfig(**{name: getattr(config, name) for name in TrainerDaemonConfig.model_fields}).check()
    prepare(ProducerDaemonConfig(**{name: getattr(config, name) for name in ProducerDaemonConfig.model_fields}))
