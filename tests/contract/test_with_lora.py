"""Adapters beside each other on one engine: whose logprobs a request has, what an unload waits for, and what is refused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from producer.engine.client import EngineClient, Fault, Sampling
from producer.engine.desk import Desk
from producer.engine.external import without_adapters
from protocol.errors import ApplyFailed
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.adapter_control import AdapterControl
from weightsync.adapter_store import AdapterStore
from weightsync.lora import PEFT_PREFIX, LoraConfig, name_of, prefix_of
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.transports.adapter import AdapterTransport

from .conftest import Models, Serve
from .engine import PROMPT, Engine, asking
from .spans import FAR, logged

RUN = prefix_of("contract")
TOLERANCE = 2e-4
TOKENS = 24
BUSY = {"sglang": 90, "embedded": 500}
"""Tokens of a request that is under way while something happens: real servers write some ten a second with adapters on a CPU, the embedded engine hundreds."""
ENDED = {"sglang": 400, "embedded": 1900}
"""Of one that is ended before it is over."""


@dataclass(frozen=True)
class Version_:  # noqa: N801 - a version of the run, as a test has it
    name: str
    path: str
    model: Any
    """The base with the product added."""

    def written(self, output: list[int], prompt: list[int] = PROMPT) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([prompt + output])).logits[0].float()
        return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]


class Run:
    """Versions of a run, by number, in a store."""

    def __init__(self, folder: Path, base: Path, lora: LoraConfig) -> None:
        self.store, self.base, self.lora = AdapterStore(folder, lora.settings(str(base))), base, lora
        self._made: dict[int, tuple[Manifest, Version_]] = {}

    def manifest(self, n: int) -> Manifest:
        return self._of(n)[0]

    def version(self, n: int) -> Version_:
        return self._of(n)[1]

    def _of(self, n: int) -> tuple[Manifest, Version_]:
        if n not in self._made:
            model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()
            noise, tensors = torch.Generator().manual_seed(100 + n), {}
            for name, module in model.named_modules():
                if name.rpartition(".")[2] in self.lora.target_modules:
                    a, b = (
                        torch.randn(shape, generator=noise) * 0.3 for shape in ((self.lora.rank, module.in_features), (module.out_features, self.lora.rank))
                    )
                    for side, matrix in (("A", a), ("B", b)):
                        data = matrix.numpy().tobytes()
                        tensors[f"{PEFT_PREFIX}{name}.lora_{side}.weight"] = TensorBytes(dtype="F32", shape=tuple(matrix.shape), data=data)
                    module.weight.data += self.lora.scaling * (b @ a)
            manifest = self.store.write(Snapshot(version=Version(1, n), tensors=tensors))
            self._made[n] = (manifest, Version_(name_of(RUN, Version(1, n)), str(self.store.locate(manifest)), model))
        return self._made[n]


@pytest_asyncio.fixture
async def engine(adapted: Serve) -> AsyncIterator[Engine]:
    async with adapted() as served:
        yield served


@pytest.fixture
def run(tmp_path: Path, models: Models, engine: Engine) -> Run:
    return Run(tmp_path / "store", models.a, engine.setup.lora.model_copy(update={"alpha": 1.0, "use_rslora": True}))


async def loaded(engine: Engine, version: Version_) -> Version_:
    await engine.control.load_adapter(version.name, version.path, deadline_s=120)
    return version


def close(answer: dict[str, Any], version: Version_) -> bool:
    return bool((logged(answer) - version.written(answer["output_ids"])).abs().max() < TOLERANCE)


async def test_requests_on_two_adapters_and_on_none_share_a_batch_and_each_has_the_logprobs_of_its_own(engine: Engine, run: Run, models: Models):
    one, two = [await loaded(engine, run.version(n)) for n in (0, 1)]
    names = [one.name, None, two.name, one.name]
    answers = await asyncio.gather(*(engine.generate(asking(TOKENS, **({} if name is None else {"lora_path": name}))) for name in names))
    for answer, version in zip(answers, (one, None, two, one), strict=True):
        base = models.written(models.a, PROMPT, answer["output_ids"])
        own = base if version is None else version.written(answer["output_ids"])
        assert (logged(answer) - own).abs().max() < TOLERANCE
        assert version is None or (logged(answer) - base).abs().mean() > FAR
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {await engine.version()}, "versions said are those of the base"
    assert set(await engine.control.adapters()) == {one.name, two.name}


async def test_an_update_while_a_request_runs_leaves_it_on_its_own_and_the_old_goes_once_it_is_over(engine: Engine, run: Run, kind: str):
    old, new = run.version(0), run.version(1)
    await loaded(engine, old)
    async with engine.running(1, tokens=BUSY[kind], seen=3, lora_path=old.name) as (running,):
        await loaded(engine, new)
        dropping = asyncio.create_task(engine.control.unload_adapter(old.name, deadline_s=120))
        assert close(await engine.generate(asking(4, lora_path=new.name)), new)
        assert not dropping.done()
        assert close(await running.answer(), old)
        await dropping
    assert await engine.control.adapters() == (new.name,)


async def test_a_load_waits_for_an_unload_that_waits_and_ending_all_ends_the_wait(engine: Engine, run: Run, kind: str):
    """Why the reconciler unloads what is several versions old, and does not wait for long."""
    old, new = run.version(0), run.version(1)
    await loaded(engine, old)
    async with engine.running(1, tokens=ENDED[kind], seen=3, lora_path=old.name) as (running,):
        dropping = asyncio.create_task(engine.control.unload_adapter(old.name, deadline_s=120))
        await asyncio.sleep(0.1)  # on its way before the load is
        loading = asyncio.create_task(loaded(engine, new))
        _, waiting = await asyncio.wait({loading, dropping}, timeout=0.5)
        assert waiting == {loading, dropping}
        await engine.control.abort_all()
        assert (await running.answer())["meta_info"]["finish_reason"]["type"] == "abort"
        await asyncio.gather(loading, dropping)
    assert await engine.control.adapters() == (new.name,)


async def test_who_asks_for_one_that_was_unloaded_has_it_loaded_again_while_its_folder_is_there(engine: Engine, run: Run):
    version = await loaded(engine, run.version(0))
    await engine.control.unload_adapter(version.name, deadline_s=120)
    assert close(await engine.generate(asking(3, lora_path=version.name)), version)
    assert await engine.control.adapters() == (version.name,)
    await engine.control.unload_adapter(version.name, deadline_s=120)
    shutil.rmtree(version.path)
    for name in (version.name, name_of(RUN, Version(9, 9))):
        status, body = await engine.post("/generate", asking(1, lora_path=name))
        assert (status, name in body["error"]["message"]) == (400, True)


async def test_what_does_not_fit_is_refused_and_the_engine_goes_on(engine: Engine, run: Run, tmp_path: Path, models: Models):
    version = await loaded(engine, run.version(0))
    larger = Run(tmp_path / "larger", models.a, run.lora.model_copy(update={"rank": 8}))
    elsewhere = Run(tmp_path / "elsewhere", models.a, run.lora.model_copy(update={"target_modules": ("q_proj", "lm_head")}))
    for wrong, words in ((larger, "--max-lora-rank"), (elsewhere, "--lora-target-modules")):
        with pytest.raises(ApplyFailed, match=words):
            await engine.control.load_adapter("wrong", wrong.version(0).path, deadline_s=120)
    with pytest.raises(ApplyFailed, match="already loaded"):
        await loaded(engine, version)
    with pytest.raises(ApplyFailed, match=r"adapter_config\.json"):
        await engine.control.load_adapter("wrong", str(tmp_path), deadline_s=120)
    for body in ({"lora_name": "wrong"}, {"lora_path": "x"}, {"lora_name": 3, "lora_path": "x"}):
        assert (await engine.post("/load_lora_adapter", body)).status == 400
    assert (await engine.post("/unload_lora_adapter", {"lora_name": "wrong"})).status == 400
    assert (await engine.post("/generate", asking(1, lora_path=7))).status == 400
    assert close(await engine.generate(asking(3, lora_path=version.name)), version)
    settings = await engine.control.server_info()
    assert without_adapters(run.lora, settings) is None
    assert "--max-lora-rank 8" in str(without_adapters(larger.lora, settings))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_projects_client_says_that_the_adapter_wrote_it_all(engine: Engine, run: Run, stream: bool):
    version = await loaded(engine, run.version(0))
    client = EngineClient(engine.session, engine.setup.api_key, stream=stream)

    async def ask(n: int) -> Any:
        own = Version(1, n)
        sampling = Sampling(max_new_tokens=6, ignore_eos=True)
        return await client.attempt(engine.url, PROMPT, sampling=sampling, rid=f"client-{stream}-{n}", deadline_s=120, assumed=own, adapter=name_of(RUN, own))

    piece = (await ask(0)).piece
    assert [(str(span.version), span.start, span.end) for span in piece.spans] == [("1:0", 0, 6)]
    assert (torch.tensor(piece.logprobs) - version.written(piece.output_ids.tolist())).abs().max() < TOLERANCE
    gone = await ask(8)
    assert (gone.fault, gone.piece) == (Fault.FOREIGN, None), "an engine that was started again has none of our adapters"


async def test_the_reconcilers_way_keeps_the_newest_drops_what_others_left_and_proves_what_it_loads(engine: Engine, run: Run, kind: str):
    control = Desk(engine.session, api_key=engine.setup.api_key, admin_key=engine.setup.admin_key).reconciling(engine.url, adapters=RUN)
    assert isinstance(control, AdapterControl)
    await engine.control.load_adapter("rollstream-other-3-1", run.version(7).path, deadline_s=120)
    await engine.control.load_adapter("somebody-elses", run.version(8).path, deadline_s=120)
    way = AdapterTransport(run.store, control, keep=2, flags="--enable-lora", patience_s=1.0)
    for n in range(3):
        await way.prepare(run.manifest(n), deadline_s=120)
        await way.apply(run.manifest(n), deadline_s=120)
        assert await control.weight_version() == f"1:{n}"
        assert await control.probe(deadline_s=120) == (f"1:{n}",)
    assert way._dropping is not None
    await way._dropping
    assert set(await engine.control.adapters()) == {"somebody-elses", run.version(1).name, run.version(2).name}
    async with engine.running(1, tokens=ENDED[kind], seen=2, lora_path=run.version(1).name) as (running,):
        await way.apply(run.manifest(3), deadline_s=120)
        await way._dropping
        assert (await running.answer())["meta_info"]["finish_reason"]["type"] == "abort", "it held up the versions that come"
    assert set(await engine.control.adapters()) == {"somebody-elses", run.version(2).name, run.version(3).name}
    await way.aclose()
