"""Versions that are adapters, from the pointer to an embedded engine by its reconciler."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from producer.engine.client import EngineClient, Sampling
from producer.engine.desk import Desk
from producer.engine.embedded.lora_rows import LoraLimits
from producer.engine.embedded.model import load
from producer.engine.embedded.server import EmbeddedEngine
from protocol.config import PlacementConfig
from protocol.errors import ConfigError, ManifestError
from protocol.messages import EngineState
from protocol.versions import Version
from tests.producer.engine.conftest import write_model
from weightsync.adapter_config import check_adapters
from weightsync.adapter_store import AdapterStore
from weightsync.config import WeightsConfig
from weightsync.control import EngineControl
from weightsync.lora import PEFT_PREFIX, LoraConfig, name_of, prefix_of
from weightsync.reconciler import Reconciler
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore
from weightsync.transports.choose import make_transports

PREFIX = prefix_of("r")
LORA = LoraConfig(rank=2, alpha=2.0, publish="adapter", keep_loaded=2, target_modules=("q_proj", "down_proj"))
PROMPT = [1, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", seed=1)


class Line:
    """The run's versions and one engine."""

    def __init__(self, rig: Any, folder: Path, model: Path) -> None:
        self.rig, self.model, self.store = rig, model, AdapterStore(folder / "adapters", LORA.settings(str(model)))

    async def publish(self, incarnation: int, n: int, *, rank: int = LORA.rank) -> None:
        await self.rig.attach(incarnation, n)
        rng, tensors = np.random.default_rng(100 * incarnation + n), {}
        store = self.store if rank == LORA.rank else AdapterStore(self.store.folder, LORA.model_copy(update={"rank": rank}).settings(""))
        with open_tensors(self.model / "model.safetensors") as base:
            for name, tensor in base.items():
                if name.split(".")[-2] in LORA.target_modules:
                    for side, shape in (("A", (rank, tensor.shape[1])), ("B", (tensor.shape[0], rank))):
                        data = rng.standard_normal(shape).astype("<f4").tobytes()
                        tensors[f"{PEFT_PREFIX}{name.removesuffix('.weight')}.lora_{side}.weight"] = TensorBytes(dtype="F32", shape=shape, data=data)
        manifest = await asyncio.to_thread(store.write, Snapshot(version=Version(incarnation, n), tensors=tensors))
        await self.rig.channel.publish(manifest, incarnation)

    @contextlib.asynccontextmanager
    async def engine(self, lora: LoraConfig | None = LORA, *, pace_s: float = 0.0) -> AsyncIterator[EmbeddedEngine]:
        limits = None if lora is None else LoraLimits(max_rank=lora.rank, targets=lora.target_modules)
        served = load(str(self.model), slots=4, max_length=256, lora_targets=() if lora is None else lora.target_modules)
        async with EmbeddedEngine(served, weight_version="boot:b1", seed=1, lora=limits, pace_s=pace_s) as engine:
            await self.rig.registry.beat(self.rig.status("e0", "b1", engine.url), ttl_s=600)
            yield engine

    @contextlib.asynccontextmanager
    async def followed(self, engine: EmbeddedEngine, store: Any = None) -> AsyncIterator[asyncio.Task[None]]:
        rig, config = self.rig, WeightsConfig(apply_deadline_s=60.0)
        control = Desk(rig.session).reconciling(engine.url, adapters=PREFIX)
        ways = make_transports(
            config,
            store=store or self.store,
            control=control,
            session=rig.session,
            client=rig.redis,
            keys=rig.keys,
            engine_id="e0",  # type: ignore[arg-type]
            boot_nonce="b1",
            folder=self.store.folder / "relay",
            lora=LORA,
        )
        reconciler = Reconciler(
            "e0",  # type: ignore[arg-type]
            "b1",
            control=control,
            channel=rig.channel,
            registry=rig.registry,
            transports=ways,
            config=config,
            wakeups=rig.wakes,
        )
        async with rig.running(reconciler) as task:
            yield task

    async def loaded(self, engine: EmbeddedEngine) -> set[str]:
        return set(await EngineControl(self.rig.session, engine.url).adapters())

    async def unfit(self) -> str:
        found = await self.rig.until(lambda all_: "e0" in all_ and all_["e0"].state is EngineState.UNFIT)
        return str(found["e0"].reason)


