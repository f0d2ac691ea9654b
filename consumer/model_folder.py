"""A Hugging Face model folder made of tensors that lie elsewhere, a file at a time: what transformers, SGLang and anybody else loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import orjson

from consumer.shards import dtype_of, shape_of
from protocol.durable import sync_folder, write_file
from weightsync.cast import FLOATS, SPELLED, cast
from weightsync.safetensors_file import cut, index_of, write_tensors
from weightsync.snapshot import TensorBytes
from weightsync.version_files import INDEX_FILE, Form, asset_files

FILE_BYTES = 4 << 30
"""A larger model is in several files."""
_CONFIG = "config.json"


def write_model(folder: Path, tensors: Mapping[str, TensorBytes], beside: Path, *, dtype: str = "") -> None:
    """Fill the new `folder` with `tensors`, floats in `dtype` (torch's name; "" as they are), and what lies in `beside` but weights; it is on the disk then.

    Raises: `OSError`; `WeightError` naming a tensor that does not fit `dtype`; `ShardsDamaged`.
    """
    folder.mkdir()
    for source in asset_files(beside):
        content = source.read_bytes()
        write_file(folder / source.name, _in_dtype(content, dtype) if dtype and source.name == _CONFIG else content)
    forms = {name: _form(tensors, name, dtype) for name in tensors}
    files = cut(forms, FILE_BYTES)
    for file, names in files.items():
        write_tensors(folder / file, cast({name: tensors[name] for name in names}, dtype), durable=True)
    if len(files) > 1:
        write_file(folder / INDEX_FILE, index_of(files, sum(form.nbytes for form in forms.values())))
    sync_folder(folder)


def write_model_atomically(folder: Path, tensors: Mapping[str, TensorBytes], beside: Path, *, dtype: str = "") -> None:
    """As `write_model`: whole, or not there; `folder` may be there if it is empty. Raises: as `write_model`."""
    temporary = folder.parent / f".tmp-{folder.name}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write_model(temporary, tensors, beside, dtype=dtype)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _form(tensors: Mapping[str, TensorBytes], name: str, dtype: str) -> Form:
    spelled = dtype_of(tensors, name)
    return Form(SPELLED[dtype] if dtype and spelled in FLOATS else spelled, shape_of(tensors, name))


def _in_dtype(content: bytes, dtype: str) -> bytes:
    """A model's config.json that says so, by whichever of the two names it has."""
    config = orjson.loads(content)
    config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"torch_dtype": dtype}
    return orjson.dumps(config, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
