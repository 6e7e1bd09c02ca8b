"""A checkpoint as one file, for who has plain PyTorch."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepstack import _folder
from stepstack._contents import within
from stepstack._ranks import Ranks
from stepstack._states import GROUPS, options_by_name
from stepstack._storage import Wanted, entries_of, read_metadata, read_tensors
from stepstack._values import from_text, to_text

SUFFIXES = (".pt", ".safetensors")


def export(checkpoint: Path, file: Path, *, optimizer: bool = False) -> int:
    """Write a file, by its suffix; how many tensors it has. All of it is in memory meanwhile.

    - `.pt`: the model's state dict. With `optimizer`, a dict of `model` and `optimizer`, of which the latter is what
      `load_state_dict` of a torch optimizer takes that has the same parameters in the same order; names stand for them.
    - `.safetensors`: the tensors of that state dict. With `optimizer`, those of the states too, as `state.<parameter>
      .<state>`, and the options of the parameters as JSON in the file's metadata.

    ValueError where the checkpoint is damaged, or the folder of `file` is not there; ImportError where there is no
    safetensors.
    """
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file} can't be written: there is no folder {file.parent}")
    if inside := _folder.checkpoint_around(file):
        raise ValueError(f"{file} is inside of the checkpoint {inside}, which one more file would spoil")
    marker = _folder.verify(checkpoint)
    save = _save_safetensors if file.suffix == ".safetensors" else _save_torch
    values = from_text((checkpoint / _folder.VALUES).read_bytes().decode())
    metadata = read_metadata(checkpoint, marker)
    kinds = ("model.", "optimizer.state.") if optimizer else ("model.",)
    tensors: dict[str, Any] = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in entries_of(metadata).items()
        if name.startswith(kinds)
    }
    read_tensors(checkpoint, metadata, Wanted(tensors, {name: name for name in tensors}, {}), Ranks(None))
    aside = file.with_name(f"{file.name}.partial")
    try:
        save(aside, tensors, values if optimizer else {"model": values["model"]})
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    return len(tensors)


def _save_torch(file: Path, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    model = {**within("model", tensors), **values["model"]}
    if "optimizer" not in values:
        torch.save(model, file)
        return
    torch.save({"model": model, "optimizer": _optimizer(within("optimizer", tensors), values["optimizer"])}, file)


def _optimizer(tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Any]:
    states: dict[str, dict[str, Any]] = {}
    for key, value in {**within("state", tensors), **within("state", values)}.items():
        name, _, state = key.rpartition(".")
        states.setdefault(name, {})[state] = value
    options = options_by_name(values)
    groups = [{**options[names[0]], "params": names} for names in values[GROUPS] if names]
    return {"state": states, "param_groups": groups}


def _save_safetensors(file: Path, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("a .safetensors file needs the library: pip install safetensors. Or export to .pt") from error
    metadata = {"format": "pt"}  # which other libraries want to see
    if "optimizer" in values:
        metadata["param_groups"] = to_text(options_by_name(values["optimizer"]))
    save_file({**within("model", tensors), **within("optimizer", tensors)}, file, metadata=metadata)