@pytest.fixture
def line(rig: Any, tmp_path: Path, model: Path) -> Line:
    return Line(rig, tmp_path, model)


def names(*versions: tuple[int, int]) -> set[str]:
    return {name_of(PREFIX, Version(*version)) for version in versions}


async def test_a_request_ends_on_the_version_it_began_with_while_newer_ones_are_acked_without_a_pause(line: Line):
    client = EngineClient(line.rig.session, stream=True)

    async def ask(engine: EmbeddedEngine, version: Version, tokens: int) -> Any:
        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        return await client.attempt(
            engine.url, PROMPT, sampling=sampling, rid=f"{version}-{tokens}", deadline_s=60, assumed=version, adapter=name_of(PREFIX, version)
        )

    await line.publish(1, 0)
    async with line.engine(pace_s=0.5) as engine, line.followed(engine):  # 150 tokens take longer than two updates, be they slow
        await line.rig.serves("e0", "1:0")
        old = asyncio.create_task(ask(engine, Version(1, 0), 150))
        for n in (1, 2):
            await line.publish(1, n)
            await line.rig.serves("e0", f"1:{n}")
        assert not old.done()
        engine._worker._pace_s = 0.0
        new = await ask(engine, Version(1, 2), 3)
        assert [str(span.version) for span in new.piece.spans] == ["1:2"]
        piece = (await old).piece
        assert (len(piece.output_ids), [str(span.version) for span in piece.spans]) == (150, ["1:0"])
        await line.publish(1, 3)
        await line.rig.serves("e0", "1:3")
        async with asyncio.timeout(100):
            while await line.loaded(engine) != names((1, 2), (1, 3)):
                await asyncio.sleep(0.02)
    assert await line.rig.events("unfit") == []
    applied = await line.rig.events("applied")
    assert [(event["transport"], event["pause_s"]) for event in applied] == [("adapter", 0)] * 4


async def test_what_a_dead_incarnation_or_a_dead_reconciler_left_is_gone_at_the_join(line: Line):
    await line.publish(1, 4)
    async with line.engine() as engine:
        async with line.followed(engine):
            await line.rig.serves("e0", "1:4")
        plain = EngineControl(line.rig.session, engine.url)
        await plain.load_adapter("rollstream-another-run-1-1", str(line.store.path(Version(1, 4))), deadline_s=60)
        await line.publish(2, 3)
        path = str(line.store.path(Version(2, 3)))
        await plain.load_adapter(name_of(PREFIX, Version(2, 3)), path, deadline_s=60)  # and died before it acked
        async with line.followed(engine):
            await line.rig.serves("e0", "2:3")
            assert await line.loaded(engine) == names((2, 3))


@pytest.mark.parametrize(("engine_has", "words"), [(None, "--enable-lora"), (LORA.model_copy(update={"rank": 1}), "--max-lora-rank 2")])
async def test_an_engine_that_cannot_take_adapters_is_unfit_and_says_how_to_start_it(line: Line, engine_has: LoraConfig | None, words: str):
    await line.publish(1, 0)
    async with line.engine(engine_has) as engine, line.followed(engine):
        reason = await line.unfit()
        assert "apply 1:0" in reason
        assert words in reason
        assert "--lora-target-modules q_proj down_proj" in reason


async def test_an_engine_that_refuses_a_version_is_off_the_routes_until_one_fits(line: Line):
    await line.publish(1, 0)
    async with line.engine() as engine, line.followed(engine):
        await line.rig.serves("e0", "1:0")
        await line.publish(1, 1, rank=8)
        assert "rank 8 is incompatible" in await line.unfit()
        await line.publish(1, 2)
        await line.rig.serves("e0", "1:2")


async def test_other_weights_under_the_adapter_are_noticed_with_the_next_version(line: Line):
    await line.publish(1, 0)
    async with line.engine() as engine, line.followed(engine):
        await line.rig.serves("e0", "1:0")
        await EngineControl(line.rig.session, engine.url).update_from_disk(str(line.model), "somebody's", deadline_s=60)
        await line.publish(1, 1)
        assert "holds the weights somebody's, and adapters are of boot:b1: start it again" in await line.unfit()


async def test_hosts_and_trainers_that_disagree_on_the_section_are_told(line: Line, store: DirectoryStore):
    await line.publish(1, 0)
    manifest = await line.rig.channel.newest()
    with pytest.raises(ManifestError, match="this process takes full versions"):
        store.locate(manifest)
    whole = await asyncio.to_thread(store.write, line.rig.snapshot(1, 1))
    with pytest.raises(ManifestError, match=r"need the same \[lora\] section"):
        line.store.locate(whole)


def test_sections_that_do_not_go_together_are_refused():
    alone = PlacementConfig()
    for weights, placement, words in (
        (WeightsConfig(transport="delta"), alone, 'weights.transport = "store"'),
        (WeightsConfig(store="s3://bucket"), alone, "and a folder"),
        (WeightsConfig(), PlacementConfig(layout="colocated"), "colocated"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_adapters(LORA, weights, placement)
        check_adapters(LORA.model_copy(update={"publish": "merged"}), weights, placement)
    for wrong in ({"rank": 0}, {"target_modules": ["lm_head"]}, {"target_modules": []}, {"target_modules": ["a.b"]}, {"keep_loaded": 1}):
        with pytest.raises(ValueError, match=r"rank|lm_head|expected|keep_loaded"):
            LoraConfig(**({"rank": 4, "publish": "adapter"} | wrong))


@pytest.mark.parametrize("direct", [True, False])
def test_rows_of_a_batch_go_by_their_own_adapters_also_by_the_models_own_forward(model: Path, tmp_path: Path, direct: bool):
    """Against the model with the product added."""
    from producer.engine.embedded.lora_rows import Adapter

    served = load(str(model), slots=4, lora_targets=("q_proj", "down_proj"))
    assert served.direct is not None
    assert served.rows is not None
    if not direct:
        served.direct = None
        served.rows.hook()
    noise, made = torch.Generator().manual_seed(0), []
    for name in "ab":
        pairs = {
            own: tuple(torch.randn(shape, generator=noise) for shape in ((2, module.weight.shape[1]), (module.weight.shape[0], 2)))
            for module, own in served.rows.names().items()
        }
        made.append(Adapter(name=name, path="", scaling=0.5, pairs=pairs))  # type: ignore[arg-type]
    ids = torch.tensor([[1, 5, 6, 7]] * 3)
    wanted = []
    for adapter in (made[0], None, made[1]):
        plain = load(str(model), slots=1, lora_targets=("q_proj", "down_proj"))
        assert plain.rows is not None
        for module, own in plain.rows.names().items():
            if adapter is not None:
                module.weight.data += 0.5 * adapter.pairs[own][1] @ adapter.pairs[own][0]  # type: ignore[union-attr, operator]
        wanted.append(plain.logits(plain.prefill(0, ids[:1], torch.zeros(1, dtype=torch.long)))[0])
    served.adapt([made[0], None, made[1]])
    seen = served.logits(served.prefill(0, ids, torch.arange(3)))
    for row, logits in enumerate(wanted):
        torch.testing.assert_close(seen[row], logits, rtol=1e-3, atol=1e-3)
    assert (wanted[0] - wanted[1]).abs().max() > 0.1
